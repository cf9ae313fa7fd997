"""A directory of checkpoints. Many ranks save a checkpoint together. Each checkpoint is published completely or not at
all, and can be read in any layout.

    runs/a/latest                       the newest step's directory name
    runs/a/verdicts.json                verdicts on the steps, from later training (verdicts.py)
    runs/a/step-0000010/                published by one rename of step-0000010.tmp
        rank-00000.safetensors          every rank's weights
        rank-00000.state.safetensors    every rank's optimizer state, in a separate file, so that it can be removed
        tokenizer.json  run.toml        attachments
        manifest.json                   hashes of all files, rectangles of all tensors, plain state
        manifest.json.sha256

A save has three phases: (1) rank 0 creates `step-N.tmp/`; (2) each rank writes and syncs its files and a sidecar, which
describes these files; (3) rank 0 merges the sidecars into the manifest, renames the directory and updates `latest`.
After each phase, the ranks exchange the outcome, and all ranks stop if the phase failed on any rank. The exchange is a
callable, because this package does not depend on how ranks communicate.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mega.core.checkpoint.own.container import Container, Fetch, file_digest, has_memory, write_container
from mega.core.checkpoint.own.disk import new_file, write_all
from mega.core.checkpoint.own.manifest import (
    Attached,
    Manifest,
    check_attachment_name,
    check_tiling,
    is_state,
    rank_file,
    read_sidecar,
    state_file,
    write_manifest,
    write_sidecar,
)
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.steps import remove_leftover
from mega.core.checkpoint.own.trusted import TrustedSteps
from mega.core.files import POINTER, sync_directory
from mega.core.untrusted import Json, below

Attachments = Mapping[str, Path | bytes]
"""Small files to store with the tensors: file name -> current path, or content."""


class SaveError(OSError):
    """Raised if a save failed, with the reason in the message. Nothing was published, and every earlier checkpoint is
    intact.

    elsewhere: whether the failure was on another rank, whose error contains the details.
    """

    elsewhere = False


@dataclass(frozen=True)
class SaveReport:
    """The size and duration of one rank's save."""

    bytes: int  # total size of this rank's containers
    seconds: float  # duration until all ranks had finished


class CheckpointStore(TrustedSteps):
    """The checkpoints of one run, under one directory.

    store = CheckpointStore(Path("runs/a"))
    store.save(10, [Piece("weights/w", (2,), (0,), torch.ones(2))], {"samples": 40})
    store.open(store.newest()).read([Piece("weights/w", (2,), (0,), w)])
    """

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        meta: Mapping[str, Json],
        *,
        rank: int = 0,
        world: int = 1,
        agree: Callable[[bool], bool] = bool,
        attachments: Attachments = MappingProxyType({}),
    ) -> SaveReport:
        """Publish one checkpoint. All ranks must call this method together, and their pieces together must tile the
        tensors.

        meta, attachments: plain JSON and small files by name; only rank 0's values are used. agree: collective function
        that receives whether this rank succeeded, and returns whether all ranks succeeded. An older checkpoint of the
        same step is replaced when the new checkpoint is complete.
        Errors: SaveError naming the file, on every rank, if any rank failed (disk full, no permission, pieces that do
        not tile their tensors). Earlier checkpoints are not changed.
        """
        began = time.monotonic()
        working = self.path(step).with_suffix(".tmp")
        bytes_written = 0

        def prepare() -> None:
            if rank == 0:
                self._prepare(working)

        def write() -> None:
            nonlocal bytes_written
            bytes_written = self._write(working, step, rank, world, pieces, has_memory)

        def publish() -> None:
            if rank == 0:
                self._publish(step, world, working, dict(meta), attachments)

        # Errors are raised only after `agree`; a rank that raised immediately would leave the other ranks waiting.
        for phase in (prepare, write, publish):
            fault, free = None, None
            try:
                phase()
            except Exception as error:
                fault, free = error, self._where(step)[1]  # before the unfinished files are removed
            if not agree(fault is None):
                if rank == 0:
                    self._clear()
                failure = SaveError(self._failure(step, fault, free))
                failure.elsewhere = fault is None
                raise failure from fault
        return SaveReport(bytes_written, time.monotonic() - began)

    def save_all(
        self,
        step: int,
        ranks: Sequence[Iterable[Piece]],
        meta: Mapping[str, Json],
        *,
        fetch: Fetch = has_memory,
        check: Callable[[], None] = lambda: None,
        attachments: Attachments = MappingProxyType({}),
    ) -> SaveReport:
        """Save like `save`, but write the files of all ranks from one process, one rank after another.

        fetch: function that returns the elements of one block of a piece. The elements are released after the block is
        written. Blocks of different pieces are requested concurrently. With `fetch`, the pieces' tensors may be meta
        tensors; then only a few blocks are in memory at a time.
        check: function that is called after the last write. If `check` raises an error, nothing is published.
        The method refuses to replace a step, and to write into the directory of a different model. It also refuses to
        write a step older than the newest step, because no run would find that step. Errors: CheckpointError for wrong
        input, SaveError for a failure of the disk.
        """
        began, free = time.monotonic(), None
        working = self.path(step).with_suffix(".tmp")
        try:
            with self._claimed(step):
                self._same_model(meta)
                try:
                    self._prepare(working)
                    bytes_written = sum(
                        self._write(working, step, rank, len(ranks), pieces, fetch) for rank, pieces in enumerate(ranks)
                    )
                    check()
                    self._publish(step, len(ranks), working, dict(meta), attachments)
                except BaseException:
                    free = self._where(step)[1]
                    self._clear()
                    raise
        except Exception as error:
            with contextlib.suppress(OSError):
                self.directory.rmdir()  # fails if the directory is not empty
            kind = CheckpointError if isinstance(error, ValueError) else SaveError
            raise kind(self._failure(step, error, free)) from error
        return SaveReport(bytes_written, time.monotonic() - began)

    @contextlib.contextmanager
    def _claimed(self, step: int) -> Iterator[None]:
        """Lock the directory and check that `step` may be published there.

        Errors: CheckpointError if another process holds the lock, or if `step` or a newer step exists.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.locked():
            if conflicts := [each for each in self.steps() if each >= step]:
                raise CheckpointError(f"step {conflicts[-1]} is there already; give a new directory")
            yield

    def _same_model(self, meta: Mapping[str, Json]) -> None:
        """Check that the checkpoints in this directory have the same model section as `meta`. Errors:
        CheckpointError."""
        newest = self.newest(verify=False)
        if newest is None:
            return
        new_model, stored_model = (below(each, "config", "model") for each in (meta, self.open(newest).meta))
        if new_model and stored_model and json.loads(json.dumps(new_model)) != stored_model:
            raise CheckpointError(f"step {newest} of another model is there, and would be hidden; give a new directory")

    def _prepare(self, working: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear()
        working.mkdir()

    def _write(self, working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
        return write_rank(working, step, rank, world, pieces, fetch)

    def _clear(self) -> None:
        """Remove everything except checkpoints from the directory. The caller must be the only process that saves
        in this directory."""
        self._recover()
        for path in self.leftovers():
            remove_leftover(path)

    def _publish(self, step: int, world: int, working: Path, meta: dict[str, Json], attachments: Attachments) -> None:
        self._seal(step, world, working, meta, attachments)
        sync_directory(working)
        final = self.path(step)
        previous = final.with_suffix(".old")
        pointer = self.directory / f"{POINTER}.tmp"
        with new_file(pointer) as descriptor:
            write_all(descriptor, f"{final.name}\n".encode())
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(final, previous)
        os.rename(working, final)  # publishes the step; all data was written to disk earlier
        os.rename(pointer, self.directory / POINTER)
        sync_directory(self.directory)
        shutil.rmtree(previous, ignore_errors=True)

    def _seal(self, step: int, world: int, working: Path, meta: dict[str, Json], attachments: Attachments) -> None:
        """Merge the sidecars into the manifest, and delete the sidecars."""
        records = {name: _attach(working, name, source) for name, source in attachments.items()}
        containers: dict[str, Container] = {}
        for rank in range(world):
            path = sidecar(working, rank)
            containers |= read_sidecar(path, rank)
            path.unlink()
        manifest = Manifest(step, world, containers, records, meta)
        check_tiling(manifest, working)
        write_manifest(working, manifest)

    def _failure(self, step: int, fault: BaseException | None, free: int | None) -> str:
        """Return the message about a failed save. free: number of free bytes when it failed, or None if unknown."""
        intact = ", ".join(map(str, self.steps())) or "none"
        message = f"{self._where(step)[0]}: step {step} was not saved"
        if fault is None:
            return f"{message}: another rank failed (whole: steps {intact})"
        if isinstance(fault, OSError):
            name = fault.filename or self.path(step)
            reason = f"{name}: {fault.strerror or fault}" + ("" if free is None else f"; {free} bytes are free")
        else:
            reason = str(fault) or repr(fault)
        return f"{message}: {reason} (whole: steps {intact})"

    def _where(self, step: int) -> tuple[str, int | None]:
        """Return (the save's directory for messages, the number of free bytes on the directory's disk or None if
        unknown)."""
        try:
            return str(self.directory), shutil.disk_usage(self.directory).free
        except OSError:  # the directory does not exist, or its disk has failed
            return str(self.directory), None


def write_rank(working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
    """Write one rank's containers and its sidecar; return the number of bytes of the containers."""
    files: dict[str, list[Piece]] = {rank_file(rank): []}
    for piece in pieces:
        piece.check()
        if piece.box.elements:
            files.setdefault(state_file(rank) if is_state(piece.key) else rank_file(rank), []).append(piece)
    containers = {}
    for name, file_pieces in files.items():
        try:
            description: dict[str, object] = {"step": step, "rank": rank, "world": world}
            containers[name] = write_container(working / name, file_pieces, description, fetch)
        except OSError as error:
            total = sum(piece.bytes for piece in file_pieces)
            path = str(working / name)
            raise OSError(error.errno, f"{error.strerror} ({total} bytes to write)", path) from error
    write_sidecar(sidecar(working, rank), containers)
    return sum(container.size for container in containers.values())


def _attach(working: Path, name: str, source: Path | bytes) -> Attached:
    check_attachment_name(name)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    with new_file(working / name) as descriptor:
        write_all(descriptor, data)
    return Attached(*file_digest(working / name))


def sidecar(working: Path, rank: int) -> Path:
    return working / f"rank-{rank:05d}.json"
