"""Keep copies of each rank's state in the memory of its host and of the next host. Restarted ranks resume from these
copies.

    1 every --peer-copy-interval steps   each rank copies weights, moments and progress into memory that outlives the
                                         rank
    2 a thread                           sends the copy to the corresponding rank of the next host, and receives that of
                                         the previous host, so the state of a lost host survives on another host
    3 a copy is valid                    once its header has been written, after the state; two files per rank
                                         alternate
    4 before a copy is overwritten       all ranks have completed the newer copy
    5 restarted ranks                    exchange the steps of their hosts' copies, and choose the newest step for
                                         which every rank's state exists, if it is newer than the newest save; ranks
                                         whose host lacks their copy receive it. A copy with damaged bytes is ignored

The memory is a folder of files in /dev/shm, which the launcher creates (processes/restarts.py) and removes. Copies are
valid for one layout and one launch; a different layout or a later launch resumes from a save (saver.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.together import together
from mega.core.device import HostCopy
from mega.core.parallel.collectives import all_reduce
from mega.core.processes.restarts import note_step
from mega.core.processes.world import MEMORY_FOLDER, world_from_env
from mega.core.training.guards.finite import check_finite
from mega.core.training.state import Progress, TrainState

HEADER = 16 * mmap.PAGESIZE
"""Size of the header before the state, in bytes. It contains JSON, padded with spaces, or zeros while the state is
being written."""

COPIES = 2
"""Number of copies of one rank's state on one host."""


class StateFile:
    """A memory-mapped file with the state of one rank at one step. size: number of bytes of the state."""

    def __init__(self, path: Path, size: int):
        self.path = path
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size != HEADER + size:
                os.ftruncate(file.fileno(), 0)
                os.posix_fallocate(file.fileno(), 0, HEADER + size)  # otherwise writes raise SIGBUS if memory is full
        self._memory = torch.from_file(str(path), shared=True, size=HEADER + size, dtype=torch.uint8)
        self.header, self.state = self._memory[:HEADER], self._memory[HEADER:]

    def read(self) -> dict[str, Any] | None:
        """Return the header; None if the header is missing, for example after a kill during the copy."""
        with contextlib.suppress(ValueError):
            header = json.loads(self.header.numpy().tobytes())
            return header if isinstance(header, dict) else None
        return None

    def clear(self) -> None:
        self.header.fill_(0)

    def sound(self) -> bool:
        """Whether the checksum of the state is correct."""
        header = self.read()
        return header is not None and zlib.crc32(self.state.numpy()) == header["crc"]  # type: ignore[arg-type]


class HostFiles:
    """The copies in this host's memory. sizes, layouts: size and layout of every rank's state."""

    def __init__(self, folder: Path, sizes: Sequence[int], layouts: Sequence[str]):
        self.folder, self.sizes, self._layouts = folder, sizes, layouts

    def check_space(self, owners: Collection[int], interval: int) -> None:
        """Check that this host's memory can hold the copies of these ranks. Errors: ValueError if the memory is too
        small."""
        needed = sum(COPIES * (HEADER + self.sizes[owner]) for owner in owners)
        existing = sum(path.stat().st_size for path in self.folder.glob("rank-*"))
        free = shutil.disk_usage(self.folder).free
        if needed > existing + free:
            raise ValueError(
                f"--peer-copy-interval {interval}: the copies take {needed / 2**30:.1f} GiB of {self.folder.parent}, "
                f"where {free / 2**30:.1f} GiB are free"
            )

    def steps(self) -> dict[int, list[int]]:
        """Return a map from each rank to the steps of its copies on this host. Copies with another layout are
        ignored."""
        steps_of_owner: dict[int, list[int]] = {}
        for _, header in self.headers():
            steps_of_owner.setdefault(int(header["owner"]), []).append(int(header["step"]))
        return steps_of_owner

    def headers(self) -> Iterator[tuple[StateFile, dict[str, Any]]]:
        for owner in range(len(self.sizes)):
            for number in range(COPIES):
                path = self._path(owner, number)
                if path.exists() and path.stat().st_size == HEADER + self.sizes[owner]:
                    file = StateFile(path, self.sizes[owner])
                    header = file.read()
                    if header is not None and header["layout"] == self._layouts[owner]:
                        yield file, header

    def at(self, owner: int, step: int) -> StateFile:
        return next(file for file, header in self.headers() if (header["owner"], header["step"]) == (owner, step))

    def older(self, owner: int) -> StateFile:
        """Of a rank's two files, return the one with the older step."""

        def step(file: StateFile) -> int:
            header = file.read()
            return -1 if header is None else int(header["step"])

        return min((StateFile(self._path(owner, each), self.sizes[owner]) for each in range(COPIES)), key=step)

    def _path(self, owner: int, number: int) -> Path:
        return self.folder / f"rank-{owner}.{number}"


class PeerCopies:
    """The copies of one rank. All methods are collectives that all ranks must call."""

    def __init__(self, state: TrainState, folder: Path):
        self._state, self._world = state, world_from_env()
        self._pieces = list(_pieces(state))
        self._layout = _layout(self._pieces)
        tensors = [piece.tensor for piece in self._pieces]
        rank, local, size = state.mesh.rank, self._world.local_size, state.mesh.world
        self._files = HostFiles(folder, state.exchange(HostCopy.room(tensors)), state.exchange(self._layout))
        self._to: int | None = (rank + local) % size if size > local else None
        self._from: int | None = (rank - local) % size if size > local else None
        owners = {
            other
            for each in range(rank - self._world.local_rank, rank - self._world.local_rank + local)
            for other in (each, (each - local) % size)
        }
        interval = state.run.supervision.peer_copy_interval
        together(lambda: self._files.check_space(owners, interval), state.exchange)
        self._axis = state.mesh.own_group("peer-copies")
        self._copies: dict[Path, HostCopy] = {}
        self._running: threading.Thread | None = None
        self._error: Exception | None = None

    def restore(self, newest: int) -> bool:
        """Perform phase 5: restore the state from a copy that is newer than step `newest`, and return whether a copy
        was found."""
        while True:
            local_steps = self._files.steps()
            host_steps = [
                {int(owner): steps for owner, steps in each.items()} for each in self._state.exchange(local_steps)
            ]
            steps = [
                {n for each in host_steps for n in each.get(owner, ()) if n > newest}
                for owner in range(len(host_steps))
            ]
            step = max(set.intersection(*steps), default=None)
            if step is None or self._fetch(step, host_steps):
                break  # otherwise try again: a copy of that step was damaged, and is now cleared
        for file, header in self._files.headers():
            if header["step"] > (step or newest):
                file.clear()  # not all ranks have reached this step
        return step is not None

    def take(self) -> None:
        """Perform phases 1 to 4: copy the state. Errors: FloatingPointError if the state is not finite; errors of the
        previous exchange."""
        state = self._state
        check_finite(state)
        self.wait()
        state.grads.wait_param_gather()
        # 4 all ranks have the newer copy
        ready = torch.ones((), device=state.device.torch)
        all_reduce(ready, state.mesh.everyone, "min")
        file = self._files.older(state.mesh.rank)
        file.clear()
        copy = self._copy(file)
        copy.take([piece.tensor for piece in self._pieces])
        copy.wait()
        header = {"owner": state.mesh.rank, "layout": self._layout, "step": state.progress.step, **_moment(state)}
        self._running = threading.Thread(target=self._spread, args=(file, header), name="peer-copy", daemon=True)
        self._running.start()

    def wait(self) -> None:
        """Wait for the exchange of the previous copies. Errors: those of the exchange."""
        if self._running is not None:
            self._running.join()
            self._running = None
        if self._error is not None:
            raise self._error

    # -- parts

    def _spread(self, file: StateFile, header: Mapping[str, Any]) -> None:
        """Perform phases 2 and 3: exchange the copies, then write the headers."""
        try:
            text = json.dumps({**header, "crc": zlib.crc32(file.state.numpy())}).encode().ljust(HEADER)  # type: ignore[arg-type]
            new_header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if self._to is not None and self._from is not None:
                other, other_header = self._files.older(self._from), torch.empty(HEADER, dtype=torch.uint8)
                other.clear()
                self._swap(
                    [(file.state, self._to), (new_header, self._to)],
                    [(other.state, self._from), (other_header, self._from)],
                )
                other.header.copy_(other_header)
            file.header.copy_(new_header)
            if self._world.local_rank == 0:
                note_step(self._files.folder, int(header["step"]))
        except Exception as error:
            self._error = error

    def _swap(self, out: Sequence[tuple[torch.Tensor, int]], into: Sequence[tuple[torch.Tensor, int]]) -> None:
        group = self._axis.group
        works = [dist.irecv(buffer, rank, group) for buffer, rank in into]
        works += [dist.isend(buffer, rank, group) for buffer, rank in out]
        for work in works:
            assert work is not None
            work.wait()

    def _fetch(self, step: int, host_steps: Sequence[Mapping[int, Sequence[int]]]) -> bool:
        """Restore a step. Each rank reads its copy from its own host's memory or, if it is missing there, from the
        first rank whose host has it.

        Returns False if a copy was damaged; such copies are cleared.
        """
        rank, local = self._state.mesh.rank, self._world.local_size
        missing_owners = [owner for owner, each in enumerate(host_steps) if step not in each.get(owner, ())]
        sources = {
            owner: next(r for r, each in enumerate(host_steps) if step in each.get(owner, ()))
            for owner in missing_owners
        }
        assert all(source // local != owner // local for owner, source in sources.items())
        sent = {owner: self._files.at(owner, step) for owner, source in sources.items() if source == rank}
        own_file = self._files.older(rank) if rank in missing_owners else self._files.at(rank, step)
        damaged = [
            file for file in (*sent.values(), *(() if rank in missing_owners else (own_file,))) if not file.sound()
        ]
        for file in damaged:
            file.clear()
        # All ranks must agree before anything is sent, because a rank that waits for a damaged copy would wait forever.
        if any(self._state.exchange(bool(damaged))):
            return False
        head = torch.empty(HEADER, dtype=torch.uint8)
        out = [(part, owner) for owner, file in sent.items() for part in (file.state, file.header.clone())]
        if rank in missing_owners:
            own_file.clear()
        self._swap(out, [(own_file.state, sources[rank]), (head, sources[rank])] if rank in missing_owners else [])
        if rank in missing_owners:
            own_file.header.copy_(head)
        if sources:
            together(lambda: self._check(own_file), self._state.exchange)
        self._fill(own_file)
        return True

    @staticmethod
    def _check(file: StateFile) -> None:
        if not file.sound():
            file.clear()
            raise OSError(f"{file.path}: has come damaged from another host; a restart sends it again")

    def _fill(self, file: StateFile) -> None:
        """Restore the state from a file."""
        header, views = file.read(), self._copy(file).views([piece.tensor for piece in self._pieces])
        assert header is not None
        state, loaded = self._state, list(zip(self._pieces, views, strict=True))
        for piece, view in loaded:
            if piece.key.startswith("weights/"):
                piece.tensor.copy_(view)
        state.optimizer.masters_from_weights()  # masters with the weights' dtype are not in the copy
        for piece, view in loaded:
            if not piece.key.startswith("weights/"):
                piece.tensor.copy_(view)
        self._refill(header)

    def _refill(self, header: Mapping[str, Any]) -> None:
        state = self._state
        state.progress = Progress.from_meta(header["progress"])
        state.guard.restore(header["guard"])
        state.optimizer.updates = int(header["updates"])
        state.dropout_rule = int(header["dropout_rule"])
        if state.scaler is not None and header["scaler"]:
            state.scaler.restore(header["scaler"])

    def _copy(self, file: StateFile) -> HostCopy:
        if file.path not in self._copies:
            self._copies[file.path] = HostCopy(self._state.device, len(file.state), file.state)
        return self._copies[file.path]


def peer_copies(state: TrainState) -> PeerCopies | None:
    """Return the copies of a run with --peer-copy-interval if the launcher provides the memory; otherwise None."""
    folder = os.environ.get(MEMORY_FOLDER)
    if folder is None or not state.run.supervision.peer_copy_interval:
        return None
    return PeerCopies(state, Path(folder))


def _pieces(state: TrainState) -> Iterator[Piece]:
    """Yield all tensors of this rank that training changes."""
    yield from state.weight_pieces(mine=False)
    yield from state.optimizer_pieces(mine=False)


def _moment(state: TrainState) -> dict[str, object]:
    """Return the values of the state that are not in tensors."""
    return {
        "progress": dataclasses.asdict(state.progress),
        "guard": state.guard.as_json(),
        "updates": state.optimizer.updates,
        "dropout_rule": state.dropout_rule,
        "scaler": None if state.scaler is None else state.scaler.state(),
    }


def _layout(pieces: Sequence[Piece]) -> str:
    description = [[piece.key, piece.whole, piece.start, piece.size, str(piece.tensor.dtype)] for piece in pieces]
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
