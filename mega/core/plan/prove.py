"""Proves, independently of the schedule, that a plan has the following properties, before a run executes the plan.

    1  every rank computes every (kind, microbatch, chunk) exactly once, F before B before W
    2  no compute step runs before its input has arrived; nothing is sent before it is produced
    3  every activation and gradient is sent once and received once, between the right two ranks
    4  between two ranks, activations arrive in the order of sending, and so do gradients (no tags needed)
    5  no rank waits forever, even if a send blocks until the matching receive has started

This check runs at the start of every training run, and takes time linear in the number of actions.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product, zip_longest

from .exchange import Cargo, needs, received, sent
from .play import play
from .types import Compute, Exchange, Plan, PlanError

Route = tuple[int, int, str]
"""The tuple (sending rank, receiving rank, "F" for activations or "B" for gradients)."""

_EARLIER = {"F": None, "B": "F", "W": "B"}
"""Kind of a compute step -> the kind of step that must precede it for the same microbatch and chunk."""


def prove(plan: Plan) -> None:
    """Prove the properties of `plan`. Raises PlanError, naming the rank and the act, if a property does not hold."""
    if len(plan.acts) != plan.stages:
        raise PlanError(f"{len(plan.acts)} ranks have acts, there are {plan.stages} stages")
    sends: dict[Route, list[Cargo]] = defaultdict(list)
    recvs: dict[Route, list[Cargo]] = defaultdict(list)
    for rank in range(plan.stages):
        _Rank(plan, rank, sends, recvs).check()
    # Every compute step had its input, so all required inputs were received. On each route, the numbers of sends and
    # receives are equal, so all sent tensors were received.
    for route in sends.keys() | recvs.keys():
        _same_order(route, sends[route], recvs[route])
    play(plan, duration=lambda act, stage: 1.0, transfer=0.0, overlap=False)


def _same_order(route: Route, sends: list[Cargo], recvs: list[Cargo]) -> None:
    for sent_cargo, received_cargo in zip_longest(sends, recvs):
        if sent_cargo != received_cargo:
            sender, receiver, kind = route
            raise PlanError(
                f"{kind} from rank {sender} to rank {receiver}: {sent_cargo} leaves where {received_cargo} arrives"
            )


class _Rank:
    """The state of the check of one rank's actions, which are checked in order."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sends: dict[Route, list[Cargo]],
        recvs: dict[Route, list[Cargo]],
    ) -> None:
        self.plan, self.rank, self.sends, self.recvs = plan, rank, sends, recvs
        self.last = plan.stages * plan.chunks - 1
        self.done: set[Cargo] = set()
        self.held: set[Cargo] = set()
        self.gone: set[Cargo] = set()

    def check(self) -> None:
        for act in self.plan.acts[self.rank]:
            if isinstance(act, Compute):
                self._compute(act)
            else:
                self._exchange(act)
        if self.done != (expected := self._expected()):
            raise self._error("does not compute exactly what it should", self.done ^ expected)

    def _expected(self) -> set[Cargo]:
        """The compute steps of this rank so far, as (kind, microbatch, global stage)."""
        split = any(isinstance(act, Compute) and act.kind == "W" for act in self.plan.acts[self.rank])
        kinds = "F" if self.plan.kind == "forward" else "FBW" if split else "FB"
        stages = range(self.rank, self.last + 1, self.plan.stages)
        return set(product(kinds, range(self.plan.microbatches), stages))

    def _compute(self, act: Compute) -> None:
        stage = act.chunk * self.plan.stages + self.rank
        produced = (act.kind, act.microbatch, stage)
        if produced in self.done:
            raise self._error("computes twice", act)
        earlier = _EARLIER[act.kind]
        if earlier is not None and (earlier, act.microbatch, stage) not in self.done:
            raise self._error(f"has not computed {earlier} before", act)
        needed = needs(act, stage, self.last)
        if needed is not None and needed not in self.held:
            raise self._error(f"has no {needed} for", act)
        self.done.add(produced)
        if self._destination(produced) == self.rank:
            self.held.add(produced)

    def _exchange(self, act: Exchange) -> None:
        for transfer in act.sends:
            cargo = sent(transfer, self.rank, self.plan.stages)
            if cargo not in self.done:
                raise self._error("sends before it is made", transfer)
            if cargo in self.gone:
                raise self._error("sends twice", transfer)
            if not self._leaves(cargo) or transfer.peer != self._destination(cargo):
                raise self._error("sends to the wrong rank", transfer)
            self.gone.add(cargo)
            self.sends[self.rank, transfer.peer, transfer.kind].append(cargo)
        for transfer in act.recvs:
            cargo = received(transfer, self.rank, self.plan.stages)
            if cargo in self.held:
                raise self._error("receives twice", transfer)
            if transfer.peer != cargo[2] % self.plan.stages or transfer.peer == self.rank:
                raise self._error("receives from the wrong rank", transfer)
            self.held.add(cargo)
            self.recvs[transfer.peer, self.rank, transfer.kind].append(cargo)

    def _destination(self, cargo: Cargo) -> int | None:
        """Return the rank that needs the output of a compute step, or None if no rank needs it."""
        kind, _, stage = cargo
        to = stage + {"F": 1, "B": -1, "W": 0}[kind]
        return to % self.plan.stages if kind != "W" and 0 <= to <= self.last else None

    def _leaves(self, cargo: Cargo) -> bool:
        return self._destination(cargo) not in (None, self.rank)

    def _error(self, problem: str, subject: object) -> PlanError:
        return PlanError(f"{self.plan.kind}: rank {self.rank} {problem}: {str(subject)[:200]}")
