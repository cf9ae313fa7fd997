"""Llama-3's byte-level BPE from its tiktoken file: a line a token, its bytes in base64 and its rank.

`reference` is the definition; fastokens serves where it gives the same ids on the probes. Text takes the ordinary
path, so no text becomes one of the 256 control tokens that follow the ranks.
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
from mega.core.text.words import Remembered
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
"""Control tokens with a name, numbered after the ranks; the others are reserved."""
_CONTROLS = 256
LONGEST_PIECE = 10_000
"""Characters of a token in base64: every way to cut it is tried."""


class Llama3Tokenizer(Tokenizer):
    """bos is put in front of every text, as Llama-2's family does; <|end_of_text|> ends a document."""

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
        added = [{"id": token, "content": name, "special": True, **plain} for name, token in self.controls.items()]
        whole |= {"added_tokens": added, "post_processor": leads_with(_NAMED[0], self.bos)}
        named = {"bos_token": _NAMED[0], "eos_token": _NAMED[1]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        return {"tokenizer.json": whole, "tokenizer_config.json": config}

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        names = {token: name.encode() for name, token in self.controls.items()}
        return names | {rank: piece for piece, rank in self._ranks.items()}

    @cached_property
    def engine(self) -> str:
        """Which library serves: "fastokens" or "python"."""
        return self._chosen[0]

    @cached_property
    def _encode(self) -> Encode:
        return self._chosen[1]

    @cached_property
    def _chosen(self) -> tuple[str, Encode]:
        definition = reference(self._ranks)
        found = first_equal("Llama-3 BPE", definition, lambda: _tokenizer_json(self._ranks))
        return found or ("python", definition)


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes -> rank of a tiktoken file whose ranks are 0 .. n - 1 in this order; ValueError otherwise."""
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
    """The definition: cut at the pattern; a piece is itself a token, or its bytes join, lowest rank first."""
    import regex

    words = regex.compile(_WORDS)
    known = Remembered(lambda word: spell(word.encode(), ranks))
    return lambda texts: flatten([[token for word in words.findall(text) for token in known[word]] for text in texts])


def spell(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Ids of one piece: the neighbours whose union has the lowest rank join, the leftmost first, until none can.

    With ranks a 0, b 1, ab 2, aba 3: abab -> ab a b -> ab ab; aba is a token as it stands.
    """
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    none = len(ranks)
    while len(parts) > 1:
        found = [ranks.get(left + right, none) for left, right in pairwise(parts)]
        best = min(found)
        if best == none:
            break
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def _tokenizer_json(ranks: Mapping[bytes, int]) -> str:
    """The same ranks as a tokenizer.json: every way to make a token of two tokens is a merge."""
    letters = byte_letters()
    written = {piece: "".join(map(letters.__getitem__, piece)) for piece in ranks}
    merges = [
        f"{written[piece[:cut]]} {written[piece[cut:]]}"
        for piece in ranks
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    return byte_level_json({written[piece]: rank for piece, rank in ranks.items()}, merges, _WORDS)
