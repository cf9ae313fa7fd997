"""Run an engine. Rank 0 schedules requests, and every rank computes its share of each step.

    worker  = Worker(stage, mesh, ...)            on every rank
    engine  = BatchingEngine(worker, ...)         on rank 0: add, step, cancel, close
    follow(worker, relay)                         on the other ranks, until rank 0 closes

Requests and events contain token ids, so the engine does not depend on a tokenizer.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque

import numpy as np

from mega.core.inference.cache import Blocks
from mega.core.inference.chunks import Chunks
from mega.core.inference.graphs import rows_of_graphs, shape_counts
from mega.core.inference.relay import DRAFT, STEP, STOP, Relay
from mega.core.inference.request import Event, Limits, Request
from mega.core.inference.schedule import Scheduler
from mega.core.inference.speculate import Drafter
from mega.core.inference.step import Step, scratch_step
from mega.core.inference.worker import Launched, Worker


class BatchingEngine:
    """The implementation of `request.Engine` on rank 0.

    relay: connection to the other ranks; None on a single rank. depth: number of steps to launch before waiting for the
    results of the first step, so that the device does not wait for the host; must be 1 if steps are split into tiles.
    groups: as in `Scheduler`. chunk: maximum number of prompt tokens in a step; None to choose the number automatically
    (chunks.py). drafter: guesses tokens for speculative decoding. draft_bytes: device memory for the weights and the
    cache of its draft model.
    """

    def __init__(
        self,
        worker: Worker,
        limits: Limits,
        blocks: Blocks,
        *,
        chunk: int | None,
        relay: Relay | None = None,
        depth: int = 1,
        groups: int = 1,
        drafter: Drafter | None = None,
        draft_bytes: tuple[int, int] = (0, 0),
    ):
        assert depth == 1 or worker.tile is None
        self.limits, self._worker, self._relay, self._depth = limits, worker, relay, depth
        self._drafter, self.draft_bytes = drafter, draft_bytes
        self._launched: deque[Launched] = deque()
        self._last: Launched | None = None
        self.chunks = Chunks(chunk, recorded=() if worker.graphs is None else worker.graphs.many)
        names = () if worker.adapters is None else worker.adapters.names
        self._scheduler = Scheduler(
            blocks,
            limits,
            self.chunks,
            in_order=worker.tile is not None,
            adapters=names,
            groups=groups,
            ahead=depth > 1,
            drafter=drafter,
            shares=worker.reader is None,
        )

    @property
    def idle(self) -> bool:
        return not self._launched and self._scheduler.idle

    @property
    def neighbour_bytes(self) -> int:
        """Device memory, in bytes, for retrieving and storing neighbours."""
        return 0 if self._worker.reader is None else self._worker.reader.device_bytes

    def add(self, request: Request) -> int:
        return self._scheduler.add(request)

    def cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self) -> list[Event]:
        events = self._scheduler.ended()
        try:
            while len(self._launched) < self._depth and (launched := self._launch()) is not None:
                self._launched.append(launched)
            if self._launched:
                events += self._taken(self._launched.popleft())
        except RuntimeError as error:
            raise error if self._relay is None else self._relay.explained(error) from None
        while self._launched and self._scheduler.drop():
            self._launched.pop()
        return events

    def _taken(self, launched: Launched) -> list[Event]:
        """Return the events for a step's results, with the neighbours that the model has read."""
        reader, numbers = self._worker.reader, self._scheduler.sequences()
        events = self._scheduler.take(launched.choices())
        if reader is None:
            return events
        return [each._replace(cited=reader.cited(numbers[each.request])) for each in events]

    def _launch(self) -> Launched | None:
        step = self._scheduler.next_step()
        return None if step is None else self._given(step)

    def _given(self, step: Step) -> Launched:
        """Start a step on all ranks."""
        if self._relay is not None:
            self._relay.send(STEP, step.pack())
        self._last = self._worker.launch(step)
        return self._last

    def warm_up(self) -> float:
        """Run one step of each shape before the first request, to compile kernels and capture graphs.

        The measured durations determine how many prompt tokens later steps contain. No request may be in flight.
        Objects that exist after the warm-up are excluded from Python's garbage collection, because its passes would
        delay steps. Return the duration of the warm-up in seconds.
        """
        assert self.idle
        if self._worker.reader is not None:
            return 0.0
        warm_up_start, graphs = time.monotonic(), self._worker.graphs
        rows, longest, vocab = self.limits.requests, self.limits.longest, self.limits.vocab
        size = self._scheduler.blocks.size
        if graphs is None:
            for step in (
                scratch_step([1] * rows + [min(self.chunks(rows), longest)], size, vocab),
                scratch_step([min(self.chunks(0), longest - 1)], size, vocab, before=1),
                *(scratch_step([1] * each, size, vocab) for each in sorted(rows_of_graphs(rows), reverse=True)),
            ):
                self._given(step).choices()
                if self._drafter is not None:
                    self._drafter.warm_up(step.counts.tolist())
        for shape in () if graphs is None else graphs.shapes(rows):
            step = scratch_step(shape_counts(shape, longest), size, vocab, free=self._scheduler.blocks.never_used)
            if graphs is not None and graphs.shape_of(step) == shape:
                self._given(step).choices()
                # The first run of a shape has captured the graph; the second run is timed.
                start = time.monotonic()
                self._given(step).choices()
                self.chunks.note_duration(shape, time.monotonic() - start)
            if self._drafter is not None:
                self._drafter.warm_up(step.counts.tolist())
        gc.collect()
        gc.freeze()
        return time.monotonic() - warm_up_start

    def close(self) -> None:
        if self._relay is not None:
            self._relay.send(STOP, np.zeros(0, dtype=np.int64))
            self._relay = None
        if self._depth > 1 and self._last is not None:
            with contextlib.suppress(RuntimeError):  # this device error has already been reported
                self._last.choices()  # a graph must not be destroyed during its replay
        if self._drafter is not None:
            self._drafter.close()
        self._worker.close()


def follow(worker: Worker, relay: Relay) -> None:
    """Run the steps that rank 0 sends, until rank 0 closes its engine. Errors: LostRank."""
    while True:
        kind, content = relay.hear()
        if kind == STOP:
            worker.close()
            return
        try:
            if kind == DRAFT:
                assert worker.drafts is not None
                worker.drafts.launch(int(content[0]), Step.unpack(content[1:]))
            else:
                worker.run(Step.unpack(content))
        except RuntimeError as error:
            raise relay.explained(error) from None
