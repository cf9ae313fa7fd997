"""How many prompt tokens go into a step: as many as the device takes well, and as running answers can bear.

A step of few prompt tokens reads all weights for little; one of many holds up the next token of every answer under way.
So, where nothing is under way, a step takes the largest number of tokens that is recorded; else the largest one that
takes no longer than SLOWER steps of the running answers alone, by what steps took when they were recorded. It knows no
requests and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.inference.graphs import GraphShape, graph_rows

PLAIN = 512
"""Prompt tokens of a step where nothing is known of the device."""

LEAST = 256
"""Tokens that a step with prompts takes in any case: fewer cost a device as much."""

SLOWER = 2.5
"""Times that a step with prompts may take of one without: the 99th percentile between tokens stays below 3 medians."""


class Chunks:
    """chunks(rows) -> prompt tokens of a step in which `rows` answers are under way. asked: by the user, or None.
    recorded: tokens of steps of graphs, in order; () where there are none."""

    def __init__(self, asked: int | None, recorded: Sequence[int] = ()):
        self._asked, self._recorded = asked, tuple(recorded)
        self._seconds: dict[GraphShape, float] = {}

    def took(self, shape: GraphShape, seconds: float) -> None:
        """A recorded step of a shape took so long."""
        self._seconds[shape] = seconds

    def __call__(self, rows: int) -> int:
        """
        >>> chunks = Chunks(None, (256, 512, 2048))
        >>> chunks.took(GraphShape("single", 8), 5.0)
        >>> for size, seconds in ((256, 8.0), (512, 13.0), (2048, 40.0)):
        ...     chunks.took(GraphShape("many", size), seconds)
        >>> chunks(0), chunks(6), Chunks(None)(6), Chunks(100)(6)
        (2048, 250, 512, 100)
        """
        if not self._recorded:
            return self._asked or PLAIN
        if self._asked is not None:  # a step is recorded for as many tokens, new ones included
            return max(self._asked - rows, self._asked // 2, 1)
        alone = self._seconds.get(GraphShape("single", graph_rows(rows))) if rows else None
        if rows and alone is None:
            return max(PLAIN - rows, LEAST)
        several = [size for size in self._recorded if alone is None or self._fits(size, alone)]
        return max(max(several, default=LEAST) - rows, LEAST // 2)

    def _fits(self, size: int, alone: float) -> bool:
        return size <= LEAST or self._seconds.get(GraphShape("many", size), float("inf")) <= SLOWER * alone
