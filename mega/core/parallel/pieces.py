"""Divides a GEMM, and the exchange of its rows, into pieces that overlap (--tp-overlap). This module does not use
tensors."""

from __future__ import annotations

FULL = 512
"""Minimum number of rows of a piece, per tensor rank. A smaller GEMM leaves multiprocessors idle and ends before the
host has launched the next GEMM. If blocks are smaller, the blocks of several ranks are multiplied together."""

BUFFERS = 4
"""Number of buffers, each for one exchange at a time. At most two exchanges are in flight, so when a rank begins
exchange k + 4, its stream has waited for all blocks of exchange k + 2. All ranks have therefore begun exchange k + 2
and finished exchange k."""


def together(ranks: int, rows: int) -> int:
    """Return the number of ranks whose blocks one GEMM multiplies, on an axis of `ranks` ranks with `rows` rows each.

    >>> [together(ranks, 1024) for ranks in (2, 4, 8)]
    [1, 2, 4]
    """
    count = 1
    while count * rows < FULL * ranks and ranks % (2 * count) == 0:
        count *= 2
    return count
