"""Connections within limits, on uvicorn: how many at a time, how long headers may take, and how long a client may read
nothing. It knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mega.core.inference.server.limits import HEADER_BYTES, ServerLimits

_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_LARGE = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 1\r\n\r\n"


def protocol(limits: ServerLimits) -> type:
    """uvicorn's protocol of one connection, within `limits`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Any, None] = {}
    """Connections without a request in progress, the one that is idle for longest first."""
    count = [0]

    class Connection(H11Protocol):
        """One client."""

        _timer: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None
        _ended = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            count[0] += 1
            waiting[self] = None
            self._timer = self.loop.call_later(limits.header_seconds, self._end, _SLOW)
            if count[0] > limits.connections:
                next(iter(waiting))._end(_FULL)

        def connection_lost(self, exc: Exception | None) -> None:
            count[0] -= not self._ended
            waiting.pop(self, None)
            self._stop("_timer")
            self._stop("_writing")
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing() or self._ended:
                return
            super().data_received(data)
            if self in waiting and self.cycle is not None and not self.cycle.response_complete:
                del waiting[self]

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before and self.cycle is not None:
                self._restart(limits.body_seconds, self._check_body)

        def on_response_complete(self) -> None:
            """The next request of a connection has as long as the first, from now on."""
            super().on_response_complete()
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                waiting[self] = None
                unread = self.cycle is not None and self.cycle.more_body
                self._restart(limits.body_seconds if unread else limits.idle_seconds, lambda: self._end(b""))

        def send_400_response(self, msg: str) -> None:
            large = self.conn.trailing_data[0] and len(self.conn.trailing_data[0]) >= HEADER_BYTES
            self._end(_LARGE % (b"431 Request Header Fields Too Large" if large else b"400 Bad Request"))

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stop("_writing")
            self._writing = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop("_writing")
            super().resume_writing()

        def _check_body(self) -> None:
            """A body that is still coming ends the connection; before that, its request is answered with 408."""
            if self.cycle is not None and self.cycle.more_body:
                self._restart(5.0, self.transport.abort)

        def _restart(self, seconds: float, then: Callable[[], None]) -> None:
            self._stop("_timer")
            self._timer = self.loop.call_later(seconds, then)

        def _stop(self, timer: str) -> None:
            handle = getattr(self, timer)
            if handle is not None:
                handle.cancel()
                setattr(self, timer, None)

        def _end(self, answer: bytes) -> None:
            """Close a connection that has no request in progress, saying why. What still comes is read for a moment,
            and not heeded: a client that is cut while it writes does not read why."""
            waiting.pop(self, None)
            if self._ended or self.transport.is_closing():
                return
            self._ended = True
            count[0] -= 1
            self._restart(2.0, self.transport.abort)
            if answer:
                self.transport.write(answer)
            if answer in (b"", _FULL):  # room is needed now
                self.transport.close()
            else:
                self.transport.write_eof()

    return Connection
