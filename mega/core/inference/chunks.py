"""Choose the number of prompt tokens in a step, so that the device is used efficiently and running answers are not
delayed.

A step with few prompt tokens reads all weights for little computation; a step with many prompt tokens delays the next
token of every running answer. Without running answers, a step has the largest number of tokens for which a CUDA graph
was captured. With running answers, it has the largest number for which the step takes at most SLOWER times as long as a
step with the running answers alone. The durations are measured after the graphs have been captured. This module depends
on neither requests nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.inference.graphs import GraphShape, graph_rows

PLAIN = 512
"""Number of prompt tokens in a step if no durations are known."""

LEAST = 256
"""Minimum number of tokens in a step with prompts. A step with fewer tokens would take just as long."""

SLOWER = 2.5
"""Maximum duration of a step with prompts, as a multiple of the duration of a step without prompts. With this value,
the 99th percentile of the time between tokens is less than 3 times the median."""


class Chunks:
    """Chooses the number of prompt tokens in a step. Call the object with the number of requests that are currently
    decoding. asked: the user's value, or None. recorded: token counts for which CUDA graphs were captured, in
    increasing order; () without graphs."""

    def __init__(self, asked: int | None, recorded: Sequence[int] = ()):
        self._asked, self._recorded = asked, tuple(recorded)
        self._seconds: dict[GraphShape, float] = {}

    def note_duration(self, shape: GraphShape, seconds: float) -> None:
        """Record the duration of a step with the given shape."""
        self._seconds[shape] = seconds

    def __call__(self, rows: int) -> int:
        """
        >>> chunks = Chunks(None, (256, 512, 2048))
        >>> chunks.note_duration(GraphShape("single", 8), 5.0)
        >>> for size, seconds in ((256, 8.0), (512, 13.0), (2048, 40.0)):
        ...     chunks.note_duration(GraphShape("many", size), seconds)
        >>> chunks(0), chunks(6), Chunks(None)(6), Chunks(100)(6)
        (2048, 250, 512, 100)
        """
        if not self._recorded:
            return self._asked or PLAIN
        if self._asked is not None:  # the user's value limits all tokens in a step, including new tokens of answers
            return max(self._asked - rows, self._asked // 2, 1)
        alone = self._seconds.get(GraphShape("single", graph_rows(rows))) if rows else None
        if rows and alone is None:
            return max(PLAIN - rows, LEAST)
        fitting = [size for size in self._recorded if alone is None or self._fits(size, alone)]
        return max(max(fitting, default=LEAST) - rows, LEAST // 2)

    def _fits(self, size: int, alone: float) -> bool:
        return size <= LEAST or self._seconds.get(GraphShape("many", size), float("inf")) <= SLOWER * alone
