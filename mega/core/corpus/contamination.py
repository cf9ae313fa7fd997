"""Collects the n-grams of benchmark questions, and searches texts for these n-grams.

A question with fewer than `shortest` words is ignored. A question with at most `longest` words is one n-gram. For a
longer question, every window of `longest` words is an n-gram. Source: Megatron-LM 23.06,
tools/openwebtext/filter_ngrams.py.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.minhash import mixed, word_codes, words_of_text

QUESTION_KEYS = {
    "lambada": ("text",),
    "squad": ("question",),
    "natural_questions": ("question", "question_text"),
    "triviaqa": ("question", "Question"),
    "webqa": ("question", "utterance", "RawQuestion"),
    "race": ("questions",),
    "drop": ("question",),
    "coqa": ("questions",),
    "piqa": ("goal",),
}
"""Task -> JSON keys under which the task's files store questions."""
ANY_KEYS = ("question", "questions", "text", "prompt")
_MARKS = ".!?"
_WORD = re.compile(r"\w+")


class WordPositions(NamedTuple):
    """The lower-case words of a text, and the offset of each word."""

    words: list[str]
    begins: list[int]


def words_of(text: str, *, as_megatron: bool = False) -> WordPositions:
    """Return the words of a text with their offsets. as_megatron: whether offsets refer to the lower-cased text, which
    may be longer than the text.

    >>> words_of("İt is").begins, words_of("İt is", as_megatron=True).begins
    ([0, 3], [0, 2, 4])
    """
    matches = list(_WORD.finditer(text.lower() if as_megatron else text))
    return WordPositions([match[0].lower() for match in matches], [match.start() for match in matches])


def questions(task: str, path: Path) -> Iterator[str]:
    """Yield the questions in a task's file or folder. Files are JSON, JSON lines, or .txt with one question per line,
    optionally compressed as .gz.

    Errors: ValueError naming the file if it contains no question.
    """
    paths = sorted(inside for inside in path.rglob("*") if inside.is_file()) if path.is_dir() else [path]
    count = 0
    for file in paths:
        for question in _read(file, QUESTION_KEYS.get(task, ANY_KEYS)):
            count += 1
            yield question
    if not count:
        keys = ", ".join(QUESTION_KEYS.get(task, ANY_KEYS))
        raise ValueError(f"--task-data {task}={path}: no question found; must have one under any of {keys}")


def _read(path: Path, keys: tuple[str, ...]) -> Iterator[str]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"--task-data {path}: cannot be read ({error})") from None
    if path.name.removesuffix(".gz").endswith(".txt") and not text.lstrip().startswith("{"):
        yield from (line for line in text.splitlines() if line.strip())
        return
    try:
        yield from _texts_under(json.loads(text), keys)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                content = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise ValueError(f"--task-data {path}:{number}: not JSON ({error.msg})") from None
            yield from _texts_under(content, keys)


def _texts_under(value: object, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield all strings stored under any of the keys, at any nesting depth."""
    if isinstance(value, list):
        for inside in value:
            yield from _texts_under(inside, keys)
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _texts(inside) if key in keys else _texts_under(inside, keys)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inside in value:
            yield from _texts(inside)
    elif isinstance(value, dict):  # the questions of CoQA and Natural Questions
        yield from _texts(value.get("input_text", value.get("text", value.get("question"))))


def ngrams(texts: Iterable[str], shortest: int, longest: int) -> dict[str, int]:
    """Return a dict: n-gram -> number of its words, for all n-grams of the questions."""
    sizes: dict[str, int] = {}
    for text in texts:
        words = words_of(text).words
        if len(words) < shortest:
            continue
        size = min(len(words), longest)
        for begin in range(len(words) - size + 1):
            sizes[" ".join(words[begin : begin + size])] = size
    return sizes


class Hit(NamedTuple):
    """An n-gram found in a text, with its offset."""

    begin: int
    ngram: str


@dataclass(frozen=True)
class Finder:
    """Finds the first n-gram in a text. At each word, the longest n-grams are tried first.

    A text with fewer than `longest` words is not searched. Shorter n-grams in the last words of a text are found only
    if the text has more than `longest` words.
    """

    ngrams: dict[str, int]
    """n-gram -> number of words in it."""
    longest: int
    """Number of words in the longest n-gram."""
    as_megatron: bool = False
    """Whether offsets refer to the lower-cased text."""

    def __post_init__(self) -> None:
        lengths = sorted(set(self.ngrams.values()) - {self.longest})
        hashes = {
            size: _hashes(ngram for ngram, word_count in self.ngrams.items() if word_count == size) for size in lengths
        }
        object.__setattr__(self, "_lengths", lengths)
        object.__setattr__(self, "_hashes", hashes | {self.longest: _hashes(self._of(self.longest))})

    def _of(self, size: int) -> list[str]:
        return [ngram for ngram, word_count in self.ngrams.items() if word_count == size]

    def may_have(self, text: str) -> bool:
        """Test quickly whether a text may contain an n-gram. There are no false negatives and few false positives."""
        is_ascii = text.isascii()  # for ASCII text, `words_of_text` returns the same words and is faster
        words = words_of_text(text) if is_ascii else words_of(text, as_megatron=self.as_megatron).words
        codes = word_codes(words)
        hashes_of_size: dict[int, NDArray[np.uint64]] = self._hashes  # type: ignore[attr-defined]
        return any(_any_match(_runs(codes, size), hashes) for size, hashes in hashes_of_size.items())

    def first(self, text: str) -> Hit | None:
        """Return the first n-gram in a text, or None."""
        words, begins = words_of(text, as_megatron=self.as_megatron)
        lengths: list[int] = self._lengths  # type: ignore[attr-defined]
        last = len(words) - self.longest
        for begin in range(last + 1):
            for size in (self.longest, *lengths):
                if (ngram := " ".join(words[begin : begin + size])) in self.ngrams:
                    return Hit(begins[begin], ngram)
        if last > 0:
            for size in lengths:
                for begin in range(last, len(words) - size + 1):
                    if (ngram := " ".join(words[begin : begin + size])) in self.ngrams:
                        return Hit(begins[begin], ngram)
        return None


def _runs(codes: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    count = max(len(codes) - size + 1, 0)
    h = np.zeros(count, np.uint64)
    for i in range(size):
        h = h * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + count]
    return mixed(h)


def _any_match(runs: NDArray[np.uint64], sorted_hashes: NDArray[np.uint64]) -> bool:
    """Whether any element of `runs` is in `sorted_hashes`. A binary search is used. `np.isin` would be slow, because
    `sorted_hashes` is much longer than `runs`."""
    if not len(sorted_hashes):
        return False
    positions = np.minimum(np.searchsorted(sorted_hashes, runs), len(sorted_hashes) - 1)
    return bool((sorted_hashes[positions] == runs).any())


def _hashes(texts: Iterable[str]) -> NDArray[np.uint64]:
    rows = [_runs(word_codes(words := ngram.split(" ")), len(words)) for ngram in texts]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.uint64)


def before_and_after(text: str, hit: Hit, margin: int) -> tuple[str, str]:
    """Return the text before and the text after an n-gram, each cut at a sentence end that is at least `margin`
    characters away from the n-gram.

    >>> before_and_after("One. Two. what is it. Three. Four.", Hit(10, "what is it"), 1)
    ('One. Two.', ' Four.')
    """
    position = hit.begin - margin
    while position > 0 and text[position] not in _MARKS:
        position -= 1
    before = text[: position + 1] if position > 0 else ""
    position = hit.begin + len(hit.ngram) + margin
    while position < len(text) and text[position] not in _MARKS:
        position += 1
    return before, text[position + 1 :]
