"""Vocabularies in Hugging Face's tokenizer.json, read by the `tokenizers` library.

The file's own template applies (Llama-3's puts bos in front), as in Megatron-LM. Its *special* added tokens
are not looked for in text; its other added tokens are part of the vocabulary and are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mega.core.text.gpt2 import byte_letters
from mega.core.text.probe import FILE_BYTES, check, hugging_face
from mega.core.text.tokenizer import Encoded, Tokenizer, flatten, library_errors
from mega.core.untrusted import parse_json, read_limited

# Names of the end of a text, where no file next to tokenizer.json names it.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_STARTS = ("<|begin_of_text|>", "<s>", "<bos>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NEIGHBOURS = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json. eod, bos and pad come from tokenizer_config.json next to it, or are well-known names."""

    kind = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        check("tokenizers", path)
        with library_errors(f"--tokenizer-model {path}: not a tokenizer.json"):
            self._library = hugging_face(path)
        self._refused = f"--tokenizer-model {path}: fails on what it is to encode or decode"
        self._files = {name: path.with_name(name) for name in _NEIGHBOURS if path.with_name(name).is_file()}
        self._files["tokenizer.json"] = path
        self.eod = self._named("eos_token", _ENDS)
        self.bos = self._named("bos_token", _STARTS)
        self.pad = self._named("pad_token", ())

    def _named(self, key: str, well_known: Sequence[str]) -> int | None:
        """The id of the token that a neighbour file calls `key`, else of the first known name."""
        said = [_content(_read(self._files[name]).get(key)) for name in _NEIGHBOURS if name in self._files]
        names = [name for name in said if name] or well_known
        ids = [self._library.token_to_id(name) for name in names]
        return next((token for token in ids if token is not None), None)

    @property
    def vocab_size(self) -> int:
        """One above the largest id: a vocabulary with holes still needs a row for each id."""
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        with library_errors(self._refused):
            ids: list[int] = self._library.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        with library_errors(self._refused):
            found = self._library.encode_batch_fast(list(texts))
        return flatten([encoding.ids for encoding in found])

    def decode(self, ids: Iterable[int]) -> str:
        with library_errors(self._refused):
            return str(self._library.decode([int(token) for token in ids], skip_special_tokens=False))

    def control(self, name: str) -> int | None:
        found: int | None = self._library.token_to_id(name)
        return found

    def token_bytes(self, token: int) -> bytes:
        piece = self._library.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._byte_letters:
            return b"".join(self._byte_letters.get(letter) or letter.encode() for letter in piece)
        if _BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()

    @cached_property
    def _special(self) -> set[int]:
        return {token for token, added in self._library.get_added_tokens_decoder().items() if added.special}

    @cached_property
    def _byte_letters(self) -> dict[str, bytes]:
        """Letter -> byte where the vocabulary spells bytes as letters, as GPT-2's; else empty."""
        spells = '"ByteLevel"' in json.dumps(json.loads(self._library.to_str()).get("decoder"))
        return {letter: bytes([byte]) for byte, letter in byte_letters().items()} if spells else {}

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    def huggingface_files(self) -> dict[str, dict[str, Any]]:
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        named = {key: self._library.id_to_token(token) for key, token in ids.items() if token is not None}
        return {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named}}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError naming the file where it is not one."""
    what = f"--tokenizer-model: {path}"
    found = parse_json(read_limited(path, FILE_BYTES, what), what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} holds no JSON object")
    return found


def _content(token: Any) -> str | None:
    """A token is written as its text or as {"content": text, ...}."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
