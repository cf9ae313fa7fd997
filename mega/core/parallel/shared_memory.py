"""Memory shared by the ranks of one host, with marks for synchronisation.

    memory = SharedMemory(axis, size, device)     on all ranks together
    memory.bytes                                  the same `size` bytes on all ranks
    memory.mark(number)                           a rank that reads this mark can read all earlier writes
    memory.wait(rank, number)                     wait until a rank's mark is `number` or more

Marks are used instead of sockets, because a message on a socket must wake a thread of the other process, which takes
longer than a small decoding step. This module does not interpret the bytes.
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
"""Candidate folders for the shared file, which is unlinked as soon as all ranks have mapped it."""

LINE = 64
"""Number of bytes between marks, so that each mark has its own cache line."""

SPIN, DOZE = 2e-4, 1.0
"""A wait polls the mark without pauses for SPIN seconds, then with short pauses until DOZE seconds have passed, then
with longer pauses."""

PAUSES = (5e-5, 1e-3)
"""The short and the longer pause between polls, in seconds."""

LOOK = 0.25
"""Seconds between two checks that the other process is still running."""

PATIENCE = 600.0
"""Timeout in seconds of a wait for a process that is still running."""


class SharedMemory:
    """Memory shared by the ranks of an axis, all on one host. size: number of bytes. device: device for the collectives
    of the axis.

    Errors: RuntimeError, the same on all ranks, if the ranks are on several hosts or a rank cannot map the file.
    """

    def __init__(self, axis: Axis, size: int, device: torch.device):
        self.axis, self._first = axis, size + -size % LINE
        whole = self._first + LINE * axis.size
        # The first rank creates the file; the other ranks receive its path with the host names and process ids.
        identity = (socket.gethostname(), os.getpid(), _create_file(whole) if axis.first else "")
        ranks = gather_json(identity, axis, device)
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
        """Set this rank's mark to `number`. Call this method after writing or reading the data with this number."""
        _fence()
        self._marks[self.axis.index * LINE // 8] = number

    def wait(self, rank: int, number: int, patience: float | None = PATIENCE) -> None:
        """Wait until the mark of `rank` is `number` or more.

        patience: timeout in seconds; None for no timeout.
        Errors: RuntimeError, as from a collective, if the process of the rank has ended or the timeout has expired.
        """
        position, marks = rank * LINE // 8, self._marks
        # Poll 200 times before reading the clock, because in a decoding step the mark is nearly always already set.
        for _ in range(200):
            if marks[position] >= number:
                _fence()
                return
        began = time.monotonic()
        checked = began
        while marks[position] < number:
            current = time.monotonic()
            if current - began < SPIN:
                os.sched_yield()
                continue
            time.sleep(PAUSES[current - began > DOZE])
            if current - checked > LOOK:
                checked = current
                self._check(rank, current - began, patience)
        _fence()

    def _check(self, rank: int, waited: float, patience: float | None) -> None:
        name = self.axis.ranks[rank]
        if is_dead(self.processes[rank]):
            raise RuntimeError(f"Connection closed by peer: rank {name} has ended")
        if patience is not None and waited > patience:
            raise RuntimeError(f"Timed out waiting {patience:.0f} s for rank {name}")


def is_dead(pid: object) -> bool:
    """Whether a process of this host has ended (zombies included)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except OSError:
        return False


def _create_file(size: int) -> str:
    """Create a file of `size` allocated bytes, and return its path, or the empty string if no folder has enough
    space."""
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp(prefix="mega-shared-", dir=folder)
            try:
                _allocate(number, size)
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(number)
    return ""


def _allocate(number: int, size: int) -> None:
    """Allocate the file's blocks, because a write to a sparse file on a full disk would kill the process (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.ftruncate(number, size)


_LOCK = threading.Lock()


def _fence() -> None:
    """Execute a memory fence, across which reads and writes are not reordered.

    Releasing a lock and then acquiring it has this effect on any processor.
    """
    for _ in range(2):
        _LOCK.acquire()
        _LOCK.release()
