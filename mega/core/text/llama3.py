"""Llama-3's byte-level BPE, from its tiktoken file. Each line of this file contains a token's bytes in base64 and the
token's rank.

`reference` defines the ids; fastokens is used if it produces the same ids on the probes. Texts are encoded as ordinary
text, so encoding never yields one of the 256 control tokens, whose ids follow the ranks.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from mega.core.text.fast import Encode, byte_level_json, first_equal
from mega.core.text.gpt2 import byte_letters
from mega.core.text.probe import FILE_BYTES
from mega.core.text.sentencepiece_json import leads_with
from mega.core.text.tokenizer import Encoded, Tokenizer, flatten
from mega.core.text.words import WordCache
from mega.core.untrusted import Json, read_limited

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
"""Id of a control token, counted from the end of the ranks -> name of the token. All other control tokens are
reserved."""
_CONTROLS = 256
LONGEST_PIECE = 10_000
"""Maximum number of base64 characters in a token, limited because every way to split a token in two is tried."""


class Llama3Tokenizer(Tokenizer):
    """Llama-3's tokenizer. bos precedes every text, as in Llama-2, and <|end_of_text|> ends a document."""

    kind = "Llama3Tokenizer"
    pad = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ranks = read_ranks(path)
        first, reserved = len(self._ranks), 0
        self.controls: dict[str, int] = {}
        for i in range(_CONTROLS):
            self.controls[_NAMED.get(i, f"<|reserved_special_token_{reserved}|>")] = first + i
            reserved += i not in _NAMED
        self.bos = self.controls["<|begin_of_text|>"]
        self.eod = self.controls["<|end_of_text|>"]

    @property
    def vocab_size(self) -> int:
        return len(self._ranks) + _CONTROLS

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        import numpy as np

        ids, offsets = self._encode(texts)
        begins = np.insert(ids.astype(np.int64), offsets[:-1], self.bos)
        return Encoded(begins, offsets + np.arange(len(offsets)))

    def control(self, name: str) -> int | None:
        return self.controls.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        return self.controls

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._bytes[int(token)] for token in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token >= len(self._ranks) else self._bytes[token]

    def files(self) -> Mapping[str, Path]:
        return {"tokenizer.model": self._path}

    def huggingface_files(self) -> dict[str, dict[str, Json]]:
        whole = json.loads(_tokenizer_json(self._ranks))
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added_tokens = [
            {"id": token, "content": name, "special": True, **plain} for name, token in self.controls.items()
        ]
        whole |= {"added_tokens": added_tokens, "post_processor": leads_with(_NAMED[0], self.bos)}
        names = {"bos_token": _NAMED[0], "eos_token": _NAMED[1]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        return {"tokenizer.json": whole, "tokenizer_config.json": config}

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        names = {token: name.encode() for name, token in self.controls.items()}
        return names | {rank: piece for piece, rank in self._ranks.items()}

    @cached_property
    def engine(self) -> str:
        """The encoder in use: "fastokens" or "python"."""
        return self._chosen[0]

    @cached_property
    def _encode(self) -> Encode:
        return self._chosen[1]

    @cached_property
    def _chosen(self) -> tuple[str, Encode]:
        definition = reference(self._ranks)
        engine = first_equal("Llama-3 BPE", definition, lambda: _tokenizer_json(self._ranks))
        return engine or ("python", definition)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken file, and return a map from a token's bytes to its rank. Errors: ValueError if the ranks are not
    0 .. n - 1 in order."""
    ranks: dict[bytes, int] = {}
    lines = read_limited(path, FILE_BYTES, f"--tokenizer-model {path}").splitlines()
    try:
        for number, line in enumerate(lines):
            piece, rank = line.split()
            if len(piece) > LONGEST_PIECE:
                raise ValueError(f"a token of {len(piece)} characters, at most {LONGEST_PIECE} are read")
            if int(rank) != number:
                raise ValueError(f"rank {rank.decode()} where {number} is due")
            if ranks.setdefault(base64.b64decode(piece, validate=True), number) != number:
                raise ValueError(f"the token of rank {rank.decode()} is there already")
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"--tokenizer-model {path}: not a tiktoken file, line {len(ranks) + 1} ({error})") from None
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"--tokenizer-model {path}: not a tiktoken file (it lacks some of the 256 bytes)")
    return ranks


def reference(ranks: Mapping[bytes, int]) -> Encode:
    """Return the encoder that defines the ids. The encoder splits texts into words at the pattern. A word that is a
    token gets the token's id; the bytes of any other word are merged by lowest rank."""
    import regex

    words = regex.compile(_WORDS)
    ids_of = WordCache(lambda word: spell(word.encode(), ranks))
    return lambda texts: flatten([[token for word in words.findall(text) for token in ids_of[word]] for text in texts])


def spell(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Encode one word by repeatedly merging the adjacent parts whose concatenation has the lowest rank, the leftmost
    first, until no parts can be merged.

    With ranks a 0, b 1, ab 2, aba 3: abab -> ab a b -> ab ab; the word aba is itself a token.
    """
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    no_rank = len(ranks)
    while len(parts) > 1:
        pair_ranks = [ranks.get(first + second, no_rank) for first, second in pairwise(parts)]
        best = min(pair_ranks)
        if best == no_rank:
            break
        index = pair_ranks.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [ranks[part] for part in parts]


def _tokenizer_json(ranks: Mapping[bytes, int]) -> str:
    """Return the ranks as the text of a tokenizer.json, in which every pair of tokens whose concatenation is a token
    becomes a merge."""
    letters = byte_letters()
    letters_of = {piece: "".join(map(letters.__getitem__, piece)) for piece in ranks}
    merges = [
        f"{letters_of[piece[:cut]]} {letters_of[piece[cut:]]}"
        for piece in ranks
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    return byte_level_json({letters_of[piece]: rank for piece, rank in ranks.items()}, merges, _WORDS)
