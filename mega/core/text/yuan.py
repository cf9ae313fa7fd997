"""The tokenizer of Yuan and CPM-2. jieba splits Chinese text into words, which are then split into pieces of the
vocabulary.

In pieces, U+2582 represents a space, and U+2583 a newline. Encoding omits a space between two western tokens, and
decoding restores it. A token is western if it is not a space and contains no Chinese character. jieba is needed only
for encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mega.core.text.tokenizer import Tokenizer
from mega.core.text.wordpiece import read_pieces

_BLANK, _NEWLINE = "\u2582", "\u2583"
_WRITTEN = str.maketrans({" ": _BLANK, "\n": _NEWLINE})
_READ = str.maketrans({_BLANK: " ", _NEWLINE: "\n"})
_LONGEST_WORD = 200


class YuanTokenizer(Tokenizer):
    """A tokenizer from a vocab.txt with one piece per line, including <unk>, <eod> and <pad>."""

    kind = "EncDecTokenizer"
    bos = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._vocab = read_pieces(path)
        for name in ("<unk>", "<eod>", "<pad>", _BLANK):
            if name not in self._vocab:
                raise ValueError(f"--vocab-file {path}: has no {name}, which {self.kind} needs")
        self._pieces = {token: piece for piece, token in self._vocab.items()}
        self._unknown, self._blank = self._vocab["<unk>"], self._vocab[_BLANK]
        self.eod, self.pad = self._vocab["<eod>"], self._vocab["<pad>"]

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def encode(self, text: str) -> list[int]:
        words = self._words.cut(text, HMM=True)  # jieba must see the original spaces, because it keeps \r\n as one word
        tokens = [token for word in words for token in self._spell(word.translate(_WRITTEN))]
        return self._without_blanks(tokens)

    def decode(self, ids: Iterable[int]) -> str:
        tokens = [int(token) for token in ids]
        text = ""
        for i, token in enumerate(tokens):
            piece = self._pieces[token]
            if i and not piece.startswith("##") and self._marked(tokens[i - 1], token):
                text += _BLANK
            text += piece.removeprefix("##")
        return text.translate(_READ)

    def control(self, name: str) -> int | None:
        return self._vocab.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        names = ("<unk>", "<eod>", "<pad>", "<s>", "</s>", "<sep>", "<mask>")
        return {name: self._vocab[name] for name in names if name in self._vocab}

    def unpublished(self) -> str | None:
        return f"transformers has none that cuts texts by words of jieba as {self.kind} does"

    def files(self) -> Mapping[str, Path]:
        return {"vocab.txt": self._path}

    def _without_blanks(self, tokens: list[int]) -> list[int]:
        """Omit each space between two western tokens."""
        return [
            token
            for i, token in enumerate(tokens)
            if token != self._blank
            or not 0 < i < len(tokens) - 1
            or not (self._western(tokens[i - 1]) and self._western(tokens[i + 1]))
        ]

    def _western(self, token: int) -> bool:
        return token != self._blank and not is_chinese(self._pieces[token])

    def _marked(self, left: int, right: int) -> bool:
        """Whether decoding inserts a space between two tokens, that is, whether both are western and neither is a
        newline."""
        return all(self._western(token) and self._pieces[token] != _NEWLINE for token in (left, right))

    def _spell(self, word: str) -> list[int]:
        """Split a word from left to right into the longest possible pieces. A character with which no piece begins
        becomes <unk>.

        A piece that continues a word has the prefix `##`, unless it contains a Chinese character.
        """
        if len(word) > _LONGEST_WORD:
            return [self._unknown]
        token_ids: list[int] = []
        start = 0
        while start < len(word):
            chinese = next((i for i in range(start, len(word)) if is_chinese(word[i])), len(word))
            for end in range(len(word), start, -1):
                mark = "##" if start and end <= chinese else ""
                token = self._vocab.get(mark + word[start:end])
                if token is not None:
                    token_ids.append(token)
                    start = end
                    break
            else:
                token_ids.append(self._unknown)
                start += 1
        return token_ids

    @cached_property
    def _words(self) -> Any:
        try:
            import jieba
        except ImportError:
            raise ValueError("--tokenizer EncDecTokenizer: needs jieba; pip install '.[yuan]' in a clone") from None
        jieba.setLogLevel("WARNING")
        return jieba.Tokenizer()


def is_chinese(text: str) -> bool:
    """Whether any character is in U+4E00 .. U+9FFF."""
    return any("\u4e00" <= character <= "\u9fff" for character in text)
