"""A tokenizer that the project does not know: a text is its UTF-8 bytes. All that adding one takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mega.core.text.build import TokenizerFiles, register_tokenizer
from mega.core.text.tokenizer import Tokenizer

KIND = "ToyTokenizer"


class ToyTokenizer(Tokenizer):
    """Ids 0 .. 255 are bytes and 256 ends a document. The file of names is one line a control token, ids from 257."""

    kind = KIND
    eod = 256
    bos = None
    pad = None

    def __init__(self, names: Path) -> None:
        self.path = names
        self.names = {name: 257 + number for number, name in enumerate(names.read_text(encoding="utf-8").splitlines())}

    @property
    def vocab_size(self) -> int:
        return 257 + len(self.names)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def control(self, name: str) -> int | None:
        return self.names.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        return {**super().special_tokens(), **self.names}

    def files(self) -> Mapping[str, Path]:
        return {"vocab.txt": self.path}


def make(given: TokenizerFiles) -> Tokenizer:
    return ToyTokenizer(given.vocab())


def register() -> None:
    register_tokenizer(KIND, ("vocab_file",), make)
