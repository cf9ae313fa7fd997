"""BERT's WordPiece from vocab.txt, one piece a line: Google's rules, word by word through a cache.

A word is what lies between blanks, or one Chinese character; every rule acts within a word, so that one that was
seen before costs a look-up. Control tokens in a text are split like other text.

Source: google-research/bert, tokenization.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mega.core.text.probe import FILE_BYTES
from mega.core.text.tokenizer import Encoded, Roles, Tokenizer, flatten
from mega.core.text.words import Remembered
from mega.core.untrusted import read_limited

_CHINESE = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_WORDS = re.compile(rf"[{_CHINESE}]|[^\s{_CHINESE}]+")
# Control characters at which Python would cut a word, but which the rules drop, joining what is around them.
_JOINING = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_ASCII_CONTROLS = re.compile("[\x00-\x1f\x7f]+")
_ASCII_PARTS = re.compile("[0-9A-Za-z]+|[!-/:-@[-`{-~]")
_LONGEST_WORD = 200
_REQUIRED = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")


class WordPieceTokenizer(Tokenizer):
    """vocab.txt; [BOS], [EOS] and <extra_id_0> ... follow its lines where the file lacks them."""

    bos: int
    pad: int
    eod = None

    def __init__(self, path: Path, *, lower: bool, extra_ids: int = 0) -> None:
        self.kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
        self._path, self._lower = path, lower
        self._vocab = read_pieces(path)
        for name in _REQUIRED:
            if name not in self._vocab:
                raise ValueError(f"--vocab-file {path}: has no {name}, which {self.kind} needs")
        self._sentinels = sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        self.added_sentinels = sum(name not in self._vocab for name in sentinels)
        self.added_ends = sum(name not in self._vocab for name in ("[BOS]", "[EOS]"))
        for name in ("[BOS]", "[EOS]", *sentinels):
            self._vocab.setdefault(name, len(self._vocab))
        self._pieces = {token: piece for piece, token in self._vocab.items()}
        self._known = Remembered(self._word_ids)
        at = self._vocab.__getitem__
        self.pad, self.bos = at("[PAD]"), at("[BOS]")
        self.roles = Roles(
            cls=at("[CLS]"),
            sep=at("[SEP]"),
            mask=at("[MASK]"),
            pad=self.pad,
            bos=self.bos,
            eos=at("[EOS]"),
            sentinels=tuple(map(at, sentinels)),
        )

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def encode(self, text: str) -> list[int]:
        if _JOINING.search(text):
            text = _JOINING.sub("", text)
        known = self._known
        return [token for word in _WORDS.findall(text) for token in known[word]]

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        return flatten([self.encode(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Pieces apart by blanks, continuations joined to what is before them."""
        return " ".join(self._pieces[int(token)] for token in ids).replace(" ##", "")

    def continues(self, token: int) -> bool:
        return self._pieces[token].startswith("##")

    def control(self, name: str) -> int | None:
        return self._vocab.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        names = (*_REQUIRED, "[BOS]", "[EOS]", *self._sentinels)
        return {name: self._vocab[name] for name in names}

    def files(self) -> Mapping[str, Path]:
        return {"vocab.txt": self._path}

    def _word_ids(self, word: str) -> list[int]:
        """A word between blanks: cleaned, lower-cased, cut at punctuation, each part spelt in pieces."""
        if word.isascii():  # by far the most, and for them every rule is one call
            word = _ASCII_CONTROLS.sub("", word)
            parts = _ASCII_PARTS.findall(word.lower() if self._lower else word)
            return [token for part in parts for token in self._spell(part)]
        word = "".join(c for c in word if c != "\ufffd" and unicodedata.category(c) not in ("Cc", "Cf"))
        if self._lower:
            word = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
        return [token for part in _parts(word) for token in self._spell(part)]

    def _spell(self, word: str) -> list[int]:
        """The longest piece first, from the left; one [UNK] where that leads nowhere or the word is too long."""
        found: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                token = self._vocab.get(prefix + word[start:end])
                if token is not None:
                    found.append(token)
                    start = end
                    break
            else:
                return [self._vocab["[UNK]"]]
        return found if start else [self._vocab["[UNK]"]]


def read_pieces(path: Path) -> dict[str, int]:
    """piece -> line number of a vocab.txt; ValueError where it is not UTF-8 or holds a piece twice."""
    try:
        lines = read_limited(path, FILE_BYTES, f"--vocab-file {path}").decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--vocab-file {path}: not UTF-8 ({error})") from None
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        if vocab.setdefault(line.strip(), number) != number:
            raise ValueError(f"--vocab-file {path}:{number + 1}: {line.strip()!r} stands on an earlier line too")
    return vocab


def _parts(word: str) -> Iterator[str]:
    """`don't!` -> don ' t !"""
    begin = 0
    for i, character in enumerate(word):
        if _is_punctuation(character):
            if begin < i:
                yield word[begin:i]
            yield character
            begin = i + 1
    if begin < len(word):
        yield word[begin:]


def _is_punctuation(character: str) -> bool:
    """All of ASCII that is neither letter, digit nor blank, and Unicode's punctuation."""
    code = ord(character)
    return (
        33 <= code <= 47
        or 58 <= code <= 64
        or 91 <= code <= 96
        or 123 <= code <= 126
        or unicodedata.category(character).startswith("P")
    )
