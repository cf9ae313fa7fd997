"""The engine: requests are scheduled on rank 0, and every rank computes its share of each step.

    worker  = Worker(stage, mesh, ...)            on every rank
    engine  = BatchingEngine(worker, ...)         on rank 0: add, step, cancel, close
    follow(worker, relay)                         on the others, until rank 0 closes

Ids in, ids out: it knows no tokenizer.
"""

from __future__ import annotations

import contextlib
import gc
import time

import numpy as np

from mega.core.inference.cache import Blocks
from mega.core.inference.graphs import rows_of_graphs
from mega.core.inference.relay import STEP, STOP, Relay
from mega.core.inference.request import Event, Limits, Request
from mega.core.inference.schedule import Scheduler
from mega.core.inference.step import Step, scratch_step
from mega.core.inference.worker import Launched, Worker


class BatchingEngine:
    """`request.Engine`, on rank 0. relay: to the other ranks, where there are any. ahead: a step that is foreseen is
    given to the device before the results of the one before are waited for, so that the device waits for no host; only
    where one rank holds the model and steps are not cut."""

    def __init__(
        self,
        worker: Worker,
        limits: Limits,
        blocks: Blocks,
        *,
        chunk: int,
        relay: Relay | None = None,
        ahead: bool = False,
    ):
        assert not ahead or (relay is None and worker.tile is None)
        self.limits, self._worker, self._relay, self._looks_ahead = limits, worker, relay, ahead
        self._launched: Launched | None = None
        self._last: Launched | None = None
        names = () if worker.adapters is None else worker.adapters.names
        self._scheduler = Scheduler(blocks, limits, chunk, in_order=worker.tile is not None, adapters=names)

    @property
    def idle(self) -> bool:
        return self._launched is None and self._scheduler.idle

    def add(self, request: Request) -> int:
        return self._scheduler.add(request)

    def cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self) -> list[Event]:
        events = self._scheduler.ended()
        try:
            launched, self._launched = self._launched or self._launch(), None
            if launched is None:
                return events
            if self._looks_ahead and self._scheduler.foreseen:
                self._launched = self._launch()
            events += self._scheduler.take(launched.choices())
        except RuntimeError as error:
            raise error if self._relay is None else self._relay.explained(error) from None
        if self._launched is not None and self._scheduler.drop():
            self._launched = None
        return events

    def _launch(self) -> Launched | None:
        step = self._scheduler.next_step()
        return None if step is None else self._given(step)

    def _given(self, step: Step) -> Launched:
        """The step, given to all ranks."""
        if self._relay is not None:
            self._relay.send(STEP, step.pack())
        self._last = self._worker.launch(step)
        return self._last

    def warm_up(self) -> float:
        """Do, before anything is asked for, what is done when a number of rows first occurs: kernels are compiled and
        graphs recorded. So it is with a chunk that continues a prompt, for which torch's compiler may be imported.
        Takes so many seconds; nothing may be in flight. Python's collector, which would stop the steps for as long as
        some of them, does not look through what is there by now again."""
        assert self.idle
        began, scheduler = time.monotonic(), self._scheduler
        rows, longest, size = self.limits.requests, self.limits.longest, scheduler.blocks.size
        steps = [
            scratch_step([1] * rows + [min(scheduler.chunk, longest)], size),
            scratch_step([min(scheduler.chunk, longest - 1)], size, before=1),
            *(scratch_step([1] * each, size) for each in sorted(rows_of_graphs(rows), reverse=True)),
        ]
        for step in steps:
            self._given(step).choices()
        gc.collect()
        gc.freeze()
        return time.monotonic() - began

    def close(self) -> None:
        if self._relay is not None:
            self._relay.send(STOP, np.zeros(0, dtype=np.int64))
            self._relay = None
        if self._looks_ahead and self._last is not None:
            with contextlib.suppress(RuntimeError):  # that the device has failed was said before
                self._last.choices()  # a graph that is played must not end
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
