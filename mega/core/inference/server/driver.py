"""The one thread that calls the engine, and the bounded queue in front of it. It knows neither text nor HTTP.

1. A route asks `add` for its sequences. Where they do not fit into the queue they are refused at once.
2. The thread adds them to the engine; a request that can never fit is refused by it.
3. The thread steps the engine as long as anything is in flight. Events reach the tickets on the loop's side.
4. `cancel` of a ticket takes its sequence out of the engine.
5. Where a step or a cancellation fails the engine is lost: every ticket hears of it, and so does `on_failure`.
6. `lose` says the same of an engine whose step will never end, since another rank does not answer.
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
"""Requests in a row without a finite logit, after which it is the model, and not one prompt."""

ENDING = 1.0
"""Seconds in which a thread ends whose engine is lost; it may wait for a rank that is stopped."""


class QueueFull(Exception):
    """No room for a request now; the same may fit later."""


class EngineLost(Exception):
    """The engine has failed, or is no more; the text is fit for a client."""


@dataclass(eq=False)
class Ticket:
    """One sequence on its way. events: of the engine, the last one has a finish; or EngineLost."""

    number: int
    _cancel: Callable[[Ticket], None]
    events: asyncio.Queue[Event | EngineLost] = field(default_factory=asyncio.Queue)
    done: bool = False

    def cancel(self) -> None:
        """Take the sequence out of the engine, if it is still there."""
        if not self.done:
            self._cancel(self)


class Driver:
    """The engine on a thread of its own.

    waiting: sequences that may wait beyond those that the engine runs at once. on_failure: called on the loop, once,
    with what the failed step had to report.
    """

    def __init__(self, engine: Engine, waiting: int, on_failure: Callable[[BaseException], None]) -> None:
        self.engine, self.most = engine, engine.limits.requests + waiting
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.in_flight = 0
        self.failure: BaseException | None = None
        self.not_finite = 0
        """Requests that have failed since a token came, one after the other, because logits were not finite."""

    @property
    def unhealthy(self) -> str | None:
        """Why no request is answered, or none was of late; None where they are."""
        if self.failure is not None:
            return _reason(self.failure)
        return LOGITS_NOT_FINITE if self.not_finite >= NOT_FINITE else None

    def start(self) -> None:
        """Start the thread; events come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def add(self, requests: Sequence[Request]) -> list[Ticket]:
        """Tickets of all requests, or of none.

        Errors: QueueFull; EngineLost; RequestError where one can never fit.
        """
        self.check_room(len(requests))
        assert self._loop is not None
        added: asyncio.Future[list[Ticket]] = self._loop.create_future()
        self.in_flight += len(requests)
        self._calls.put(lambda: self._add(requests, added))
        try:
            return await asyncio.shield(added)
        except asyncio.CancelledError:  # the client has left: not before the engine knows the sequences
            added.add_done_callback(_cancel_all)
            raise

    def check_room(self, count: int) -> None:
        """Whether so many sequences would be taken now. Errors: QueueFull, EngineLost."""
        if self.failure is not None:
            raise EngineLost(_reason(self.failure))
        if self.in_flight + count > self.most:
            raise QueueFull(f"{self.in_flight} of at most {self.most} sequences are in flight; try later")

    def close(self) -> None:
        """End the thread, and wait for it; but not for a step that never ends."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(None if self.failure is None else ENDING)

    def lose(self, error: BaseException) -> None:
        """The engine is lost: those in flight hear of it, and so do calls that are still to come. From any thread."""
        self._later(partial(self._spread, error))

    def abandon(self, reason: str) -> None:
        """End all sequences in flight: their tickets hear EngineLost with this reason."""
        for ticket in list(self._tickets.values()):
            ticket.cancel()
            self._end(ticket, EngineLost(reason))

    # --- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # whatever it was, no one else would hear of it
            self._fail(error)

    def _drive(self) -> None:
        """Call the engine until `close`. Errors: of the engine, which is lost."""
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
        made: list[Ticket] = []
        try:
            for request in requests:
                made.append(Ticket(self.engine.add(request), self._cancel))
        except Exception as error:
            for ticket in made:
                self.engine.cancel(ticket.number)
            self._later(partial(self._refused, len(requests), added, error))
            return
        self._later(lambda: self._accepted(made, added))

    def _fail(self, error: BaseException) -> None:
        self.lose(error)
        while (call := self._calls.get()) is not None:
            with contextlib.suppress(BaseException):
                call()

    def _later(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits
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
            if ticket is None:  # of a request that was refused as a whole
                continue
            if event.token is not None:
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
    """What a client may know: which rank was lost; of other errors, that there was one."""
    if isinstance(error, LostRank | TimeoutError):  # the first part of it, not what a library had to add
        return f"the model has failed: {str(error).split(': ')[0]}"
    return "the model has failed"
