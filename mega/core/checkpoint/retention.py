"""Which checkpoints of a run are kept, and the removal of the others. Knows steps and locks, no tensors.

A checkpoint is unpublished by one rename before its files go, so that a kill in between leaves a
leftover of the same kind as a killed save, which the next save or `clean` takes away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from mega.core.checkpoint.disk import opening
from mega.core.checkpoint.manifest import MANIFEST
from mega.core.checkpoint.pieces import CheckpointError
from mega.core.checkpoint.store import CheckpointStore
from mega.core.files import sync_directory


def surplus(steps: list[int], keep_last: int, keep_every: int | None) -> list[int]:
    """The steps to remove: all but the newest `keep_last` and the multiples of `keep_every`.

    >>> surplus([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    if keep_last < 1:
        raise ValueError(f"--keep-last {keep_last}: must be 1 or more")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"--keep-every {keep_every}: must be 1 or more")
    old = sorted(steps)[:-keep_last]
    return [step for step in old if keep_every is None or step % keep_every]


def retain(store: CheckpointStore, keep_last: int, keep_every: int | None = None) -> list[int]:
    """Remove what is not to be kept; the removed steps. To be called by one process, after a save.

    Only checkpoints that open count, so damaged ones never push out a whole one; one that somebody
    reads stays for now.
    """
    whole = [step for step in store.steps() if _opens(store, step)]
    return [step for step in surplus(whole, keep_last, keep_every) if _remove(store.path(step))]


def leftovers(store: CheckpointStore) -> list[Path]:
    """What killed saves and removals left under the run's directory; none of it is a checkpoint."""
    found = [*store.directory.glob("step-*.tmp"), *store.directory.glob("latest.tmp")]
    return sorted(found)


def remove_leftover(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _opens(store: CheckpointStore, step: int) -> bool:
    try:
        store.open(step)
    except CheckpointError:
        return False
    return True


def _remove(path: Path) -> bool:
    """Unpublish and delete one checkpoint, unless a reader's lock is on it."""
    leaving = path.with_suffix(".tmp")
    with opening(path / MANIFEST) as (descriptor, _):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(path, leaving)
        sync_directory(path.parent)
    shutil.rmtree(leaving, ignore_errors=True)
    return True
