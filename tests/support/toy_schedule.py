"""A schedule that the project does not know: microbatches in pairs. All that adding one takes.

A rank runs the forwards of two microbatches, then their backwards. No rank holds more than two, where 1f1b's first
holds as many as there are stages; but the pipeline is filled and emptied for every pair.

    2 stages, 4 microbatches (F, B one slot each)
    rank 0   F0 F1  .  . B0 B1 F2 F3  .  . B2 B3
    rank 1    . F0 F1 B0 B1  .  . F2 F3 B2 B3  .
"""

from __future__ import annotations

from mega.core.plan import SCHEDULES, Compute, PipelineSchedule

NAME = "toy-pairs"


def pairs(rank: int, stages: int, chunks: int, microbatches: int) -> list[Compute]:
    """Two forwards, their two backwards, and so on; the last pair may be of one."""
    order = []
    for first in range(0, microbatches, 2):
        for kind in ("F", "B"):
            order += [Compute(kind, i, 0) for i in range(first, min(first + 2, microbatches))]  # type: ignore[arg-type]
    return order


def register() -> None:
    """Make the schedule a choice of --schedule in this process."""
    SCHEDULES[NAME] = PipelineSchedule(pairs)


def unregister() -> None:
    SCHEDULES.pop(NAME, None)
