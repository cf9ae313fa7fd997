"""Inserts sends and receives of activations and gradients ("cargo") between the compute steps of every rank.

This module does not depend on schedules. First the compute steps of all ranks are simulated on a clock on which every
compute step takes one slot and transfers take no time. Then each transfer is assigned a time:

    sender    ... [produce] |                 [next compute] ...
    receiver  ...        [other work]    | [consume] ...

The sender sends an activation or gradient immediately after producing it. The receiver receives it as late as possible
without delaying any rank, that is, before the consuming compute step, or earlier if the sender would otherwise wait
before its next compute step. Received activations and gradients therefore occupy memory no longer than necessary, and
one exchange can combine, for example, an activation for the next stage with a gradient for the previous stage, as in
Megatron-LM's 1F1B.

The resulting plan cannot deadlock, even if a send waits for the matching receive (rendezvous). The assigned times put
all compute steps and transfers of all ranks in one total order, and every rank follows this order. The first unfinished
act can therefore always run. Transfers between the same two compute steps start together in one `Exchange`, which can
only make a transfer start earlier.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from .types import Act, Compute, Exchange, PlanError, Transfer

Cargo = tuple[str, int, int]
"""An activation or gradient, identified by the compute step that produces it: (kind, microbatch, global stage)."""


def needs(act: Compute, stage: int, last: int) -> Cargo | None:
    """Return the activation or gradient required by `act` on global stage `stage`, or None if `act` does not depend on
    another stage."""
    if act.kind == "F" and stage > 0:
        return ("F", act.microbatch, stage - 1)
    if act.kind == "B" and stage < last:
        return ("B", act.microbatch, stage + 1)
    return None


def sent(transfer: Transfer, rank: int, stages: int) -> Cargo:
    """Return the activation or gradient that `rank` sends in `transfer`."""
    return (transfer.kind, transfer.microbatch, transfer.chunk * stages + rank)


def received(transfer: Transfer, rank: int, stages: int) -> Cargo:
    """Return the activation or gradient that `rank` receives in `transfer`."""
    before = -1 if transfer.kind == "F" else 1
    return (transfer.kind, transfer.microbatch, transfer.chunk * stages + rank + before)


def with_exchanges(orders: Sequence[Sequence[Compute]], stages: int, chunks: int) -> tuple[tuple[Act, ...], ...]:
    """Return the actions of every rank: its compute steps in the given order, and the exchanges between them.

    Raises PlanError if the orders contain a circular wait.
    """
    starts = _clock(orders, stages, chunks)
    consumers = {
        cargo: (rank, start, act)
        for rank, order in enumerate(orders)
        for act, start in zip(order, starts[rank], strict=True)
        if (cargo := needs(act, act.chunk * stages + rank, stages * chunks - 1)) is not None
    }
    sends: list[dict[int, list[Transfer]]] = [{} for _ in orders]
    recvs: list[dict[int, list[Transfer]]] = [{} for _ in orders]
    for rank, order in enumerate(orders):
        for gap, act in enumerate(order, start=1):
            if act.kind == "W":
                continue
            consumer = consumers.get((act.kind, act.microbatch, act.chunk * stages + rank))
            if consumer is None or consumer[0] == rank:
                continue  # no transfer, because no other rank needs the output
            peer, consumer_start, consuming = consumer
            next_start = starts[rank][gap] if gap < len(order) else math.inf
            # The latest time that delays neither the consumer nor the sender's next compute step.
            moment = min(consumer_start, next_start)
            peer_gap = bisect_left(starts[peer], moment)
            sends[rank].setdefault(gap, []).append(Transfer(act.kind, act.microbatch, act.chunk, peer))
            recvs[peer].setdefault(peer_gap, []).append(Transfer(act.kind, act.microbatch, consuming.chunk, rank))
    return tuple(_woven(*lists) for lists in zip(orders, sends, recvs, strict=True))


def _woven(
    order: Sequence[Compute], sends: dict[int, list[Transfer]], recvs: dict[int, list[Transfer]]
) -> tuple[Act, ...]:
    """Return the actions of one rank, with exchanges in the gaps between compute steps. Gap i is before compute step
    i."""
    acts: list[Act] = []
    for gap in range(len(order) + 1):
        if gap in sends or gap in recvs:
            acts.append(Exchange(tuple(sends.get(gap, ())), tuple(recvs.get(gap, ()))))
        if gap < len(order):
            acts.append(order[gap])
    return tuple(acts)


def _clock(orders: Sequence[Sequence[Compute]], stages: int, chunks: int) -> list[list[int]]:
    """Return the slot in which each compute step starts, if every step takes one slot and runs as early as possible. A
    rank runs until the input of its next compute step is missing; the rank that produces this input makes the waiting
    rank runnable again.
    """
    last = stages * chunks - 1
    starts: list[list[int]] = [[] for _ in orders]
    produced: dict[Cargo, int] = {}
    waiting: dict[Cargo, int] = {}
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, starting = orders[rank], starts[rank]
        slot = starting[-1] + 1 if starting else 0
        while len(starting) < len(order):
            act = order[len(starting)]
            stage = act.chunk * stages + rank
            needed = needs(act, stage, last)
            if needed is not None:
                if needed not in produced:
                    waiting[needed] = rank  # each output has one consumer, so at most one rank waits for it
                    break
                slot = max(slot, produced[needed])
            starting.append(slot)
            slot += 1
            cargo = (act.kind, act.microbatch, stage)
            produced[cargo] = slot
            if cargo in waiting:
                runnable.append(waiting.pop(cargo))
    for rank, (order, starting) in enumerate(zip(orders, starts, strict=True)):
        if len(starting) < len(order):
            raise PlanError(f"rank {rank} waits for ever before {order[len(starting)]}: the orders form a circle")
    return starts
