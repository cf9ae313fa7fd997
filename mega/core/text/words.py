"""A cache of words in front of a tokenizer that treats each word alone: most words of a corpus are few."""

from __future__ import annotations

from collections.abc import Callable

_MOST_WORDS = 1 << 18
_LONGEST = 64  # a longer word hardly comes again


class Remembered(dict[str, list[int]]):
    """`remembered[word]` is `spell(word)`, computed once while the cache has room.

    >>> lengths = Remembered(lambda word: [len(word)]); lengths["the"], "the" in lengths
    ([3], True)
    """

    def __init__(self, spell: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, word: str) -> list[int]:
        found = self._spell(word)
        if len(word) <= _LONGEST:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = found
        return found
