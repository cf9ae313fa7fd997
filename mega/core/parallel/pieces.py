"""How a product is cut into pieces along with the exchange of its rows (--tp-overlap). Knows no tensors."""

from __future__ import annotations

FULL = 512
"""Rows of a product for each rank that its columns are shared out over: a piece of fewer leaves multiprocessors without
work, and the host no time to ask for the next one. Smaller blocks of several ranks go together."""

BUFFERS = 4
"""Exchanges whose blocks are kept. A rank begins exchange k + 4 when its stream has waited for every block of k + 2, at
the least, since no more than two are under way. So all ranks have begun k + 2, and before that they used up k."""


def together(ranks: int, rows: int) -> int:
    """Ranks, of an axis of `ranks` with `rows` each, whose rows go through one product.

    >>> [together(ranks, 1024) for ranks in (2, 4, 8)]
    [1, 2, 4]
    """
    count = 1
    while count * rows < FULL * ranks and ranks % (2 * count) == 0:
        count *= 2
    return count
