"""Limit the number of uvicorn's connections and the time for receiving headers and bodies, and disconnect clients that
stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mega.core.inference.server.limits import HEADER_BYTES, ServerLimits

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol
else:  # uvicorn is an optional dependency, so `protocol` adds the base class at runtime
    H11Protocol = object

_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_BROKEN = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 1\r\n\r\n"
_LINGER = 2.0
"""Seconds before the connection of a rejected client is closed, so that the client can read the reason."""


@dataclass(eq=False)
class OpenConnections:
    """The connections of one server. waiting: connections without a request in progress, in order of decreasing idle
    time."""

    limits: ServerLimits
    waiting: dict[BoundedConnection, None] = field(default_factory=dict)
    count: int = 0


def protocol(limits: ServerLimits) -> type:
    """Return a subclass of uvicorn's protocol that enforces `limits`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("Connection", (BoundedConnection, H11Protocol), {"others": OpenConnections(limits)})


class BoundedConnection(H11Protocol):
    """A client connection."""

    others: OpenConnections
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _ended = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connections = self.others
        connections.count += 1
        connections.waiting[self] = None
        self._restart(connections.limits.header_seconds, lambda: self._end(_SLOW))
        if connections.count > connections.limits.max_connections:
            next(iter(connections.waiting))._end(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.count -= not self._ended
        self.others.waiting.pop(self, None)
        self._stop()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._ended:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.others.waiting.pop(self, None)

    def handle_events(self) -> None:
        previous_cycle = self.cycle
        super().handle_events()
        if self.cycle is not previous_cycle and self.cycle is not None:
            self._restart(self.others.limits.body_seconds, self._check_body)

    def on_response_complete(self) -> None:
        """Limit the time until the next request, or until the end of a body that the route has not fully read."""
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.others.waiting[self] = None
            limits, unread = self.others.limits, self.cycle is not None and self.cycle.more_body
            self._restart(limits.body_seconds if unread else limits.idle_seconds, lambda: self._end(b""))

    def send_400_response(self, msg: str) -> None:
        self._end(_LARGE if len(self.conn.trailing_data[0]) >= HEADER_BYTES else _BROKEN)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing()
        self._writing = self.loop.call_later(self.others.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def _check_body(self) -> None:
        """Abort a connection whose body is incomplete. The delay of 5 s allows the route to respond with status 408
        first."""
        if self.cycle is not None and self.cycle.more_body:
            self._restart(5.0, self.transport.abort)

    def _restart(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _end(self, answer: bytes) -> None:
        """Send `answer`, which contains the reason, and close a connection without a request in progress. Input is
        discarded for `_LINGER` seconds, because a client whose connection is reset during a write cannot read the
        reason."""
        self.others.waiting.pop(self, None)
        if self._ended or self.transport.is_closing():
            return
        self._ended = True
        self.others.count -= 1
        self._restart(_LINGER, self.transport.abort)
        if answer:
            self.transport.write(answer)
        if answer in (b"", _FULL):  # close immediately, because a new client needs the connection
            self.transport.close()
        else:
            self.transport.write_eof()
