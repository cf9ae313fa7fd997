"""The engine: requests are scheduled on rank 0, and every rank computes its share of each step.

    worker  = Worker(stage, mesh, ...)            on every rank
    engine  = BatchingEngine(worker, ...)         on rank 0: add, step, cancel, close
    follow(worker, relay)                         on the others, until rank 0 closes

Ids in, ids out: it knows no tokenizer.
"""

from __future__ import annotations

import numpy as np

from mega.core.inference.cache import Blocks
from mega.core.inference.relay import STEP, STOP, Relay
from mega.core.inference.request import Event, Limits, Request
from mega.core.inference.schedule import Scheduler
from mega.core.inference.step import Step
from mega.core.inference.worker import Worker


class BatchingEngine:
    """`request.Engine`, on rank 0. relay: to the other ranks, where there are any."""

    def __init__(self, worker: Worker, limits: Limits, blocks: Blocks, *, chunk: int, relay: Relay | None = None):
        self.limits, self._worker, self._relay = limits, worker, relay
        names = () if worker.adapters is None else worker.adapters.names
        self._scheduler = Scheduler(blocks, limits, chunk, in_order=worker.tile is not None, adapters=names)

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def add(self, request: Request) -> int:
        return self._scheduler.add(request)

    def cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self) -> list[Event]:
        events = self._scheduler.ended()
        step = self._scheduler.next_step()
        if step is None:
            return events
        if self._relay is None:
            return events + self._scheduler.take(self._worker.run(step))
        self._relay.send(STEP, step.pack())
        try:
            choices = self._worker.run(step)
        except RuntimeError as error:
            raise self._relay.explained(error) from None
        return events + self._scheduler.take(choices)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.send(STOP, np.zeros(0, dtype=np.int64))
            self._relay = None
        self._worker.close()


def follow(worker: Worker, relay: Relay) -> None:
    """Run what rank 0 sends, until it closes its engine. Errors: LostRank."""
    while True:
        kind, content = relay.hear()
        if kind == STOP:
            worker.close()
            return
        try:
            worker.run(Step.unpack(content))
        except RuntimeError as error:
            raise relay.explained(error) from None
