"""Decide which checkpoints of a run are kept, with or without optimizer state, and remove the others. This module
handles steps and locks, and does not interpret tensors.

A checkpoint is unpublished by one rename before its files are deleted. If the process is killed in between, the next
save or `clean` removes the remaining directory, as after a killed save. A checkpoint is marked before its optimizer
state is removed, so that removed files are never mistaken for lost files.
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
    """Return the steps to remove: all except the newest `keep_last` steps and the multiples of `keep_every`.

    >>> surplus([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    _at_least_one("--keep-last", keep_last)
    _at_least_one("--keep-every", keep_every)
    old = sorted(steps)[:-keep_last] if keep_last is not None else []
    return [step for step in old if keep_every is None or step % keep_every]


def to_lighten(steps: list[int], keep_optimizer_last: int | None) -> list[int]:
    """Return the steps whose optimizer state is to be removed: all except the newest `keep_optimizer_last` steps.

    >>> to_lighten([10, 20, 30], 1)
    [10, 20]
    """
    _at_least_one("--keep-optimizer-last", keep_optimizer_last)
    return sorted(steps)[:-keep_optimizer_last] if keep_optimizer_last is not None else []


@dataclass(frozen=True)
class Retained:
    """The steps that a call of `retain` removed or reduced to weights."""

    removed: list[int]  # steps that were removed
    lightened: list[int]  # steps whose optimizer state was removed


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
    """Remove checkpoints that exceed the limits. Only one process may call this function, after a save.

    Some checkpoints are kept regardless of the limits, including their optimizer state: the newest good checkpoint, the
    checkpoint with the lowest validation loss, and the checkpoints in `spared`. Only checkpoints that can be opened
    count towards the limits, so a damaged checkpoint never displaces an intact one. A checkpoint that is currently
    being read is not changed.
    damaged: if given, all checkpoints to be kept are verified before any checkpoint is removed. For each damaged step,
    `damaged` is called with the step and the reason. A damaged step does not count towards the limits.
    """
    if keep_last is keep_every is keep_optimizer_last is None:
        return Retained([], [])
    whole = [step for step in store.steps() if _opens(store, step)]

    def chosen() -> tuple[list[int], frozenset[int]]:
        """Return (steps to remove, steps that are kept regardless of the limits)."""
        exempt = spared | good(store, whole) | best(store, whole)
        return [step for step in surplus(whole, keep_last, keep_every) if step not in exempt], exempt

    doomed, exempt = chosen()
    sound: set[int] = set()
    while damaged is not None and (unread := [step for step in whole if step not in doomed and step not in sound]):
        try:
            store.open(unread[-1]).verify()
            sound.add(unread[-1])
        except CheckpointError as error:
            damaged(unread[-1], str(error))
            whole.remove(unread[-1])  # choose again without the damaged step
            doomed, exempt = chosen()
    heavy = [step for step in to_lighten(whole, keep_optimizer_last) if step not in exempt and step not in doomed]
    heavy = [step for step in heavy if _states(store.path(step))]
    if not dry_run:
        doomed = [step for step in doomed if _unless_read(store.path(step), _remove)]
        heavy = [step for step in heavy if _unless_read(store.path(step), _lighten)]
    return Retained(doomed, heavy)


def good(store: CheckpointStore, steps: list[int]) -> frozenset[int]:
    """Return a set with the newest step of `steps` whose verdict is good. The set is empty if no step has a good
    verdict."""
    verdicts = attempt(store.verdicts)[0] or {}
    good_verdicts = {step: verdict for step, verdict in verdicts.items() if verdict.status == "good"}
    good_steps = (
        step for step in reversed(steps) if step in good_verdicts and store.digest(step) == good_verdicts[step].manifest
    )
    return frozenset(itertools.islice(good_steps, 1))


def best(store: CheckpointStore, steps: list[int]) -> frozenset[int]:
    """The step with the lowest validation loss. Only steps of `steps` that were validated and are not suspect are
    considered."""
    verdicts = attempt(store.verdicts)[0] or {}
    losses = {
        step: verdict.valid_loss
        for step, verdict in verdicts.items()
        if verdict.valid_loss is not None and verdict.status != "suspect" and step in steps
    }
    best_steps = (
        step for step in sorted(losses, key=losses.__getitem__) if store.digest(step) == verdicts[step].manifest
    )
    return frozenset(itertools.islice(best_steps, 1))


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
    """Call `act` for a checkpoint unless it is write-protected or locked by a reader. Return whether `act` was called.

    If the file system does not support locks, `act` is called.
    """
    try:  # opened for writing, because exclusive locks on NFS require a writable descriptor
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
    """Unpublish a checkpoint, then delete its files."""
    unpublished = path.with_suffix(".tmp")
    shutil.rmtree(unpublished, ignore_errors=True)
    os.rename(path, unpublished)
    sync_directory(path.parent)
    shutil.rmtree(unpublished, ignore_errors=True)


def _lighten(path: Path) -> None:
    """Mark a checkpoint as one without optimizer state, then delete its optimizer state files."""
    mark_weights_only(path)
    for file in _states(path):
        file.unlink(missing_ok=True)


def _states(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if STATE_FILE.fullmatch(file.name)]
