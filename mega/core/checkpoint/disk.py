"""Durable writes and bounded reads: the only way this room touches files.

A written file is new, has the mode that the umask gives, and is synced before its name counts. A read
refuses links, pipes and devices, and never asks for more bytes than it was allowed. Knows nothing
of what the bytes mean.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mega.core.checkpoint.pieces import CheckpointError

BLOCK = 16 << 20
"""Bytes handled at a time, so that memory does not grow with tensors."""


@contextmanager
def creating(path: Path) -> Iterator[int]:
    """A new file's descriptor; on leaving, its bytes are on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """`os.write` may write less than it was given; this does not."""
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


@contextmanager
def opening(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and size. Errors: CheckpointError for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield descriptor, status.st_size
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


def parse_json(data: bytes, path: Path) -> Any:
    """JSON from a file, whose name errors carry. Refused: NaN, a name twice, endless depth."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name occurs twice")
        return made

    try:
        return json.loads(data, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
