"""Durable writes and bounded reads: the only way this room touches files.

A written file is new, has the mode that the umask gives, and is synced before its name counts. A read
refuses links, pipes and devices, and never asks for more bytes than it was allowed. Tensors of a file
are read, hashed and written side by side. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mega.core import untrusted
from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.untrusted import Json

BLOCK = 4 << 20
"""Bytes handled at a time, so that memory does not grow with tensors, and what was read is still near when it is hashed
and written."""
WORKERS = min(8, max(3, (os.cpu_count() or 1) // 4))
"""Threads that handle tensors side by side: reading and writing wait for disks, and one core hashes 1 to 2 GB/s. A node
may have eight ranks that save at once."""
EARLY = 1 << 20
"""Writes of at least so many bytes are sent to the disk at once."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def side_by_side(act: Callable[[Job], Result], jobs: Sequence[Job], size: int) -> list[Result]:
    """`act` of every job, in the order of the jobs; by several threads where there is more than a block to do.

    size: bytes of all jobs. Errors: one that an `act` raised; jobs not begun by then are left.
    """
    results: dict[int, Result] = {}
    faults: list[BaseException] = []
    numbers = iter(range(len(jobs)))

    def work() -> None:
        for number in numbers:  # shared: each number comes to one thread
            if faults:
                return
            try:
                results[number] = act(jobs[number])
            except BaseException as error:
                faults.append(error)

    # Daemons, and not an executor, whose threads a process that ends in an error would wait for.
    count = min(WORKERS, len(jobs)) if size > BLOCK else 1
    threads = [threading.Thread(target=work, name="checkpoint-block", daemon=True) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return [results[number] for number in range(len(jobs))]


@contextmanager
def creating(path: Path) -> Iterator[int]:
    """A new file's descriptor; on leaving, its bytes are on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int = 0) -> None:
    """`os.pwrite` may write less than it was given; this does not. Much is sent on its way to the disk at once, so
    that the sync at the end does not find all of it."""
    view, end = memoryview(data), offset
    while view.nbytes:
        count = os.pwrite(descriptor, view, end)
        view, end = view[count:], end + count
    if end - offset >= EARLY and hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # "not needed" begins to write what is not written yet, and lets go of the rest
            os.posix_fadvise(descriptor, offset, end - offset, os.POSIX_FADV_DONTNEED)


@contextmanager
def opening(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and size. Errors: CheckpointError for anything else, and where reading it fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link, which is not followed") from error
        raise UnreadableError.of(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield descriptor, status.st_size
    except OSError as error:
        if error.filename is not None:
            raise
        raise UnreadableError.of(path, error) from error  # a read knows no name
    finally:
        os.close(descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    with opening(path) as (descriptor, size):
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, at most {limit} are read")
        buffer = bytearray(size)
        read_into(descriptor, memoryview(buffer), 0, path)
        return bytes(buffer)


def read_into(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from `offset`. Errors: CheckpointError where the file ends early."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path}: truncated at byte {offset + done}")
        done += count


def parse_json(data: bytes, path: Path) -> Json:
    """JSON from a file, whose name errors carry. Refused: NaN and what is not finite, a name twice, endless depth.

    Errors: CheckpointError.
    """
    try:
        return untrusted.parse_json(data, str(path), unique=True)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
