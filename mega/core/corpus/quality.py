"""Filters documents by text quality, with the rules and thresholds published for two corpora. Words are separated by
whitespace.

    gopher-quality      Rae et al. (2021), table A1: length, words, symbols, bullets, English stop words
    gopher-repetition   Rae et al. (2021), table A1: repeated lines, paragraphs and n-grams
    fineweb             Penedo et al. (2024), section 3.6: line ends, short lines, repeated lines, lists

A document is dropped at the first rule that it breaks. Each preset is a function of a `Measured` text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import regex

from mega.core.corpus.documents import CorpusDocument, Result, Work, drop_document, each, keep_document

QualityPreset = Literal["gopher-quality", "gopher-repetition", "fineweb"]
STOP_WORDS = frozenset("the be to of and that have with".split())
_PUNCTUATION = regex.compile(r"[\p{P}\p{S}]+")
_SENTENCE_END = regex.compile(r"\p{Sentence_Terminal}\Z")
TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
"""(n, maximum fraction of the characters that the most frequent word n-gram may cover)."""
REPEATED_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
"""(n, maximum fraction of the characters that repeated word n-grams may cover)."""


class Measured:
    """A text with its words, lines and other units. Each property is computed when a rule first uses it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """The text's words, which are sequences of characters without whitespace."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """All lines, including empty lines."""
        return self.text.splitlines()

    @cached_property
    def plain_words(self) -> list[str]:
        """Words that do not consist only of punctuation."""
        return [word for word in self.words if not _PUNCTUATION.fullmatch(word)]


Rules = Iterator["tuple[str, bool]"]
"""Yields (reason, whether the text must be dropped for this reason)."""


def gopher_quality(text: Measured) -> Rules:
    """Yield the rules of gopher-quality. Source: Rae et al. (2021), appendix A1.1."""
    words, plain = text.words, text.plain_words
    yield "fewer than 50 words", len(plain) < 50
    yield "more than 100,000 words", len(plain) > 100_000
    mean = sum(map(len, plain)) / len(plain)
    yield "words of fewer than 3 characters", mean < 3
    yield "words of more than 10 characters", mean > 10
    yield "hashes", text.text.count("#") / len(words) > 0.1
    yield "ellipses", (text.text.count("...") + text.text.count("\u2026")) / len(words) > 0.1
    lines = text.lines
    yield "bullets", sum(line.lstrip().startswith(("\u2022", "-")) for line in lines) / len(lines) > 0.9
    yield "lines end in an ellipsis", sum(_ends(line, "...", "\u2026") for line in lines) / len(lines) > 0.3
    yield "words without letters", sum(any(map(str.isalpha, word)) for word in words) / len(words) < 0.8
    yield "stop words are missing", len(STOP_WORDS.intersection(words)) < 2


def _ends(line: str, *ends: str) -> bool:
    return line.rstrip().endswith(ends)


def gopher_repetition(text: Measured) -> Rules:
    """Yield the rules of gopher-repetition. Source: Rae et al. (2021), appendix A1.1."""
    if not text.text:
        yield "empty", True
    size = len(text.text)
    for name, parts in (
        ("paragraphs", re.split(r"\n{2,}", text.text.strip())),
        ("lines", re.split(r"\n+", text.text)),
    ):
        count, characters = repeated(parts)
        yield f"repeated {name}", count / len(parts) > 0.3
        yield f"characters in repeated {name}", characters / size > 0.2
    words = text.words
    for n, most in TOP_NGRAMS:
        yield f"one run of {n} words", _commonest(words, n) / size > most
    for n, most in REPEATED_NGRAMS:
        yield f"repeated runs of {n} words", _repeated_runs(words, n) / size > most


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return (number of elements that occurred earlier in the sequence, total number of characters of these elements).

    >>> repeated(["a", "bc", "a", "bc", "bc"])
    (3, 5)
    """
    earlier: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in earlier:
            count, characters = count + 1, characters + len(part)
        earlier.add(part)
    return count, characters


def _commonest(words: Sequence[str], n: int) -> int:
    """Return the number of characters in all occurrences of the most common word n-gram."""
    runs = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    if not runs:
        return 0
    run, count = runs.most_common(1)[0]
    return len(run) * count


def _repeated_runs(words: Sequence[str], n: int) -> int:
    """Return the number of characters in word n-grams that repeat an earlier n-gram. The search continues after the end
    of each repeated n-gram."""
    earlier: set[str] = set()
    characters = word = 0
    while word <= len(words) - n:
        run = "".join(words[word : word + n])
        if run in earlier:
            characters, word = characters + len(run), word + n
        else:
            earlier.add(run)
            word += 1
    return characters


def fineweb(text: Measured) -> Rules:
    """Yield the rules of fineweb. Source: Penedo et al. (2024), as implemented in datatrove's filter."""
    lines = [line for line in text.text.split("\n") if line.strip()]
    if not lines:
        yield "empty", True
    yield "lines without punctuation at the end", sum(map(bool, map(_SENTENCE_END.search, lines))) / len(lines) < 0.12
    yield "short lines", sum(len(line) <= 30 for line in lines) / len(lines) > 0.67
    yield "characters in repeated lines", repeated(lines)[1] / len(text.text.replace("\n", "")) > 0.01
    yield "line breaks", text.text.count("\n") / len(text.words) > 0.3


PRESETS: dict[QualityPreset, Callable[[Measured], Rules]] = {
    "gopher-quality": gopher_quality,
    "gopher-repetition": gopher_repetition,
    "fineweb": fineweb,
}


def broken_rule(text: str, presets: Sequence[QualityPreset]) -> str | None:
    """Return the first rule that a text breaks, together with the rule's preset; None if it breaks no rule."""
    measured = Measured(text)
    for preset in presets:
        for reason, breaks in PRESETS[preset](measured):
            if breaks:
                return f"{preset}: {reason}"
    return None


@dataclass(frozen=True, kw_only=True)
class QualityFilter:
    """Keeps documents that break no rule of the presets."""

    name: ClassVar[str] = "filter"
    key: str = "text"
    presets: tuple[QualityPreset, ...] = ("gopher-repetition", "gopher-quality", "fineweb")

    def load(self) -> Work:
        """Return the function that filters documents; no library is loaded."""

        def judge(document: CorpusDocument) -> Result:
            reason = broken_rule(document.text, self.presets)
            return keep_document(document) if reason is None else drop_document(reason)

        return each(judge)
