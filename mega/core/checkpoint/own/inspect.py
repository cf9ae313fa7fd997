"""Inspect checkpoints: verify that a checkpoint is complete, list its contents, compare two checkpoints, and remove old
checkpoints.

Results are plain values and messages, which the commands print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.directory import CheckpointStore
from mega.core.checkpoint.own.folders import sweep
from mega.core.checkpoint.own.pieces import CheckpointError, whole_box
from mega.core.checkpoint.own.remote import RemoteCheckpoint
from mega.core.checkpoint.own.retention import retain
from mega.core.checkpoint.own.source import read_part
from mega.core.checkpoint.own.steps import NOTHING, STEP, remove_leftover
from mega.core.checkpoint.own.store import Checkpoint, locate, store_at
from mega.core.checkpoint.own.together import attempt, reason_of
from mega.core.files import url_of

Report = Callable[[str], None]


def verify(path: Path, report: Report) -> None:
    """Verify every byte of one step, or of all steps of a run.

    Errors: CheckpointError, raised after the last step, if any step is damaged.
    """
    if _is_step(path):
        checkpoints = [path]
    else:
        store = store_at(path)
        steps = sorted({*store.steps(), *store.linked()})
        checkpoints = [path / f"step-{step:07d}" for step in steps] or [locate(path).path]
        if (fault := attempt(store.verdicts)[1]) is not None:
            report(f"a step may be suspect although it is reported as unproven: {reason_of(fault)}")
    damaged = []
    for each in checkpoints:
        try:
            checkpoint = locate(each)
            checkpoint.verify()
            contents = f"{len(checkpoint.tensors)} tensors, {checkpoint.bytes} bytes"
            report(f"step {checkpoint.step}: whole, {contents}, {verdict_of(checkpoint)}")
        except CheckpointError as error:
            report(f"{each.name}: damaged: {error}")
            damaged.append(each.name)
    if damaged:
        raise CheckpointError(f"{path}: damaged: {', '.join(damaged)}")


def verdict_of(checkpoint: Checkpoint) -> str:
    """Return the verdict on a step (verdicts.py): unproven, good, or suspect with the reason."""
    store = checkpoint.store if isinstance(checkpoint, RemoteCheckpoint) else store_at(checkpoint.path.parent)
    verdicts, _ = attempt(store.verdicts)
    verdict = (verdicts or {}).get(checkpoint.step)
    if verdict is None or verdict.manifest != checkpoint.digest:
        return "unproven"
    return f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status


@dataclass(frozen=True)
class Kind:
    """Totals over a checkpoint's tensors of one kind."""

    name: str
    """The kind of tensor: weights, master, moment1, ..."""
    tensors: int
    """The number of tensors of this kind."""
    elements: int
    """The total number of elements in the tensors of this kind."""
    dtypes: tuple[str, ...]
    """The dtypes of tensors of this kind, sorted."""


def kinds(checkpoint: Checkpoint) -> list[Kind]:
    """Return the totals for each kind of tensor in a checkpoint. The kind is the first component of a tensor's key."""
    grouped: dict[str, list[str]] = {}
    for key in checkpoint.tensors:
        grouped.setdefault(key.partition("/")[0], []).append(key)
    return [
        Kind(
            name,
            len(keys),
            sum(prod(checkpoint.tensors[key][0]) for key in keys),
            tuple(sorted({str(checkpoint.tensors[key][1]).removeprefix("torch.") for key in keys})),
        )
        for name, keys in grouped.items()
    ]


@dataclass(frozen=True)
class Difference:
    """The difference between two checkpoints in one tensor."""

    key: str  # the tensor's name
    text: str  # description of the difference
    largest: float | None = None  # the largest |a - b|, if the values can be compared


def diff(first: Checkpoint, second: Checkpoint, prefix: str = "") -> Iterator[Difference]:
    """Yield the differences between two checkpoints (missing tensor, shape, dtype or any bit), sorted by name. prefix:
    compare only tensors whose names have this prefix."""
    for key in sorted(key for key in {*first.tensors, *second.tensors} if key.startswith(prefix)):
        if key not in first.tensors or key not in second.tensors:
            yield Difference(key, f"only in the {'first' if key in first.tensors else 'second'}")
            continue
        (shape, dtype), (other_shape, other_dtype) = first.tensors[key], second.tensors[key]
        if (shape, dtype) != (other_shape, other_dtype):
            yield Difference(key, f"{dtype} {shape} against {other_dtype} {other_shape}")
            continue
        difference = _compare(first, second, key)
        if difference:
            yield difference


def _compare(first: Checkpoint, second: Checkpoint, key: str) -> Difference | None:
    shape, dtype = first.tensors[key]
    differing, largest = 0, 0.0
    for box in blocks(whole_box(shape), dtype.itemsize):
        pair = [read_part(checkpoint, key, box) for checkpoint in (first, second)]
        a, b = (tensor.reshape(-1).view(torch.uint8).reshape(-1, dtype.itemsize) for tensor in pair)
        unequal = (a != b).any(dim=1)
        if unequal.any():
            differing += int(unequal.sum())
            largest = max(largest, float((pair[0].double() - pair[1].double()).abs().nan_to_num(torch.inf).max()))
    return Difference(key, f"{differing} of {prod(shape)} elements", largest) if differing else None


def clean(
    path: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_optimizer_last: int | None,
    dry_run: bool,
    report: Report,
) -> None:
    """Remove the remains of killed saves and exports, then the checkpoints or optimizer states that exceed the limits.

    A killed export to `path` leaves a folder next to `path`; `path` need not exist.
    Errors: CheckpointError if there is nothing to clean, or if another process is writing to `path`.
    """
    if url_of(path) is not None:
        raise ValueError(f"{url_of(path)}: nothing is removed from object stores; use their own tools")
    store = CheckpointStore(path)
    verb = "would remove" if dry_run else "removed"
    exports = sweep(path, dry_run=dry_run)
    for leftover in exports:
        report(f"{verb} {leftover}")
    if not store.steps() and not store.leftovers():
        if exports:
            return
        raise CheckpointError(f"{path}: {NOTHING}")
    with store.locked():  # a save in progress holds the lock, and its files must not be removed
        for leftover in store.leftovers():
            if not dry_run:
                remove_leftover(leftover)
            report(f"{verb} {leftover}")

    def damaged(step: int, reason: str) -> None:
        report(f"step {step} is damaged, and counts for no limit: {reason}")

    retained = retain(store, keep_last, keep_every, keep_optimizer_last, dry_run=dry_run, damaged=damaged)
    for step in retained.removed:
        report(f"{verb} {store.path(step)}")
    for step in retained.lightened:
        report(f"{verb} the optimizer's state of {store.path(step)}")


def _is_step(path: Path) -> bool:
    return STEP.fullmatch(path.name) is not None
