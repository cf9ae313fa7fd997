"""A tokenizer whose texts are integers separated by spaces. For tests, and for ids made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mega.core.text.tokenizer import Tokenizer


class NullTokenizer(Tokenizer):
    """Ids 0 .. size - 1 stand for themselves, and `size` ends a document: "7 0 12" <-> [7, 0, 12].

    The tokenizer does not check ids against its size; neither does Megatron-LM's, whose sample corpus has larger ids.
    Training refuses such ids.
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
        """Raises ValueError if a word is not a non-negative integer of at most 31 bits."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < 2**31):
                raise ValueError(f"NullTokenizer: {word[:40]!r} is not an integer of 0 .. {2**31 - 1}")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(token) for token in ids)

    def files(self) -> Mapping[str, Path]:
        return {}
