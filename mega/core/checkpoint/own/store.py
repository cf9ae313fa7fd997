"""Open the checkpoint at a path or URL given by the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from mega.core.checkpoint.own.directory import Attachments, CheckpointStore, SaveError, SaveReport
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.checkpoint.own.remote import RemoteStore
from mega.core.checkpoint.own.steps import NOTHING, STEP
from mega.core.checkpoint.own.together import JsonExchange, alone, together
from mega.core.files import url_of

__all__ = [
    "Attachments",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Piece",
    "SaveError",
    "SaveReport",
    "locate",
    "store_at",
]


def store_at(place: Path | str) -> CheckpointStore:
    """Return the store of checkpoints under a directory or URL. Errors: ValueError for a URL that cannot be reached."""
    url = url_of(place)
    if url is None:
        return CheckpointStore(Path(os.path.abspath(place)))
    return RemoteStore(url)


def _warn(line: str) -> None:
    print(f"mega: {line}", file=sys.stderr)


def locate(place: Path | str, report: Callable[[str], None] = _warn, exchange: JsonExchange = alone) -> Checkpoint:
    """Open a checkpoint given by a step's directory, by a run's directory (for the run's newest step), or by the URL of
    either.

    report: called with a message for every newer checkpoint that is skipped because it is damaged or suspect.
    exchange: the collective function of the ranks that call this function together. All ranks open the same checkpoint.
    Errors: CheckpointError, on all ranks, if no checkpoint is found.
    """
    path = Path(place if url_of(place) else os.path.abspath(place))
    if match := STEP.fullmatch(path.name):
        store = together(lambda: store_at(path.parent), exchange)
        return store.open_named(int(match[1]), report, exchange)
    checkpoint = together(lambda: store_at(path), exchange).find(verify=False, report=report, exchange=exchange)
    if checkpoint is None:
        raise CheckpointError(f"{path}: {NOTHING}")
    return checkpoint
