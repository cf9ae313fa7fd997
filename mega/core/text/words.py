"""Cache the ids of words, for tokenizers that encode each word separately. Most of a corpus consists of a small number
of distinct words."""

from __future__ import annotations

from collections.abc import Callable

_MOST_WORDS = 1 << 18
_LONGEST = 64  # number of characters; longer words rarely occur twice


class WordCache(dict[str, list[int]]):
    """A map from words to ids, which `spell(word)` computes when a word is first used. The map is emptied when it is
    full.

    >>> lengths = WordCache(lambda word: [len(word)]); lengths["the"], "the" in lengths
    ([3], True)
    """

    def __init__(self, spell: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, word: str) -> list[int]:
        ids = self._spell(word)
        if len(word) <= _LONGEST:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids
