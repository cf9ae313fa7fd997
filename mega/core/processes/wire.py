"""Lines of JSON between the launchers of several hosts: one connection, whose other end may stop without closing it.

It knows no jobs; hosts.py and leader.py do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

BEAT = 2.0
"""Seconds between two signs of life."""

SILENT = 15.0
"""Seconds of silence after which the other end counts as lost."""

_LONGEST = 1 << 20
"""Most characters of a line."""


class Wire:
    """One end of a connection. heard: called with each message, on a thread of the wire's own. lost: called once when
    the other end has closed it, or was silent for SILENT seconds. here, there: addresses of both ends, also when it is
    lost. Errors: OSError where the other end has gone already."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.here: str = connection.getsockname()[0]
        self.there: str = connection.getpeername()[0]
        limit = struct.pack("ll", int(SILENT), 0)  # a send to an end that was stopped waits for room
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = connection.makefile("r", encoding="utf-8")
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._heard_at = time.monotonic()

    def start(self, heard: Callable[[dict[str, Any]], None], lost: Callable[[], None]) -> Wire:
        threading.Thread(target=self._read, args=(heard, lost), name="wire-read", daemon=True).start()
        threading.Thread(target=self._beat, name="wire-beat", daemon=True).start()
        return self

    def send(self, message: Mapping[str, object]) -> None:
        """An end that does not take it is found to be lost by the thread that reads."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(f"{json.dumps(message)}\n".encode())

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()

    @property
    def closed(self) -> bool:
        """Here, or by the other end."""
        return self._closed.is_set()

    def wait_closed(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _read(self, heard: Callable[[dict[str, Any]], None], lost: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := self._lines.readline(_LONGEST):
                message = json.loads(line)
                self._heard_at = time.monotonic()
                if not isinstance(message, dict):
                    break
                if message:
                    heard(message)
        self.close()
        lost()

    def _beat(self) -> None:
        """{} is a sign of life."""
        while not self._closed.wait(BEAT):
            self.send({})
            if time.monotonic() > self._heard_at + SILENT:
                self.close()
