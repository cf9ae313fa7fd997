"""Check the directory of --save: only one run may use the directory at a time, and it must not contain checkpoints of a
different training history."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from functools import partial
from pathlib import Path

import torch

from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.store import CheckpointStore, store_at
from mega.core.checkpoint.own.together import JsonExchange, alone, gathered
from mega.core.config.run import RunConfig
from mega.core.files import url_of
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Mesh
from mega.core.processes.world import restart_count
from mega.core.words import name_ranks


def check_no_newer(run: RunConfig, start: int, exchange: JsonExchange = alone) -> None:
    """Check on all ranks that --save contains no checkpoint of a step after `start`, the step at which this run starts.

    A later --resume auto would resume from such a checkpoint, which has a different history. A run with --resume auto
    is not checked: it starts from the newest trusted checkpoint, and replaces later ones. A run that continues from a
    step named by the user may start without any trusted checkpoint, for example after an early divergence. Errors:
    ValueError on all ranks.
    """
    place = run.checkpoint.save
    if place is None or run.checkpoint.resume == "auto":
        return
    newest = max(gathered(partial(_newest, place, start), exchange))
    if newest > start:
        raise ValueError(
            f"--save {place}: holds step {newest}, and this run starts at step {start}; to resume from step "
            f"{newest} give --resume auto, else another directory, or move the later checkpoints away"
        )


def _newest(place: str, start: int) -> int:
    """Return the step that --resume auto would choose; 0 if no checkpoint exists. Errors: CheckpointError if no
    checkpoint can be trusted, unless the run continues after step `start`; OSError."""
    store = store_at(place)
    try:
        return store.newest(verify=False) or 0
    except UnreadableError:
        raise
    except CheckpointError:
        if start == 0 or not store.steps():
            raise
        return 0


LOCK_WAIT = 10.0
"""Seconds for which a run waits for the lock of its directory, because a previous run may still be shutting down."""

LEASE_WAIT = 150.0
"""Seconds for which a run waits for the lock after a restart. If rank 0 was on a lost host, a file server keeps the
host's lock until the lease expires, which takes 90 seconds with NFS."""


def lock(until: contextlib.ExitStack, place: str | None, mesh: Mesh, device: torch.device) -> None:
    """Lock the directory of --save until `until` is closed, so that no other run, and no `checkpoint clean`, changes
    the directory.

    This is a collective that all ranks must call. Errors, on all ranks: ValueError if another process has the lock;
    OSError if that process may belong to a previous attempt.
    """
    restarted = restart_count() > 0
    free = torch.ones((), device=device)
    if place is not None and url_of(place) is None and mesh.rank == 0:
        store, deadline = store_at(place), time.monotonic() + (LEASE_WAIT if restarted else LOCK_WAIT)
        with contextlib.suppress(OSError):  # the saver reports a directory that it cannot write to
            if not store.directory.exists():
                store.directory.mkdir(parents=True)
                until.callback(_remove_empty, store.directory)
            while not _hold(until, store):
                if time.monotonic() > deadline:
                    free.zero_()
                    break
                time.sleep(0.2)
    all_reduce(free, mesh.everyone, "min")
    if not free and restarted:
        raise OSError(f"--save {place}: another process still writes there, after {LEASE_WAIT:.0f} s")
    if not free:
        raise ValueError(
            f"--save {place}: another process is writing there; wait for its end, or give another directory"
        )


SEEN_WITHIN = 10.0
"""Seconds within which every rank must find a file that rank 0 has written. Network file systems may cache the absence
of a file for some time."""


def check_shared(place: str | None, exchange: JsonExchange, rank: int) -> None:
    """Check that --save is one folder that all hosts share, because a checkpoint consists of the files of all ranks.
    Errors: ValueError on all ranks, naming the ranks that do not find a file of rank 0.
    """
    if place is None or url_of(place) is not None or exchange is alone:
        return
    mark = Path(place) / f".seen-{uuid.uuid4().hex}"
    if rank == 0:
        with contextlib.suppress(OSError):  # the saver reports a directory that it cannot write to
            mark.touch()
    name = str(exchange(mark.name if mark.exists() else "")[0])
    if not name:
        return
    host, deadline = socket.gethostname(), time.monotonic() + SEEN_WITHIN
    while not (sees_mark := (Path(place) / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    views = exchange((sees_mark, host))
    if rank == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    blind = [rank for rank, (sees, _) in enumerate(views) if not sees]
    if blind:
        hosts = ", ".join(dict.fromkeys(views[rank][1] for rank in blind))
        raise ValueError(
            f"--save {place}: what rank 0 writes there on {views[0][1]} is not seen by {name_ranks(blind)} on {hosts}; "
            "must be one folder that all ranks share"
        )


def _hold(until: contextlib.ExitStack, store: CheckpointStore) -> bool:
    try:
        until.enter_context(store.locked())
    except CheckpointError:
        return False
    return True


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()  # fails if the directory is not empty
