"""Apply one function to many blocks in worker processes, and return the results in order through shared memory.

If forking is safe, the workers are forked after this process has loaded all data. Otherwise, they are spawned, and each
loads the data again. Every request has a shared memory buffer, so that large results do not pass through a pipe. This
module does not depend on texts or tokens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

BUFFER_BYTES = 1 << 22
BYTES_UNDER_WAY = 64 << 20
_ASKS_EACH = 3  # requests per worker: one in progress and two queued, so that no worker waits for this process

Buffer = memoryview
"""Shared memory of BUFFER_BYTES bytes; empty if the processes were not forked."""


class HasSize(Protocol):
    @property
    def size(self) -> int:
        """Memory that the request uses in this process or in a worker, in bytes."""
        ...


Ask = TypeVar("Ask", bound=HasSize)
Answer = TypeVar("Answer")
Work = Callable[[Ask, Buffer], Answer]


class Workers(Generic[Ask, Answer]):
    """Worker processes that answer requests.

        with Workers(2, here=lambda: encode, there=partial(made_encode, tokenizer)) as workers:
            for block, found, buffer in workers.answers(blocks):
                ...

    Open files and locks inside `with`, because forked workers inherit files and locks that were opened earlier.

    here: function that returns the work function in this process, for forked processes. there: function that returns
    the same work function in a spawned process.
    """

    def __init__(self, count: int, *, here: Callable[[], Work[Ask, Answer]], there: Callable[[], Work[Ask, Answer]]):
        self._count, self._here, self._there = count, here, there
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_thread_each())
            asks = (_ASKS_EACH * self._count) + 1
            forked = _can_fork()
            work = self._here()  # also called if processes are spawned, so that this process reports errors
            if forked:
                memory = memoryview(mmap.mmap(-1, asks * BUFFER_BYTES))
                buffers = [memory[i * BUFFER_BYTES : (i + 1) * BUFFER_BYTES] for i in range(asks)]
                begin: tuple[Any, ...] = (lambda: work, buffers)
            else:
                buffers = [memoryview(b"")] * asks
                begin = (self._there, None)
            self._buffers, self._free = buffers, list(range(asks))
            context = get_context("fork" if forked else "spawn")
            self._pool = ProcessPoolExecutor(self._count, context, initializer=_begin, initargs=begin)
            stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
            self._pool.submit(int)  # starts the processes now
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def answers(self, asks: Iterable[Ask]) -> Generator[tuple[Ask, Answer, Buffer]]:
        """Yield every request with its answer, in order. The buffer is valid until the next answer is requested.

        Requests in flight use at most BYTES_UNDER_WAY bytes in total; a larger request is sent alone. Raises
        ChildProcessError if a process dies.
        """
        under_way: deque[tuple[Ask, int, Future[Answer]]] = deque()
        bytes_in_flight = 0
        try:
            for ask in asks:
                while under_way and (not self._free or bytes_in_flight + ask.size > BYTES_UNDER_WAY):
                    bytes_in_flight -= under_way[0][0].size
                    yield from self._first(under_way)
                buffer = self._free.pop()
                under_way.append((ask, buffer, self._pool.submit(_answer, ask, buffer)))
                bytes_in_flight += ask.size
            while under_way:
                yield from self._first(under_way)
        except BrokenProcessPool:
            raise ChildProcessError("a worker was killed, perhaps for lack of memory; nothing was published") from None

    def _first(self, under_way: deque[tuple[Ask, int, Future[Answer]]]) -> Iterator[tuple[Ask, Answer, Buffer]]:
        ask, buffer, future = under_way.popleft()
        yield ask, future.result(), self._buffers[buffer]
        self._free.append(buffer)  # the most recently used buffer is used next, because its memory is in the cache


def _can_fork() -> bool:
    """Whether forking is safe. If there are other threads, the child could inherit a lock that is never released."""
    return sys.platform == "linux" and threading.active_count() == 1


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit libraries to one thread each, in all processes that are started inside this context.

    In addition, a process whose libraries have not started threads can safely be forked.
    """
    thread_limits = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "FASTOKENS_BPE_THREADS"), "1")
    settings = thread_limits | {"TOKENIZERS_PARALLELISM": "false"}
    old_values = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- in a worker ----------------------------------------------------------------------------------------------------

_work: Work[Any, Any]
_buffers: list[Buffer] | None


def _begin(make: Callable[[], Work[Any, Any]], buffers: list[Buffer] | None) -> None:
    global _work, _buffers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which then ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work, _buffers = make(), buffers


def _end_with_parent() -> None:
    """Terminate this worker when its parent dies."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _answer(ask: Any, buffer: int) -> Any:
    return _work(ask, _buffers[buffer] if _buffers else memoryview(b""))
