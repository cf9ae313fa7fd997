"""A directory of checkpoints: saved by many ranks at once, published whole or not at all, read in any layout.

    runs/a/latest                       the newest step's directory name
    runs/a/verdicts.json                what became known of the steps since (verdicts.py)
    runs/a/step-0000010/                published by one rename of step-0000010.tmp
        rank-00000.safetensors          every rank's weights
        rank-00000.state.safetensors    every rank's optimizer state: a file of its own, so that it can go first
        tokenizer.json  run.toml        attachments
        manifest.json                   all files' hashes, all tensors' rectangles, plain state
        manifest.json.sha256

Saving, on every rank: (1) rank 0 makes `step-N.tmp/`; (2) each rank writes its files and a sidecar, synced;
(3) rank 0 folds the sidecars into the manifest, renames, moves the pointer. After each phase all ranks agree whether
it went well, and stop together where it did not. How they agree is a callable, since this room knows no ranks.
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
from mega.core.checkpoint.own.disk import creating, write_all
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
"""Small files to keep with the tensors: plain name -> where it is now, or its content."""


class SaveError(OSError):
    """A save that the machine did not carry out, and why. Nothing was published; every earlier checkpoint is whole.

    elsewhere: the fault is another rank's, whose error says more.
    """

    elsewhere = False


@dataclass(frozen=True)
class SaveReport:
    """What one rank wrote, and how long the save took it, waiting included."""

    bytes: int
    seconds: float


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
        """Publish one checkpoint; all ranks call this together. Over all ranks, pieces tile their tensors.

        meta, attachments: rank 0's count. meta is plain JSON; attachments are small files, by plain name.
        agree: given whether this rank succeeded, returns on all ranks together whether all did.
        An older checkpoint of the same step is replaced when the new one is complete.
        Errors: on every rank, SaveError if any rank failed (disk full, no permission, pieces that do not
        tile their tensors), naming the file; earlier checkpoints stay as they are.
        """
        began = time.monotonic()
        working = self.path(step).with_suffix(".tmp")
        written = 0

        def prepare() -> None:
            if rank == 0:
                self._prepare(working)

        def write() -> None:
            nonlocal written
            written = self._write(working, step, rank, world, pieces, has_memory)

        def publish() -> None:
            if rank == 0:
                self._publish(step, world, working, dict(meta), attachments)

        for phase in (prepare, write, publish):
            fault: Exception | None = None
            try:
                phase()
            except Exception as error:
                fault = error
            if not agree(fault is None):
                if rank == 0:
                    self._clear()
                failure = SaveError(self._failure(step, fault))
                failure.elsewhere = fault is None
                raise failure from fault
        return SaveReport(written, time.monotonic() - began)

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
        """As `save`, but one process writes the file of every rank, one after another.

        fetch: called for every block of every piece for its elements (which are not kept), of several pieces side by
            side; then the pieces' own tensors may be meta tensors, and memory holds a few blocks.
        check: called when all is written; if it raises, nothing is published.
        Nothing is replaced, nothing put before a newer step, where no run would find it, and no other model hidden.
        Errors: CheckpointError where what is to be written is at fault, SaveError where the machine is.
        """
        began = time.monotonic()
        working = self.path(step).with_suffix(".tmp")
        try:
            with self._claimed(step):
                self._same_model(meta)
                try:
                    self._prepare(working)
                    written = sum(
                        self._write(working, step, rank, len(ranks), pieces, fetch) for rank, pieces in enumerate(ranks)
                    )
                    check()
                    self._publish(step, len(ranks), working, dict(meta), attachments)
                except BaseException:
                    self._clear()
                    raise
        except Exception as error:
            with contextlib.suppress(OSError):
                self.directory.rmdir()  # only if nothing is in it
            kind = CheckpointError if isinstance(error, ValueError) else SaveError
            raise kind(self._failure(step, error)) from error
        return SaveReport(written, time.monotonic() - began)

    @contextlib.contextmanager
    def _claimed(self, step: int) -> Iterator[None]:
        """The directory, held, in which `step` may be published.

        Errors: CheckpointError where another has it, or where that step or a newer one is there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.held():
            if there := [each for each in self.steps() if each >= step]:
                raise CheckpointError(f"step {there[-1]} is there already; give a new directory")
            yield

    def _same_model(self, meta: Mapping[str, Json]) -> None:
        """See that what is here is of the model that `meta` describes. Errors: CheckpointError."""
        there = self.newest(verify=False)
        if there is None:
            return
        ours, theirs = (below(each, "config", "model") for each in (meta, self.open(there).meta))
        if ours and theirs and json.loads(json.dumps(ours)) != theirs:
            raise CheckpointError(f"step {there} of another model is there, and would be hidden; give a new directory")

    def _prepare(self, working: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear()
        working.mkdir()

    def _write(self, working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
        return write_rank(working, step, rank, world, pieces, fetch)

    def _clear(self) -> None:
        """Remove what is not a checkpoint; nothing else may be saving here."""
        self._recover()
        for left in self.leftovers():
            remove_leftover(left)

    def _publish(self, step: int, world: int, working: Path, meta: dict[str, Json], attachments: Attachments) -> None:
        self._seal(step, world, working, meta, attachments)
        sync_directory(working)
        final = self.path(step)
        previous = final.with_suffix(".old")
        pointer = self.directory / f"{POINTER}.tmp"
        with creating(pointer) as descriptor:
            write_all(descriptor, f"{final.name}\n".encode())
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(final, previous)
        os.rename(working, final)  # here it is published; all that took space was done before
        os.rename(pointer, self.directory / POINTER)
        sync_directory(self.directory)
        shutil.rmtree(previous, ignore_errors=True)

    def _seal(self, step: int, world: int, working: Path, meta: dict[str, Json], attachments: Attachments) -> None:
        """Fold the sidecars, which go, into the manifest."""
        attached = {name: _attach(working, name, source) for name, source in attachments.items()}
        containers: dict[str, Container] = {}
        for rank in range(world):
            path = sidecar(working, rank)
            containers |= read_sidecar(path, rank)
            path.unlink()
        manifest = Manifest(step, world, containers, attached, meta)
        check_tiling(manifest, working)
        write_manifest(working, manifest)

    def _failure(self, step: int, fault: BaseException | None) -> str:
        kept = ", ".join(map(str, self.steps())) or "none"
        place, free = self._where(step)
        where = f"{place}: step {step} was not saved"
        if fault is None:
            return f"{where}: another rank failed (whole: steps {kept})"
        if isinstance(fault, OSError):
            name = fault.filename or self.path(step)
            reason = f"{name}: {fault.strerror or fault}" + ("" if free is None else f"; {free} bytes are free")
        else:
            reason = str(fault) or repr(fault)
        return f"{where}: {reason} (whole: steps {kept})"

    def _where(self, step: int) -> tuple[str, int | None]:
        """What to call the place of a save, and the bytes that are free there; None where that is not known."""
        return str(self.directory), shutil.disk_usage(self.directory).free if self.directory.exists() else None


def write_rank(working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
    """One rank's containers and its sidecar; the bytes of the former."""
    files: dict[str, list[Piece]] = {rank_file(rank): []}
    for piece in pieces:
        piece.check()
        if piece.box.elements:
            files.setdefault(state_file(rank) if is_state(piece.key) else rank_file(rank), []).append(piece)
    containers = {}
    for name, kept in files.items():
        try:
            about: dict[str, object] = {"step": step, "rank": rank, "world": world}
            containers[name] = write_container(working / name, kept, about, fetch)
        except OSError as error:
            total = sum(piece.bytes for piece in kept)
            path = str(working / name)
            raise OSError(error.errno, f"{error.strerror} ({total} bytes to write)", path) from error
    write_sidecar(sidecar(working, rank), containers)
    return sum(container.size for container in containers.values())


def _attach(working: Path, name: str, source: Path | bytes) -> Attached:
    check_attachment_name(name)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    with creating(working / name) as descriptor:
        write_all(descriptor, data)
    return Attached(*file_digest(working / name))


def sidecar(working: Path, rank: int) -> Path:
    return working / f"rank-{rank:05d}.json"
