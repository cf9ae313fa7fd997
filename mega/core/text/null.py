"""A tokenizer whose texts are integers separated by spaces, for tests and for ids from other programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mega.core.text.tokenizer import Tokenizer


class NullTokenizer(Tokenizer):
    """Maps texts such as "7 0 12" to the ids [7, 0, 12]. Ids are 0 .. size - 1, and the id `size` ends a document.

    As in Megatron-LM, whose sample corpus has larger ids, the tokenizer does not compare ids with its size. Training
    rejects ids that are too large.
    """

    kind = "NullTokenizer"
    bos = None
    pad = None

    def __init__(self, size: int) -> None:
        self.eod = size

    @property
    def vocab_size(self) -> int:
        assert self.eod is not None
        return self.eod + 1

    def encode(self, text: str) -> list[int]:
        """Encode a text of integers. Errors: ValueError if a word is not a non-negative integer of at most 31 bits."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < 2**31):
                raise ValueError(f"NullTokenizer: {word[:40]!r} is not an integer of 0 .. {2**31 - 1}")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(token) for token in ids)

    def files(self) -> Mapping[str, Path]:
        return {}
