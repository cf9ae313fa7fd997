"""A connection that sends lines of JSON between the launchers of two hosts, and detects a peer that stops without
closing the connection. This module does not depend on jobs, unlike hosts.py and leader.py.
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
"""Seconds between two heartbeats."""

SILENT = 15.0
"""Seconds without a message or heartbeat after which the connection counts as lost."""

_LONGEST = 1 << 20
"""Maximum number of characters in a line."""


class Wire:
    """One end of a connection between two hosts.

    heard: function that is called with each message, on the wire's reader thread. lost: function that is called once,
    when the other end has closed the connection or sent nothing for SILENT seconds. here, there: addresses of the two
    ends, which stay valid after a loss. Errors: OSError if the other end has already closed the connection.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.here: str = connection.getsockname()[0]
        self.there: str = connection.getpeername()[0]
        # struct timeval: timeout of a send, which would block forever if the peer is stopped and the buffers are full
        limit = struct.pack("ll", int(SILENT), 0)
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
        """Send a message. Errors are ignored, because the reader thread detects a lost connection."""
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
        """Whether either end has closed the connection."""
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
        """Send heartbeats ({}), and close the connection if the other end sends nothing."""
        while not self._closed.wait(BEAT):
            self.send({})
            if time.monotonic() > self._heard_at + SILENT:
                self.close()
