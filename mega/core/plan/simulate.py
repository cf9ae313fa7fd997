"""What a plan costs: its length, its bubble, and how many microbatches each rank holds. Knows only numbers.

The **bubble** is the share of all ranks' time in which they wait: 1 - (sum of computes) / (ranks * length).
With p equal stages, m microbatches and v chunks a rank:

    gpipe, 1f1b     (p - 1) / (m + p - 1)
    interleaved     (p - 1) / (v m + p - 1)     for m >= p
    zb-h1           (p - 1) / (3 m + p - 1)     for m >= p and F, B, W of equal length
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .play import Interval, play
from .types import Compute, Plan

PerStage: TypeAlias = float | Sequence[float]
"""One number for every global stage (chunk * stages + rank), or one for all."""


@dataclass(frozen=True)
class Costs:
    """How long one microbatch takes on one global stage, in any unit of time.

    forward; backward: the gradient of the input alone; weight: the gradient of the weights, which is part
    of the "B" act where a plan has no "W" acts. So the same costs serve every schedule.
    transfer: one piece of cargo from one rank to another.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage = 1.0
    transfer: float = 0.0

    def of(self, act: Compute, stage: int, split: bool) -> float:
        """The time of `act` on global stage `stage`; `split`: the plan has "W" acts."""
        if act.kind == "F":
            return _at(self.forward, stage)
        if act.kind == "W":
            return _at(self.weight, stage)
        return _at(self.backward, stage) + (0.0 if split else _at(self.weight, stage))


@dataclass(frozen=True)
class Simulation:
    """One playing of a plan. Times are in the unit of the costs, lists go by rank.

    makespan: from the first act to the end of the last. busy: time each rank computes.
    bubble: share of the ranks' time in which they wait, 0 <= bubble < 1.
    live: the most microbatches each rank holds activations of at any time; with several chunks, each chunk
        of a microbatch counts one. They are held from F to B, or to W where there are W acts; in a plan
        without a backward pass only during F.
    rows: every compute with its times.
    """

    plan: Plan
    makespan: float
    busy: tuple[float, ...]
    bubble: float
    live: tuple[int, ...]
    rows: tuple[tuple[Interval, ...], ...]


def simulate(plan: Plan, costs: Costs | None = None, overlap: bool = True) -> Simulation:
    """Plays `plan` on a clock.

    costs: 1 each for forward, input gradient and weight gradient, with free transfers, if not given.
    overlap: True if a rank waits for a piece of cargo only where it needs it, and not for its sends;
        False if it waits in each exchange until all of it is over (see `play`).

    >>> from mega.core.plan import plan
    >>> result = simulate(plan("1f1b", stages=4, microbatches=8))
    >>> result.makespan, round(result.bubble, 4), result.live
    (33.0, 0.2727, (4, 3, 2, 1))
    """
    costs = costs or Costs()
    split = _splits(plan)
    rows = play(plan, lambda act, stage: costs.of(act, stage, split), costs.transfer, overlap)
    frees = "F" if plan.kind == "forward" else "W" if split else "B"
    makespan = max(row[-1].end for row in rows)
    busy = tuple(sum(span.end - span.start for span in row) for row in rows)
    return Simulation(
        plan=plan,
        makespan=makespan,
        busy=busy,
        bubble=1.0 - sum(busy) / (plan.stages * makespan) if makespan else 0.0,
        live=tuple(_peak(row, frees) for row in rows),
        rows=rows,
    )


def lower_bound(plan: Plan, costs: Costs | None = None) -> float:
    """A length below which no plan with these computes can be, in any order.

    The largest of: one microbatch on its way through all stages and back; and for every rank, the way of the
    first microbatch to it, all of its work, and the way of the last gradient from it back to the start.
    (The weight gradients of a split backward need not be done before that last way begins.)
    """
    costs = costs or Costs()
    split = _splits(plan)
    last = plan.stages * plan.chunks

    def total(kinds: str, stages: range) -> float:
        acts = [Compute(kind, 0, 0) for kind in kinds]  # type: ignore[arg-type]
        return sum(costs.of(act, stage, split) for act in acts for stage in stages)

    there_and_back = "F" if plan.kind == "forward" else "FB"
    ways = len(there_and_back)
    travel = costs.transfer if plan.stages > 1 else 0.0
    bounds = [total(there_and_back, range(last)) + ways * (last - 1) * travel]
    for rank in range(plan.stages):
        own = range(rank, last, plan.stages)
        head = total("F", range(rank)) + rank * travel
        work = plan.microbatches * total(there_and_back, own)
        tail = total("B", range(rank)) + rank * travel if ways == 2 else 0.0
        weights = plan.microbatches * total("W", own) if split else 0.0
        bounds.append(head + work + max(tail, weights))
    return max(bounds)


def _splits(plan: Plan) -> bool:
    return any(isinstance(act, Compute) and act.kind == "W" for act in plan.acts[0])


def _peak(row: Sequence[Interval], frees: str) -> int:
    """The most microbatches held at once: each from the start of its F to the end of its act `frees`."""
    held = peak = 0
    for span in row:
        if span.act.kind == "F":
            held += 1
            peak = max(peak, held)
        if span.act.kind == frees:
            held -= 1
    return peak


def _at(cost: PerStage, stage: int) -> float:
    return float(cost) if isinstance(cost, int | float) else float(cost[stage])
