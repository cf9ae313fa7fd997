"""Processes that apply one function to many blocks and return results in order, through shared memory.

They are forked from this process, after it has loaded all that the work needs, where that is safe; elsewhere they are
spawned and load it again. A large answer need not pass through a pipe: every ask has a buffer of shared memory.
It knows neither texts nor tokens.
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
_ASKS_EACH = 3  # of which one is worked on: no worker waits while this process is busy

Buffer = memoryview
"""Memory of BUFFER_BYTES that asker and worker share; of none where the processes were not forked."""


class HasSize(Protocol):
    @property
    def size(self) -> int:
        """Bytes that it keeps in memory, or makes a worker keep."""
        ...


Ask = TypeVar("Ask", bound=HasSize)
Answer = TypeVar("Answer")
Work = Callable[[Ask, Buffer], Answer]


class Workers(Generic[Ask, Answer]):
    """Processes that answer asks.

        with Workers(2, here=lambda: encode, there=partial(made_encode, tokenizer)) as workers:
            for block, found, buffer in workers.answers(blocks):
                ...

    Files and locks that this process opens before `with` belong to its workers too: open them inside.

    here: makes the work in this process, for processes forked from it; there: the same, sent to a new process.
    """

    def __init__(self, count: int, *, here: Callable[[], Work[Ask, Answer]], there: Callable[[], Work[Ask, Answer]]):
        self._count, self._here, self._there = count, here, there
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_thread_each())
            asks = (_ASKS_EACH * self._count) + 1
            forked = _can_fork()
            work = self._here()  # also where processes are spawned, so that this one reports its errors
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
            self._pool.submit(int)  # forks now
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def answers(self, asks: Iterable[Ask]) -> Generator[tuple[Ask, Answer, Buffer]]:
        """Every ask with its answer, in order. What lies in the buffer lasts until the next answer is asked for.

        No more than BYTES_UNDER_WAY of asks are held at a time, or one. Raises ChildProcessError where a process dies.
        """
        under_way: deque[tuple[Ask, int, Future[Answer]]] = deque()
        held = 0
        try:
            for ask in asks:
                while under_way and (not self._free or held + ask.size > BYTES_UNDER_WAY):
                    held -= under_way[0][0].size
                    yield from self._first(under_way)
                buffer = self._free.pop()
                under_way.append((ask, buffer, self._pool.submit(_answer, ask, buffer)))
                held += ask.size
            while under_way:
                yield from self._first(under_way)
        except BrokenProcessPool:
            raise ChildProcessError("a worker was killed, perhaps for lack of memory; nothing was published") from None

    def _first(self, under_way: deque[tuple[Ask, int, Future[Answer]]]) -> Iterator[tuple[Ask, Answer, Buffer]]:
        ask, buffer, future = under_way.popleft()
        yield ask, future.result(), self._buffers[buffer]
        self._free.append(buffer)  # the one used last is taken first: its memory is warm


def _can_fork() -> bool:
    """Whether a copy of this process would be sound: another thread might hold a lock that the copy never releases."""
    return sys.platform == "linux" and threading.active_count() == 1


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that start inside run their libraries on one thread: the processes are the parallelism.

    A library that has no thread of its own can be forked, too.
    """
    one = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "FASTOKENS_BPE_THREADS"), "1")
    wanted = one | {"TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- in a worker ----------------------------------------------------------------------------------------------------

_work: Work[Any, Any]
_buffers: list[Buffer] | None


def _begin(make: Callable[[], Work[Any, Any]], buffers: list[Buffer] | None) -> None:
    global _work, _buffers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work, _buffers = make(), buffers


def _end_with_parent() -> None:
    """Workers end with a killed parent."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _answer(ask: Any, buffer: int) -> Any:
    return _work(ask, _buffers[buffer] if _buffers else memoryview(b""))
