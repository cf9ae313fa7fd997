"""Memory that the ranks of one host map, and marks in it by which they wait for each other.

    memory = SharedMemory(axis, size, device)     on all ranks together
    memory.bytes                                  the same `size` bytes on all of them
    memory.mark(number)                           who sees the mark sees all that was written before it
    memory.wait(rank, number)                     until a rank's mark is `number` or more

A message by a socket wakes a thread of the other process, which takes longer than a small step computes. It knows
nothing of what is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import torch

from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Axis

FOLDERS = ("/dev/shm", tempfile.gettempdir())
"""Folders for the file, which has no name any more once all have mapped it."""

LINE = 64
"""Bytes between marks: a cache line each."""

SPIN, DOZE = 2e-4, 1.0
"""Seconds of a wait in which the mark is looked at without a pause; and with short ones."""

PAUSES = (5e-5, 1e-3)
"""Seconds between looks, then and later."""

LOOK = 0.25
"""Seconds after which a wait looks whether the other process lives, again and again."""

PATIENCE = 600.0
"""Seconds that a rank waits for another one which lives."""


class SharedMemory:
    """axis: whose ranks share it; on one host. size: bytes. device: of their collectives.

    Errors: RuntimeError, the same on all ranks, where they are on several hosts or one of them cannot map it.
    """

    def __init__(self, axis: Axis, size: int, device: torch.device):
        self.axis, self._first = axis, size + -size % LINE
        whole = self._first + LINE * axis.size
        own = (socket.gethostname(), os.getpid(), _made(whole) if axis.first else "")
        ranks = gather_json(own, axis, device)
        self.processes = [process for _, process, _ in ranks]
        path, problem, self._map = ranks[0][2], "", None
        if len({host for host, _, _ in ranks}) > 1:
            problem = "the ranks are on several hosts"
        elif not path:
            problem = f"no room for {whole} bytes in {' or '.join(FOLDERS)}"
        else:
            try:
                with open(path, "r+b") as file:
                    self._map = mmap.mmap(file.fileno(), whole)
            except (OSError, ValueError) as error:
                problem = f"{path}: {error}"
        problems = [each for each in gather_json(problem, axis, device) if each]
        if axis.first and path:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if problems or self._map is None:
            raise RuntimeError(problems[0])
        view = memoryview(self._map)
        self.bytes, self._marks = view[:size], view[self._first :].cast("q")

    def mark(self, number: int) -> None:
        """Mark that this rank has written, or read, what belongs to `number`."""
        _fence()
        self._marks[self.axis.index * LINE // 8] = number

    def wait(self, rank: int, number: int, patience: float | None = PATIENCE) -> None:
        """patience: in seconds; None: as long as it takes. Errors: RuntimeError, as of a collective, where the rank has
        ended or the time is over."""
        at, marks = rank * LINE // 8, self._marks
        for _ in range(200):
            if marks[at] >= number:
                _fence()
                return
        began = time.monotonic()
        looked = began
        while marks[at] < number:
            now = time.monotonic()
            if now - began < SPIN:
                os.sched_yield()
                continue
            time.sleep(PAUSES[now - began > DOZE])
            if now - looked > LOOK:
                looked = now
                self._check(rank, now - began, patience)
        _fence()

    def _check(self, rank: int, waited: float, patience: float | None) -> None:
        name = self.axis.ranks[rank]
        if is_dead(self.processes[rank]):
            raise RuntimeError(f"Connection closed by peer: rank {name} has ended")
        if patience is not None and waited > patience:
            raise RuntimeError(f"Timed out waiting {patience:.0f} s for rank {name}")


def is_dead(pid: object) -> bool:
    """Whether a process of this host has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except OSError:
        return False


def _made(size: int) -> str:
    """The name of a new file of `size` bytes that the system has set aside; empty where there is no room."""
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp(prefix="mega-shared-", dir=folder)
            try:
                _set_aside(number, size)
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(number)
    return ""


def _set_aside(number: int, size: int) -> None:
    """A file that only claims its size ends the process that writes to it when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.ftruncate(number, size)


_LOCK = threading.Lock()


def _fence() -> None:
    """Nothing moves from one side of this to the other: to release a lock, and then to take it, keeps the order of both
    sides on any processor."""
    for _ in range(2):
        _LOCK.acquire()
        _LOCK.release()
