"""Run the server until it receives a signal or the engine fails, and then shut down in three phases:

1. After SIGTERM or SIGINT, new requests get 503; requests in flight may finish within `drain_seconds`.
2. Requests that are still in flight get 503, or an error as the last event of their stream.
3. Connections are closed, then the engine is closed, which ends the other ranks.

After a failure of the engine, the shutdown begins with phase 2, and the engine's error is raised at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mega.core.inference.request import Engine
from mega.core.inference.server.app import make_app
from mega.core.inference.server.connections import protocol
from mega.core.inference.server.driver import Driver
from mega.core.inference.server.limits import HEADER_BYTES, ServerLimits
from mega.core.inference.server.options import ServerOptions
from mega.core.inference.server.service import Manner, Service
from mega.core.text.chat.format import ChatFormat
from mega.core.text.tokenizer import Tokenizer

_FILES = 128
"""Number of file descriptors reserved for uses other than connections."""
_UNACCEPTED = 2048
"""Maximum number of connections that the operating system queues before they are accepted."""


class HttpServer:
    """An HTTP server for one engine on one socket. `stop` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: ServerOptions,
        chat: ChatFormat | None = None,
        manners: Mapping[str, Manner] | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine, self.options = engine, options
        self.driver = Driver(engine, options.limits.max_waiting, self._fail)
        self.service = Service(self.driver, tokenizer, options, chat, manners)

    def stop(self) -> None:
        """Drain and shut down."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has already ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def run(self, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests until `stop` is called or a signal arrives. ready: called when the server accepts requests.

        Errors: any error of the engine.
        """
        asyncio.run(self._run(listening, ready))
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        assert self._stop is not None
        self._stop.set()

    async def _run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        import uvicorn

        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        server = uvicorn.Server(_config(make_app(self.service), self.options.limits))
        self.driver.start()
        with _heeding(self._loop, self._stop):
            serving = asyncio.create_task(server._serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            if server.started:
                listening.listen(
                    _UNACCEPTED
                )  # longer than uvicorn's backlog, which also limits the connections accepted at a time
                ready()
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            server.should_exit = True
            await serving
        self.driver.close()
        if self.failure is None:
            self.engine.close()

    async def _drain(self) -> None:
        """Run phases 1 and 2 of the shutdown."""
        self.service.draining = True
        seconds = 0.0 if self.failure is not None else self.options.limits.drain_seconds
        await self._idle(seconds)
        self.driver.abandon("the server is shutting down")
        await self._idle(2.0)
        await asyncio.sleep(0.2 if self.failure is None else 0.05)  # requests that arrive during this time get 503
        await self._idle(2.0)

    async def _idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.service.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. port: 0 for any free port. Errors: ValueError naming flag and
    address."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot listen there: {getattr(error, 'strerror', error)}"
        ) from None
    return listening


def _config(app: Any, limits: ServerLimits) -> Any:
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a traceback may contain a prompt
    return uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        # With a larger backlog, newer connections could displace a connection before its first request is read.
        backlog=max(1, min(128, limits.max_connections // 8)),
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=3,
    )


def raise_file_limit(connections: int) -> int:
    """Raise the limit on file descriptors, and return the number of connections that the limit permits, at most
    `connections`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        new_limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
            soft = new_limit
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - _FILES))


@contextlib.contextmanager
def _heeding(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Make SIGTERM and SIGINT set `stop`. Has no effect outside the main thread, which alone can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
