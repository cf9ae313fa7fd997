"""Which checkpoints of a run are kept, with or without optimizer state. Knows steps and locks, no tensors.

A checkpoint is unpublished by one rename before its files go, so that a kill in between leaves a leftover of the same
kind as a killed save, which the next save or `clean` takes away. One that loses its optimizer's state only gets a mark
first, so that files on their way out are never taken for files that were lost.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mega.core.checkpoint.own.directory import CheckpointStore
from mega.core.checkpoint.own.manifest import MANIFEST, STATE_FILE, mark_weights_only
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.together import attempt
from mega.core.files import locked_alone, sync_directory


def surplus(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The steps to remove: all but the newest `keep_last` and the multiples of `keep_every`.

    >>> surplus([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    _at_least_one("--keep-last", keep_last)
    _at_least_one("--keep-every", keep_every)
    old = sorted(steps)[:-keep_last] if keep_last is not None else []
    return [step for step in old if keep_every is None or step % keep_every]


def laden(steps: list[int], keep_optimizer_last: int | None) -> list[int]:
    """Those of `steps` that are to be left with weights only: all but the newest `keep_optimizer_last`.

    >>> laden([10, 20, 30], 1)
    [10, 20]
    """
    _at_least_one("--keep-optimizer-last", keep_optimizer_last)
    return sorted(steps)[:-keep_optimizer_last] if keep_optimizer_last is not None else []


@dataclass(frozen=True)
class Retained:
    """What retention did: the steps that it removed, and those that it left with weights only."""

    removed: list[int]
    lightened: list[int]


def retain(
    store: CheckpointStore,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_optimizer_last: int | None = None,
    *,
    dry_run: bool = False,
    damaged: Callable[[int, str], None] | None = None,
    spared: frozenset[int] = frozenset(),
) -> Retained:
    """Remove what is not to be kept. To be called by one process, after a save.

    The newest good one stays whole in addition to what the limits keep, and so do the one with the least validation
    loss and those `spared`.
    Only checkpoints that open count, so damaged ones never push out a whole one; one that is being
    read stays as it is for now. damaged: also read all of what is to be kept before anything goes; called with a step
    that is not what was saved, which does not count then.
    """
    if keep_last is keep_every is keep_optimizer_last is None:
        return Retained([], [])
    whole = [step for step in store.steps() if _opens(store, step)]

    def chosen() -> tuple[list[int], frozenset[int]]:
        """What is to go, and what is not although the limits say so."""
        left = spared | good(store, whole) | best(store, whole)
        return [step for step in surplus(whole, keep_last, keep_every) if step not in left], left

    doomed, left = chosen()
    sound: set[int] = set()
    while damaged is not None and (unread := [step for step in whole if step not in doomed and step not in sound]):
        try:
            store.open(unread[-1]).verify()
            sound.add(unread[-1])
        except CheckpointError as error:
            damaged(unread[-1], str(error))
            whole.remove(unread[-1])
            doomed, left = chosen()
    heavy = [step for step in laden(whole, keep_optimizer_last) if step not in left and step not in doomed]
    heavy = [step for step in heavy if _states(store.path(step))]
    if not dry_run:
        doomed = [step for step in doomed if _unless_read(store.path(step), _remove)]
        heavy = [step for step in heavy if _unless_read(store.path(step), _lighten)]
    return Retained(doomed, heavy)


def good(store: CheckpointStore, steps: list[int]) -> frozenset[int]:
    """The newest of `steps` that is known to be good, if any is."""
    verdicts, _ = attempt(store.verdicts)
    known = {step: verdict for step, verdict in (verdicts or {}).items() if verdict.status == "good"}
    found = (step for step in reversed(steps) if step in known and store.digest(step) == known[step].manifest)
    return frozenset(itertools.islice(found, 1))


def best(store: CheckpointStore, steps: list[int]) -> frozenset[int]:
    """That of `steps` with the least validation loss, if any was validated; not one that is suspect."""
    verdicts, _ = attempt(store.verdicts)
    losses = {
        step: verdict.valid_loss
        for step, verdict in (verdicts or {}).items()
        if verdict.valid_loss is not None and verdict.status != "suspect" and step in steps
    }
    found = (step for step in sorted(losses, key=losses.__getitem__) if store.digest(step) == verdicts[step].manifest)  # type: ignore[index]
    return frozenset(itertools.islice(found, 1))


def _at_least_one(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{flag} {value}: must be 1 or more")


def _opens(store: CheckpointStore, step: int) -> bool:
    try:
        store.open(step)
    except CheckpointError:
        return False
    return True


def _unless_read(path: Path, act: Callable[[Path], None]) -> bool:
    """Do something to one checkpoint, unless a reader's lock is on it, or it is write-protected; whether it was done.

    Without lock support there are no readers' locks either.
    """
    try:  # to be written, though it is not: NFS gives no other descriptor a lock for itself alone
        descriptor = os.open(path / MANIFEST, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return False
    try:
        if not locked_alone(descriptor):
            return False
        act(path)
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> None:
    """Unpublish and delete."""
    leaving = path.with_suffix(".tmp")
    shutil.rmtree(leaving, ignore_errors=True)
    os.rename(path, leaving)
    sync_directory(path.parent)
    shutil.rmtree(leaving, ignore_errors=True)


def _lighten(path: Path) -> None:
    """Mark, then delete the files of optimizer state."""
    mark_weights_only(path)
    for file in _states(path):
        file.unlink(missing_ok=True)


def _states(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if STATE_FILE.fullmatch(file.name)]
