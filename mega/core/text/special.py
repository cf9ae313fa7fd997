"""Split texts that contain names of tokens, such as `<|im_start|>user`, into these tokens and the text between them.

This module does not depend on tokenizers or templates, only on texts, names and spans of characters.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Span = tuple[int, int]
"""(index of the first character, index after the last character). An empty span in a list of literal spans means that
no token name may extend across this position."""


class Parsed(NamedTuple):
    """The ids of a text, and the span of characters that each id encodes. spans: None if the tokenizer cannot determine
    spans."""

    ids: list[int]
    spans: list[Span] | None


class TextSection(NamedTuple):
    """A token name in a text or, if `name` is None, the text up to the next token name."""

    name: str | None
    begin: int
    end: int


@lru_cache(maxsize=64)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def sections(text: str, names: Collection[str], literal: Sequence[Span] = ()) -> Iterator[TextSection]:
    """Split `text` at token names, and yield all sections in order. If several names begin at the same character, the
    longest name is used. A name that overlaps a span of `literal` counts as text.

    >>> [(each.name, each.begin) for each in sections("<s>a<s></s>", {"<s>", "</s>"}, [(4, 7)])]
    [('<s>', 0), (None, 3), ('</s>', 7)]
    """
    pattern, begin, at = _pattern(frozenset(names)), 0, 0
    while match := pattern.search(text, at):
        first, last = match.span()
        if (crossed := _crossed(first, last, literal)) is not None:
            at = max(first + 1, crossed)
            continue
        if begin < first:
            yield TextSection(None, begin, first)
        yield TextSection(match[0], first, last)
        begin = at = last
    if begin < len(text):
        yield TextSection(None, begin, len(text))


def _crossed(first: int, last: int, literal: Sequence[Span]) -> int | None:
    """Return the end of the literal span that overlaps the characters first .. last - 1, or None if no span overlaps
    them."""
    return next((end for begin, end in literal if begin < last and end > first), None)


class Spelled:
    """Searches texts for token names. The search is fast for texts without token names, which are the vast majority."""

    def __init__(self, names: Collection[str]) -> None:
        self._groups: dict[str, frozenset[str]] = {}
        for name in names:
            self._groups[name[:2]] = self._groups.get(name[:2], frozenset()) | {name}

    def first_in(self, text: str) -> str | None:
        """Return the first token name in the text, or None."""
        candidates = (_pattern(names).search(text) for start, names in self._groups.items() if start in text)
        matches = [match for match in candidates if match is not None]
        return min(matches, key=lambda match: match.start())[0] if matches else None


def aligned(text: str, pieces: Sequence[bytes]) -> list[Span] | None:
    """Return the span of characters of each piece, or None if the concatenated pieces are not the text in UTF-8. A
    piece that is part of a character gets the span of the whole character.

    >>> aligned("aé", [b"a", b"\\xc3", b"\\xa9"])
    [(0, 1), (1, 2), (1, 2)]
    """
    data = text.encode("utf-8", "surrogatepass")
    if b"".join(pieces) != data:
        return None
    starts: list[int] | None = None
    if len(data) != len(text):
        starts, at = [], 0
        for character in text:
            starts.append(at)
            at += len(character.encode("utf-8", "surrogatepass"))
    spans, at = [], 0
    for piece in pieces:
        first, last = at, at + len(piece)
        at = last
        if starts is not None:
            first, last = bisect_right(starts, first) - 1, bisect_right(starts, max(last - 1, first))
        spans.append((first, last))
    return spans


def covered(spans: Sequence[Span], begin: int, end: int) -> range | None:
    """Return the range of tokens that encode the characters begin .. end - 1. Return None if no token contains the
    first or the last of these characters, because some tokenizers omit spaces. Also return None if several tokens share
    the last character, because transformers would train only on the first of these tokens."""
    first = next((i for i, (a, b) in enumerate(spans) if a <= begin < b), None)
    last = [i for i, (a, b) in enumerate(spans) if a < end <= b]
    return None if first is None or len(last) != 1 else range(first, last[0] + 1)
