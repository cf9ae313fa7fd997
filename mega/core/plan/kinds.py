"""The pipeline schedules, which determine the order of compute steps on each rank.

Each schedule is one function from (rank, stages, chunks, microbatches) to a list of `Compute`s. The module `exchange`
inserts the transfers for all schedules. In the drawings, F2 is the forward pass of microbatch 2, B2 is the backward
pass of microbatch 2, and `.` is an idle slot. F and B take one slot each:

    gpipe, 3 stages, 3 microbatches: all forward passes, then all backward passes. Every rank holds all microbatches.

        rank 0   F0 F1 F2  .  .  .  . B0 B1 B2
        rank 1    . F0 F1 F2  .  . B0 B1 B2  .
        rank 2    .  . F0 F1 F2 B0 B1 B2  .  .

    1f1b, 3 stages, 3 microbatches: each backward pass as early as possible. Takes as long as gpipe, but rank r holds at
        most stages - r microbatches.

        rank 0   F0 F1 F2  .  . B0  . B1  . B2
        rank 1    . F0 F1  . B0 F2 B1  . B2  .
        rank 2    .  . F0 B0 F1 B1 F2 B2  .  .

Every schedule runs the backward passes of a chunk in the order of the microbatches, so gradients are summed in the same
order under every schedule.

Sources: gpipe, Huang et al. 2019 (arXiv 1811.06965); 1f1b and interleaved, Narayanan et al. 2021
(arXiv 2104.04473); zb-h1, Qi et al. 2023 (arXiv 2401.10241), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from .exchange import with_exchanges
from .types import Compute, Plan

Order = list[Compute]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A schedule. order: function that takes (rank, stages, chunks, microbatches) and returns the compute steps of that
    rank, in order.

    interleaves: whether each rank has two or more chunks. Otherwise each rank has exactly one chunk.
    """

    order: Callable[[int, int, int, int], Order]
    interleaves: bool = False


def plan(kind: str, stages: int, chunks: int = 1, microbatches: int = 1) -> Plan:
    """Return the plan of one training step, which contains every rank's compute steps and the exchanges between them.

    kind: one of `SCHEDULES`, or "forward" for evaluation without a backward pass, with any number of chunks.
    stages: number of pipeline ranks, >= 1. The plan for a single stage has no exchanges.
    chunks: number of model chunks on each rank, >= 1. microbatches: any number >= 1.

    Raises ValueError, naming the flag, if the schedule does not support the given numbers.

    >>> plan("1f1b", stages=2, microbatches=1).acts[1]  # doctest: +NORMALIZE_WHITESPACE
    (Exchange(sends=(), recvs=(Transfer(kind='F', microbatch=0, chunk=0, peer=0),)),
     Compute(kind='F', microbatch=0, chunk=0),
     Compute(kind='B', microbatch=0, chunk=0),
     Exchange(sends=(Transfer(kind='B', microbatch=0, chunk=0, peer=0),), recvs=()))
    """
    _check(kind, stages, chunks, microbatches)
    return _cached_plan(kind, stages, chunks, microbatches)


@lru_cache(maxsize=64)
def _cached_plan(kind: str, stages: int, chunks: int, microbatches: int) -> Plan:
    """Return a plan from a cache, because a layout search and every training step request the same few plans
    repeatedly."""
    order = forward_only if kind == "forward" else SCHEDULES[kind].order
    orders = [order(rank, stages, chunks, microbatches) for rank in range(stages)]
    return Plan(kind, stages, chunks, microbatches, with_exchanges(orders, stages, chunks))


def _check(kind: str, stages: int, chunks: int, microbatches: int) -> None:
    if kind not in SCHEDULES and kind != "forward":
        raise ValueError(f"--schedule {kind}: must be one of {', '.join(SCHEDULES)}, forward")
    for name, value in (("--pp", stages), ("--chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be 1 or more")
    if kind == "forward":
        return
    if SCHEDULES[kind].interleaves and chunks == 1:
        raise ValueError(f"--schedule {kind} with --chunks 1: needs 2 or more (with one chunk use 1f1b)")
    if not SCHEDULES[kind].interleaves and chunks > 1:
        raise ValueError(f"--schedule {kind} with --chunks {chunks}: must be 1 (several need {interleaving()})")


def gpipe(rank: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Return GPipe's compute steps: all forward passes, then all backward passes."""
    return [Compute(kind, i, 0) for kind in ("F", "B") for i in range(microbatches)]


def one_forward_one_backward(rank: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Return the compute steps of 1F1B: forward passes until the first gradient can arrive, then alternating forward
    and backward passes.

    Rank r starts with min(stages - r - 1, microbatches) forward passes: 3, 2, 1, 0 for four stages.
    """
    return _alternate(
        [Compute("F", i, 0) for i in range(microbatches)],
        [Compute("B", i, 0) for i in range(microbatches)],
        warm_up=stages - rank - 1,
    )


def interleaved(rank: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Return the compute steps of interleaved 1F1B, with several chunks per rank. The steps that fill the pipeline are
    shorter, so the bubble is smaller.

    Microbatches form groups (see `_groups`). A rank runs a whole group through the first chunk, then through the second
    chunk, and so on; backward passes run from the last chunk to the first. The warm-up of rank r is 2 (stages - r - 1)
    forward passes, until a microbatch has passed the later ranks and the gradient has returned, plus the forward passes
    of one group through every chunk except the last. For 4 stages, 2 chunks and 8 microbatches the warm-up is 10, 8, 6,
    4, and the forward passes run in chunks 0000 1111 0000 1111.

        2 stages, 2 chunks, 2 microbatches (a, b are the chunks; a slot is half as long as with one chunk)
        rank 0   F0a F1a F0b F1b  .  B0b  .  B1b B0a B1a
        rank 1    .  F0a F1a F0b B0b F1b B1b B0a B1a  .
    """
    return _alternate(
        list(_grouped("F", stages, range(chunks), microbatches)),
        list(_grouped("B", stages, range(chunks - 1, -1, -1), microbatches)),
        warm_up=2 * (stages - rank - 1) + (chunks - 1) * len(_groups(stages, microbatches)[0]),
    )


def zero_bubble(rank: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Return the compute steps of ZB-H1, which is 1F1B with a split backward pass whose weight gradients fill idle
    slots.

    The previous rank waits for the gradient of the input (B), but the gradient of the weights (W) can be computed at
    any later time. On rank r, the W steps are r microbatches behind the B steps, so that later ranks defer work to the
    end of the training step, when they would be idle. No rank holds more than `stages` microbatches.

        3 stages, 4 microbatches (F, B, W one slot each)
        rank 0   F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1    . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2    .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    order: Order = []
    backwards = 0  # number of B steps so far
    for act in one_forward_one_backward(rank, stages, chunks, microbatches):
        order.append(act)
        if act.kind == "B":
            backwards += 1
            if backwards > rank:
                order.append(Compute("W", backwards - rank - 1, 0))
    delayed = range(max(0, microbatches - rank), microbatches)
    return order + [Compute("W", i, 0) for i in delayed]


def forward_only(rank: int, stages: int, chunks: int, microbatches: int) -> Order:
    """Return the forward passes for evaluation, in the order of the interleaved schedule."""
    return list(_grouped("F", stages, range(chunks), microbatches))


def _groups(stages: int, microbatches: int) -> list[range]:
    """Divide microbatches into groups for interleaving, of nearly equal size, and of at least `stages` microbatches if
    possible.

    With smaller groups, rank 0 would need the input of the next chunk before the last rank has sent that input, and
    ranks could deadlock. With larger groups, ranks hold more activations. The larger groups come first, because the
    first group determines the warm-up; after a smaller first group, a larger group would need backward passes before
    the matching forward passes.

    >>> _groups(4, 8), _groups(4, 13), _groups(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 5), range(5, 9), range(9, 13)], [range(0, 3)])
    """
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _grouped(kind: Literal["F", "B"], stages: int, chunks: Iterable[int], microbatches: int) -> Iterator[Compute]:
    """Return the order that runs each group of microbatches through all `chunks`, in the given order, before the next
    group."""
    for group in _groups(stages, microbatches):
        for chunk in chunks:
            for microbatch in group:
                yield Compute(kind, microbatch, chunk)


def _alternate(forwards: Order, backwards: Order, warm_up: int) -> Order:
    """Return `warm_up` forward passes, then alternating forward and backward passes, then the remaining backward
    passes."""
    warm_up = min(warm_up, len(forwards))
    steady = zip(forwards[warm_up:], backwards, strict=False)
    pairs = len(forwards) - warm_up
    return forwards[:warm_up] + [act for pair in steady for act in pair] + backwards[pairs:]


SCHEDULES: dict[str, PipelineSchedule] = {
    "1f1b": PipelineSchedule(one_forward_one_backward),
    "gpipe": PipelineSchedule(gpipe),
    "interleaved": PipelineSchedule(interleaved, interleaves=True),
    "zb-h1": PipelineSchedule(zero_bubble),
}
"""Name -> training schedule. The names are the valid values of --schedule."""


def interleaving() -> str:
    """Return the names of the schedules with several chunks per rank, as text for a message."""
    return " or ".join(name for name, one in SCHEDULES.items() if one.interleaves)


def splits_backward(kind: str) -> bool:
    """Whether a schedule computes weight gradients in separate steps (W), after the input gradients.

    >>> splits_backward("zb-h1"), splits_backward("1f1b")
    (True, False)
    """
    schedule = SCHEDULES[kind]
    return any(act.kind == "W" for act in schedule.order(0, 2, 1 + schedule.interleaves, 2))
