"""Questions of benchmarks as n-grams, and where a text has one: what decontamination looks for.

A question of fewer than `shortest` words is left out, one of fewer than `longest` is one n-gram, and of a longer one
each run of `longest` words is. Source: Megatron-LM 23.06, tools/openwebtext/filter_ngrams.py.
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
"""Under which keys the files of a task have their questions."""
ANY_KEYS = ("question", "questions", "text", "prompt")
_MARKS = ".!?"
_WORD = re.compile(r"\w+")


class WordPositions(NamedTuple):
    """The words of a text in lower case, and where each begins in it."""

    words: list[str]
    begins: list[int]


def words_of(text: str, *, as_megatron: bool = False) -> WordPositions:
    """as_megatron: positions are those in the lower-cased text, which may be longer.

    >>> words_of("İt is").begins, words_of("İt is", as_megatron=True).begins
    ([0, 3], [0, 2, 4])
    """
    found = list(_WORD.finditer(text.lower() if as_megatron else text))
    return WordPositions([match[0].lower() for match in found], [match.start() for match in found])


def questions(task: str, path: Path) -> Iterator[str]:
    """The questions of a task's file, or of all files of its folder: JSON, JSON lines, lines of .txt; also in .gz.

    Errors: ValueError naming the file if it holds none.
    """
    paths = sorted(inside for inside in path.rglob("*") if inside.is_file()) if path.is_dir() else [path]
    count = 0
    for one in paths:
        for question in _read(one, QUESTION_KEYS.get(task, ANY_KEYS)):
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
        yield from _found(json.loads(text), keys)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise ValueError(f"--task-data {path}:{number}: not JSON ({error.msg})") from None
            yield from _found(found, keys)


def _found(value: object, keys: tuple[str, ...]) -> Iterator[str]:
    """All texts under one of the keys, at any depth."""
    if isinstance(value, list):
        for inside in value:
            yield from _found(inside, keys)
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _texts(inside) if key in keys else _found(inside, keys)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inside in value:
            yield from _texts(inside)
    elif isinstance(value, dict):  # CoQA's questions, Natural Questions' question
        yield from _texts(value.get("input_text", value.get("text", value.get("question"))))


def ngrams(texts: Iterable[str], shortest: int, longest: int) -> dict[str, int]:
    """The n-grams of some questions, each with the number of its words."""
    found: dict[str, int] = {}
    for text in texts:
        words = words_of(text).words
        if len(words) < shortest:
            continue
        size = min(len(words), longest)
        for begin in range(len(words) - size + 1):
            found[" ".join(words[begin : begin + size])] = size
    return found


class Hit(NamedTuple):
    """An n-gram in a text: where it begins there."""

    begin: int
    ngram: str


@dataclass(frozen=True)
class Finder:
    """Finds the first n-gram of a text: at each word the longest, then the shorter ones. longest: words of a window; a
    text of fewer is not searched, and the shorter n-grams at its very end only if it has more."""

    ngrams: dict[str, int]
    longest: int
    as_megatron: bool = False

    def __post_init__(self) -> None:
        lengths = sorted(set(self.ngrams.values()) - {self.longest})
        hashes = {size: _hashes(ngram for ngram, own in self.ngrams.items() if own == size) for size in lengths}
        object.__setattr__(self, "_lengths", lengths)
        object.__setattr__(self, "_hashes", hashes | {self.longest: _hashes(self._of(self.longest))})

    def _of(self, size: int) -> list[str]:
        return [ngram for ngram, own in self.ngrams.items() if own == size]

    def may_have(self, text: str) -> bool:
        """Whether any n-gram can be in a text: false for nearly all that have none, and never for one that has."""
        plain = text.isascii()  # both find the same words there, and one is faster
        words = words_of_text(text) if plain else words_of(text, as_megatron=self.as_megatron).words
        codes = word_codes(words)
        known: dict[int, NDArray[np.uint64]] = self._hashes  # type: ignore[attr-defined]
        return any(_meet(_runs(codes, size), own) for size, own in known.items())

    def first(self, text: str) -> Hit | None:
        """The first n-gram."""
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


def _meet(runs: NDArray[np.uint64], known: NDArray[np.uint64]) -> bool:
    """Whether any run is a known one. known: sorted; there are far more of them, so `np.isin` would be slow."""
    if not len(known):
        return False
    at = np.minimum(np.searchsorted(known, runs), len(known) - 1)
    return bool((known[at] == runs).any())


def _hashes(found: Iterable[str]) -> NDArray[np.uint64]:
    rows = [_runs(word_codes(words := ngram.split(" ")), len(words)) for ngram in found]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.uint64)


def before_and_after(text: str, hit: Hit, margin: int) -> tuple[str, str]:
    """What is before a sentence end `margin` characters before an n-gram, and after one as far behind it.

    >>> before_and_after("One. Two. what is it. Three. Four.", Hit(10, "what is it"), 1)
    ('One. Two.', ' Three. Four.')
    """
    at = hit.begin - margin
    while at > 0 and text[at] not in _MARKS:
        at -= 1
    before = text[: at + 1] if at > 0 else ""
    at = hit.begin + len(hit.ngram) + margin
    while at < len(text) and text[at] not in _MARKS:
        at += 1
    return before, text[at + 1 :]
