"""Durable writes and bounded reads. This package accesses all files through this module.

Each written file is new, has the mode given by the umask, and is synced before any other file refers to it. Reading
refuses links, pipes and devices, and files larger than a limit. The tensors of a file are read, hashed and written
concurrently. This module does not interpret the bytes.
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
from mega.core.files import name_place
from mega.core.untrusted import Json

BLOCK = 4 << 20
"""Number of bytes handled at a time. The memory used therefore does not depend on the size of tensors, and a block is
still in the processor's cache when it is hashed and written."""
WORKERS = min(8, max(3, (os.cpu_count() or 1) // 4))
"""Number of threads that handle tensors concurrently. Several threads are needed because reads and writes wait for
disks, and because one core hashes only 1 to 2 GB/s. The number is limited to a quarter of the cores, because the eight
ranks of a node may save at the same time."""
EARLY = 1 << 20
"""Writes of at least this many bytes are flushed to disk immediately."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_concurrently(act: Callable[[Job], Result], jobs: Sequence[Job], size: int) -> list[Result]:
    """Call `act` for every job and return the results in the order of the jobs. Several threads are used if `size`
    exceeds one block.

    size: total number of bytes of all jobs. Errors: the first error that `act` raised. After an error, no further jobs
    are started.
    """
    results: dict[int, Result] = {}
    faults: list[BaseException] = []
    numbers = iter(range(len(jobs)))

    def work() -> None:
        for number in numbers:  # the threads share this iterator, so each number goes to only one thread
            if faults:
                return
            try:
                results[number] = act(jobs[number])
            except BaseException as error:
                faults.append(error)

    # An executor is not used, because a process that ends in an error would wait for the executor's threads.
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
def new_file(path: Path) -> Iterator[int]:
    """Create a file and yield its descriptor. At the end of the `with` block, the file is synced to disk. An OSError in
    the block names the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    except OSError as error:
        name_place(error, path)
        raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int = 0) -> None:
    """Write all of `data`, with several `os.pwrite` calls if necessary. Large writes are flushed immediately, so that
    the final sync takes little time."""
    view, end = memoryview(data), offset
    while view.nbytes:
        count = os.pwrite(descriptor, view, end)
        view, end = view[count:], end + count
    if end - offset >= EARLY and hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # DONTNEED starts writing dirty pages and drops clean pages from the cache
            os.posix_fadvise(descriptor, offset, end - offset, os.POSIX_FADV_DONTNEED)


@contextmanager
def open_file(path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file and yield (descriptor, size). Errors: CheckpointError if the file is not a regular file or
    cannot be read."""
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
        raise UnreadableError.of(path, error) from error  # errors of read calls do not name the file
    finally:
        os.close(descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file. Errors: CheckpointError if the file has more than `limit` bytes."""
    with open_file(path) as (descriptor, size):
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, at most {limit} are read")
        buffer = bytearray(size)
        read_into(descriptor, memoryview(buffer), 0, path)
        return bytes(buffer)


def read_into(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Read bytes from `offset` into `view` until it is full. Errors: CheckpointError if the file ends early."""
    filled = 0
    while filled < view.nbytes:
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            raise CheckpointError(f"{path}: truncated at byte {offset + filled}")
        filled += count


def parse_json(data: bytes, path: Path) -> Json:
    """Parse JSON. path: the file to name in errors. NaN, infinities, duplicate keys and excessive nesting are refused.

    Errors: CheckpointError.
    """
    try:
        return untrusted.parse_json(data, str(path), unique=True)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
