"""How messages to the user name ranks and large numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NAMED = 8
"""Maximum number of ranks or hosts that a message names; further ones are only counted."""


def name_ranks(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> str:
    """Format ranks for a message, with their hosts if `hosts` contains any.

    >>> name_ranks([3]), name_ranks(range(1, 11))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more')
    >>> name_ranks([2, 5], {2: "b", 5: "c"}), name_ranks([2, 3], {2: "b", 3: "b"})
    ('ranks 2, 5 on hosts b, c', 'ranks 2, 3 on host b')
    """
    names = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts)) if hosts else []
    return f"rank{_listed(list(map(str, ranks)))}{f' on host{_listed(names)}' if names else ''}"


def _listed(names: Sequence[str]) -> str:
    """Format the plural ending of a noun, if needed, and the names that follow the noun."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{rest}"


def count_words(count: float) -> str:
    """Format a large number with a suffix: k, M, B or T.

    >>> count_words(124_439_808), count_words(70_000), count_words(950), count_words(1.75e11)
    ('124.4M', '70.0k', '950', '175.0B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{count:g}"
