"""How messages to the user name ranks and large numbers."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 8
"""Number of ranks that a message names; the remaining ranks are only counted."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message.

    >>> name_ranks([3]), name_ranks(range(1, 11))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more')
    """
    rest = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{rest}"


def count_words(count: float) -> str:
    """Format a large number with a suffix: k, M, B or T.

    >>> count_words(124_439_808), count_words(70_000), count_words(950), count_words(1.75e11)
    ('124.4M', '70.0k', '950', '175.0B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{count:g}"
