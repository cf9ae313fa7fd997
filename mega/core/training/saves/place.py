"""The directory that a run saves in: held by one run at a time, and without a checkpoint of another history."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path

import torch

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import CheckpointStore, store_at
from mega.core.checkpoint.own.together import JsonExchange, alone, gathered
from mega.core.config.run import RunConfig
from mega.core.files import url_of
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Mesh
from mega.core.words import name_ranks


def check_no_newer(run: RunConfig, start: int, exchange: JsonExchange = alone) -> None:
    """Check that --save holds no checkpoint later than step `start`, where this run starts; none that any rank sees.

    Else a later --resume auto would take that one, of another history. That option itself starts from the newest that
    can be trusted, and later ones will be replaced. Errors: ValueError on all ranks.
    """
    place = run.checkpoint.save
    if place is None or run.checkpoint.resume == "auto":
        return
    newest = max(gathered(lambda: store_at(place).newest(verify=False) or 0, exchange))
    if newest > start:
        raise ValueError(
            f"--save {place}: holds step {newest}, and this run starts at step {start}; to resume from there give "
            "--resume auto, else another directory, or move the later checkpoints away"
        )


LOCK_WAIT = 10.0
"""Seconds for which a run waits for another that still holds its directory: one that was stopped may be on its way
out."""

LEASE_WAIT = 150.0
"""The same for ranks that were started again: rank 0 may have been on a host that is lost, whose lock a server of files
keeps until its lease ends; NFS has 90 seconds."""


def lock(until: contextlib.ExitStack, place: str | None, mesh: Mesh, device: torch.device) -> None:
    """Hold --save for this run alone, so that no other one replaces its checkpoints, nor `checkpoint clean` what it is
    writing. All ranks call this together. Errors: ValueError on all where another process has it; OSError where the one
    of an attempt before may have it."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    free = torch.ones((), device=device)
    if place is not None and url_of(place) is None and mesh.rank == 0:
        store, deadline = store_at(place), time.monotonic() + (LEASE_WAIT if restarted else LOCK_WAIT)
        with contextlib.suppress(OSError):  # a place that cannot be written to is the saver's to report
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
"""Seconds in which every rank sees what rank 0 has written in --save: a network file system remembers for a while that
there was no such file."""


def check_shared(place: str | None, exchange: JsonExchange, rank: int) -> None:
    """See that --save is one folder for all ranks, and not each host's own: a checkpoint is made of every rank's file.

    Errors: ValueError on all ranks, naming those that do not see what rank 0 writes there.
    """
    if place is None or url_of(place) is not None or exchange is alone:
        return
    mark = Path(place) / f".seen-{uuid.uuid4().hex}"
    if rank == 0:
        with contextlib.suppress(OSError):  # a place that cannot be written to is the saver's to report
            mark.touch()
    name = str(exchange(mark.name if mark.exists() else "")[0])
    if not name:
        return
    host, deadline = socket.gethostname(), time.monotonic() + SEEN_WITHIN
    while not (found := (Path(place) / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    met = exchange((found, host))
    if rank == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    blind = [rank for rank, (sees, _) in enumerate(met) if not sees]
    if blind:
        there = ", ".join(dict.fromkeys(met[rank][1] for rank in blind))
        raise ValueError(
            f"--save {place}: what rank 0 writes there on {met[0][1]} is not seen by {name_ranks(blind)} on {there}; "
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
        directory.rmdir()  # only if nothing is in it
