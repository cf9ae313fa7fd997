"""Runs the actions of all ranks in a plan in parallel on a simulated clock, and reports when each compute step ran.

The simulation follows the `Exchange`s exactly, so a plan that deadlocks in it deadlocks in any executor. `prove` uses
this module to find deadlocks, and `simulate` to compute the length of a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .exchange import Cargo, needs, received, sent
from .types import Compute, Exchange, Plan, PlanError


@dataclass(frozen=True, slots=True)
class Interval:
    """A compute step, with its start and end times in the unit of the costs."""

    act: Compute
    start: float
    end: float


Duration = Callable[[Compute, int], float]
"""Function that takes a compute step and its global stage, and returns the step's duration."""


def play(plan: Plan, duration: Duration, transfer: float, overlap: bool = True) -> tuple[tuple[Interval, ...], ...]:
    """Return every rank's compute steps with times, in order. This function takes time linear in the number of actions.

    transfer: duration of one transfer, which starts when both ranks have reached their exchange.
    overlap: if True, a rank does not stop in exchanges. It waits for an activation or gradient only before the compute
        step that needs this input, and never waits for sends. If False, a rank stops in each exchange until all
        transfers have ended, so a send blocks until the receive.

    Raises PlanError at a deadlock.
    """
    return _Playing(plan, duration, transfer, overlap).to_the_end()


class _Playing:
    """The state of one call of `play`. A rank runs until it has to wait for an activation or gradient. The transfer of
    that input makes the rank runnable again."""

    def __init__(self, plan: Plan, duration: Duration, transfer: float, overlap: bool) -> None:
        self.plan, self.duration, self.transfer, self.overlap = plan, duration, transfer, overlap
        self.next = [0] * plan.stages
        self.now = [0.0] * plan.stages
        self.spans: list[list[Interval]] = [[] for _ in range(plan.stages)]
        self.sends: dict[Cargo, float] = {}
        self.recvs: dict[Cargo, float] = {}
        self.waiting: dict[Cargo, int] = {}
        self.runnable = list(range(plan.stages))

    def to_the_end(self) -> tuple[tuple[Interval, ...], ...]:
        while self.runnable:
            self._run(self.runnable.pop())
        for rank, acts in enumerate(self.plan.acts):
            if self.next[rank] < len(acts):
                raise PlanError(f"deadlock: rank {rank} waits for ever in {acts[self.next[rank]]}")
        return tuple(map(tuple, self.spans))

    def _run(self, rank: int) -> None:
        """Run the remaining actions of `rank` until all have run or `rank` has to wait for the other rank of a
        transfer."""
        acts = self.plan.acts[rank]
        while self.next[rank] < len(acts):
            act = acts[self.next[rank]]
            played = self._exchange(act, rank) if isinstance(act, Exchange) else self._compute(act, rank)
            if not played:
                return
            self.next[rank] += 1

    def _exchange(self, act: Exchange, rank: int) -> bool:
        sends = [sent(transfer, rank, self.plan.stages) for transfer in act.sends]
        recvs = [received(transfer, rank, self.plan.stages) for transfer in act.recvs]
        self._enter(self.sends, sends, rank)
        self._enter(self.recvs, recvs, rank)
        return self.overlap or all(self._wait(cargo, rank) for cargo in sends + recvs)

    def _enter(self, side: dict[Cargo, float], cargoes: list[Cargo], rank: int) -> None:
        """Record the time at which `rank` is ready to send or receive, and make a rank that waits for `rank`
        runnable."""
        for cargo in cargoes:
            side.setdefault(cargo, self.now[rank])
            if cargo in self.waiting:
                self.runnable.append(self.waiting.pop(cargo))

    def _compute(self, act: Compute, rank: int) -> bool:
        stage = act.chunk * self.plan.stages + rank
        needed = needs(act, stage, self.plan.stages * self.plan.chunks - 1)
        if needed in self.recvs and not self._wait(needed, rank):
            return False
        start = self.now[rank]
        self.now[rank] = start + self.duration(act, stage)
        self.spans[rank].append(Interval(act, start, self.now[rank]))
        return True

    def _wait(self, cargo: Cargo, rank: int) -> bool:
        """Advance `rank` to the end of a transfer, and return False if the other rank has not reached the exchange
        yet."""
        if cargo not in self.sends or cargo not in self.recvs:
            self.waiting[cargo] = rank
            return False
        self.now[rank] = max(self.now[rank], max(self.sends[cargo], self.recvs[cargo]) + self.transfer)
        return True
