"""Computes the costs of a plan: its length, its bubble, and the number of microbatches that each rank holds.

The **bubble** is the fraction of time that ranks spend waiting: 1 - (total compute time) / (ranks * length). With p
equal stages, m microbatches and v chunks per rank, the bubble is:

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
"""A number per global stage (chunk * stages + rank), or one number for all stages."""


@dataclass(frozen=True)
class Costs:
    """The durations of one microbatch's operations on one global stage, in any unit of time."""

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    """The time to compute the input gradient, without the weight gradients."""
    weight: PerStage = 1.0
    """The time to compute the weight gradients. In a plan without "W" steps this duration is part of the "B" step, so
    the same costs can be used for all plans."""
    transfer: float = 0.0
    """The time to send one activation or gradient from one rank to another."""

    def of(self, act: Compute, stage: int, split: bool) -> float:
        """Return the duration of `act` on global stage `stage`. split: whether the plan has "W" steps."""
        if act.kind == "F":
            return _at(self.forward, stage)
        if act.kind == "W":
            return _at(self.weight, stage)
        return _at(self.backward, stage) + (0.0 if split else _at(self.weight, stage))


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation. Times are in the unit of the costs; tuples have one entry per rank."""

    plan: Plan
    makespan: float
    """Time from the start of the first act to the end of the last act."""
    busy: tuple[float, ...]
    """Compute time of each rank."""
    bubble: float
    """Fraction of time that ranks spend waiting, 0 <= bubble < 1."""
    live: tuple[int, ...]
    """Peak number of microbatches whose activations each rank holds, counting each chunk of a microbatch separately. A
    rank holds activations from F to B, or to W if there are W steps. In a plan without a backward pass, it holds
    activations only during F."""
    rows: tuple[tuple[Interval, ...], ...]
    """Every compute step with its start and end times."""


def simulate(plan: Plan, costs: Costs | None = None, overlap: bool = True) -> Simulation:
    """Run `plan` on a simulated clock.

    costs: by default 1 for forward pass, input gradient and weight gradient each, and 0 for transfers.
    overlap: if True, a rank waits for an activation or gradient only before the compute step that needs this input, and
        not for sends. If False, a rank waits in each exchange until all transfers have ended (see `play`).

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
    """Return a lower bound for the length of any plan with the compute steps of `plan`, in any order.

    The bound is the maximum of the time that one microbatch needs through all stages and back, and a sum for each rank.
    The terms of this sum are the time until the first microbatch can reach the rank, the rank's compute time, and the
    time in which the last gradient returns from the rank to stage 0. (The weight gradients of a split backward pass can
    overlap with the third term.)
    """
    costs = costs or Costs()
    split = _splits(plan)
    last = plan.stages * plan.chunks

    def total(kinds: str, stages: range) -> float:
        acts = [Compute(kind, 0, 0) for kind in kinds]  # type: ignore[arg-type]
        return sum(costs.of(act, stage, split) for act in acts for stage in stages)

    passes = "F" if plan.kind == "forward" else "FB"
    travel = costs.transfer if plan.stages > 1 else 0.0
    bounds = [total(passes, range(last)) + len(passes) * (last - 1) * travel]
    for rank in range(plan.stages):
        rank_stages = range(rank, last, plan.stages)
        head = total("F", range(rank)) + rank * travel
        work = plan.microbatches * total(passes, rank_stages)
        tail = total("B", range(rank)) + rank * travel if len(passes) == 2 else 0.0
        weights = plan.microbatches * total("W", rank_stages) if split else 0.0
        # Weight gradients may run while the last gradient returns, so only the longer of the two times counts.
        bounds.append(head + work + max(tail, weights))
    return max(bounds)


def _splits(plan: Plan) -> bool:
    return any(isinstance(act, Compute) and act.kind == "W" for act in plan.acts[0])


def _peak(row: Sequence[Interval], frees: str) -> int:
    """Return the maximum number of microbatches held at the same time. A microbatch is held from the start of its F
    step to the end of its step of kind `frees`."""
    live = peak = 0
    for span in row:
        if span.act.kind == "F":
            live += 1
            peak = max(peak, live)
        if span.act.kind == frees:
            live -= 1
    return peak


def _at(cost: PerStage, stage: int) -> float:
    return float(cost) if isinstance(cost, int | float) else float(cost[stage])
