"""Call the engine from a single thread, with a bounded queue. This module depends on neither text nor HTTP.

1. A route calls `add` with the sequences of a request. If the queue is full, `add` fails immediately.
2. The thread adds the sequences to the engine, which rejects a request that can never fit.
3. The thread runs steps while any sequence is in flight. Events are delivered to the tickets on the event loop.
4. `cancel` on a ticket removes the ticket's sequence from the engine.
5. If a step or a cancellation fails, the engine is lost: every ticket receives EngineLost, and `on_failure` is called.
6. If a step cannot end because another rank does not respond, `lose` is called, which also marks the engine as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mega.core.inference.relay import LostRank
from mega.core.inference.request import LOGITS_NOT_FINITE, Engine, Event, Request

NOT_FINITE = 3
"""Number of consecutive requests with non-finite logits after which the model is considered broken."""

ENDING = 1.0
"""Seconds to wait for a lost engine's thread, which a stopped rank may block."""


class QueueFull(Exception):
    """Raised if the queue is full; a later attempt may succeed."""


class EngineLost(Exception):
    """Raised if the engine has failed or is closed. The message may be shown to clients."""


@dataclass(eq=False)
class Ticket:
    """One sequence in flight. events: the engine's events for the sequence; the last event has a `finish`, or is
    EngineLost."""

    number: int
    _cancel: Callable[[Ticket], None]
    events: asyncio.Queue[Event | EngineLost] = field(default_factory=asyncio.Queue)
    done: bool = False

    def cancel(self) -> None:
        """Remove the sequence from the engine if the sequence has not ended."""
        if not self.done:
            self._cancel(self)


class Driver:
    """Runs the engine on a separate thread.

    waiting: maximum number of waiting sequences, in addition to the sequences that the engine runs concurrently.
    on_failure: called once, on the event loop, with the exception that the failed step raised.
    """

    def __init__(self, engine: Engine, waiting: int, on_failure: Callable[[BaseException], None]) -> None:
        self.engine, self.most = engine, engine.limits.requests + waiting
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # accessed only on the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.in_flight = 0
        self.failure: BaseException | None = None
        self.not_finite = 0
        """Number of requests that have failed because of non-finite logits since the engine last returned a token or
        vector."""

    @property
    def unhealthy(self) -> str | None:
        """The reason why requests fail: the engine is lost, or the last requests had non-finite logits. None if the
        model is healthy."""
        if self.failure is not None:
            return _reason(self.failure)
        return LOGITS_NOT_FINITE if self.not_finite >= NOT_FINITE else None

    def start(self) -> None:
        """Start the thread; events are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def add(self, requests: Sequence[Request]) -> list[Ticket]:
        """Add all requests or none, and return their tickets.

        Errors: QueueFull; EngineLost; RequestError if a request can never fit.
        """
        self.check_room(len(requests))
        assert self._loop is not None
        accepted: asyncio.Future[list[Ticket]] = self._loop.create_future()
        self.in_flight += len(requests)
        self._calls.put(lambda: self._add(requests, accepted))
        try:
            return await asyncio.shield(accepted)
        except asyncio.CancelledError:  # the client disconnected: cancel the sequences once the engine has added them
            accepted.add_done_callback(_cancel_all)
            raise

    def check_room(self, count: int) -> None:
        """Check that the queue currently accepts `count` more sequences. Errors: QueueFull, EngineLost."""
        if self.failure is not None:
            raise EngineLost(_reason(self.failure))
        if self.in_flight + count > self.most:
            raise QueueFull(f"{self.in_flight} of at most {self.most} sequences are in flight; try later")

    def close(self) -> None:
        """Stop the thread, and wait until it ends. If the engine is lost, wait at most `ENDING` seconds."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(None if self.failure is None else ENDING)

    def lose(self, error: BaseException) -> None:
        """Mark the engine as lost, so that the sequences in flight and all later calls fail. May be called from any
        thread."""
        self._later(partial(self._spread, error))

    def abandon(self, reason: str) -> None:
        """End all sequences in flight. Their tickets receive EngineLost with the given reason."""
        for ticket in list(self._tickets.values()):
            ticket.cancel()
            self._end(ticket, EngineLost(reason))

    # --- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # no other thread would receive the exception
            self._fail(error)

    def _drive(self) -> None:
        """Call the engine until `close`. Errors: any error that the engine raises; the engine is then lost."""
        while True:
            try:
                while (call := self._calls.get(block=self.engine.idle)) is not None:
                    call()
                return
            except queue.Empty:
                pass
            events = self.engine.step()
            if events:
                self._later(partial(self._deliver, events))

    def _add(self, requests: Sequence[Request], added: asyncio.Future[list[Ticket]]) -> None:
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(Ticket(self.engine.add(request), self._cancel))
        except Exception as error:
            for ticket in tickets:
                self.engine.cancel(ticket.number)
            self._later(partial(self._refused, len(requests), added, error))
            return
        self._later(lambda: self._accepted(tickets, added))

    def _fail(self, error: BaseException) -> None:
        self.lose(error)
        while (call := self._calls.get()) is not None:
            with contextlib.suppress(BaseException):
                call()

    def _later(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(call)

    # --- on the loop ----------------------------------------------------------------------------------------------

    def _spread(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        for ticket in list(self._tickets.values()):
            self._end(ticket, EngineLost(_reason(error)))
        self._on_failure(error)

    def _accepted(self, made: list[Ticket], added: asyncio.Future[list[Ticket]]) -> None:
        for ticket in made:
            self._tickets[ticket.number] = ticket
            if self.failure is not None:
                self._end(ticket, EngineLost(_reason(self.failure)))
        added.set_result(made)

    def _refused(self, count: int, added: asyncio.Future[list[Ticket]], error: Exception) -> None:
        self.in_flight -= count
        added.set_exception(EngineLost(_reason(self.failure)) if self.failure is not None else error)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            ticket = self._tickets.get(event.request)
            if ticket is None:  # the request was rejected after some of its sequences had been added
                continue
            if event.token is not None or event.vector is not None:
                self.not_finite = 0
            elif event.message == LOGITS_NOT_FINITE:
                self.not_finite += 1
            if event.finish is None:
                ticket.events.put_nowait(event)
            else:
                self._end(ticket, event)

    def _end(self, ticket: Ticket, last: Event | EngineLost) -> None:
        ticket.done = True
        del self._tickets[ticket.number]
        self.in_flight -= 1
        ticket.events.put_nowait(last)

    def _cancel(self, ticket: Ticket) -> None:
        self._calls.put(lambda: self.engine.cancel(ticket.number))


def _cancel_all(added: asyncio.Future[list[Ticket]]) -> None:
    if not added.cancelled() and added.exception() is None:
        for ticket in added.result():
            ticket.cancel()


def _reason(error: BaseException | None) -> str:
    """Return the message for clients. The message names a lost rank, but contains no details about other errors."""
    if isinstance(error, LostRank | TimeoutError):  # omit the details that a library appends
        return f"the model has failed: {str(error).split(': ')[0]}"
    return "the model has failed"
