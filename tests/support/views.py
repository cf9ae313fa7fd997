"""Checkpoints as one rank of several sees them where its mount is stale, its disk fails, or its folder is another."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from mega.core.checkpoint.own import store as store_module
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.training.saves import place as place_module
from mega.core.training.saves import resume

KINDS = ("missing", "unreadable", "unread", "older", "cut")
"""The step is absent; a file cannot be opened; it opens, and cannot be read; it is of another run; a file is short."""


def damage(kind: str, store: CheckpointStore, step: int, other: CheckpointStore, rng: random.Random) -> Path:
    """Damage one step of a view; the file, or the directory, that is at fault. other: another run's checkpoints."""
    path = store.path(step)
    file = rng.choice(sorted(path.iterdir()))
    if kind == "missing":
        shutil.rmtree(path)
        return path
    if kind == "older":
        shutil.rmtree(path)
        shutil.copytree(other.path(step), path)
        return path
    if kind == "cut":
        os.truncate(file, rng.randrange(file.stat().st_size))
    return file


@contextlib.contextmanager
def seen_at(view: Path, unopened: str = "", unread: str = "") -> Iterator[None]:
    """On this rank a run's checkpoints are looked for, and read, at `view`; one file there fails with EIO."""
    fault = OSError(errno.EIO, os.strerror(errno.EIO))
    opened, read = os.open, os.preadv
    failing: set[int] = set()

    def open_(path: Any, *rest: Any, **more: Any) -> int:
        if unopened and str(path) == unopened:
            raise OSError(fault.errno, fault.strerror, path)
        descriptor = opened(path, *rest, **more)
        (failing.add if unread and str(path) == unread else failing.discard)(descriptor)
        return descriptor

    def preadv(descriptor: int, *rest: Any) -> int:
        if descriptor in failing:
            raise OSError(fault.errno, fault.strerror)
        return read(descriptor, *rest)

    def store_at(place: Any) -> CheckpointStore:
        return CheckpointStore(view)

    with contextlib.ExitStack() as patches:
        for module in (store_module, resume, place_module):
            patches.enter_context(mock.patch.object(module, "store_at", store_at))
        patches.enter_context(mock.patch.object(os, "open", open_))
        patches.enter_context(mock.patch.object(os, "preadv", preadv))
        yield
