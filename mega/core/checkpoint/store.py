"""A directory of checkpoints: saved by many ranks at once, published whole or not at all, read in any layout.

    runs/a/latest                       the newest step's directory name
    runs/a/step-0000010/                published by one rename of step-0000010.tmp
        rank-00000.safetensors          every rank's pieces
        tokenizer.json  run.toml        attachments
        manifest.json                   all files' hashes, all tensors' rectangles, plain state
        manifest.json.sha256

Saving, on every rank: (1) rank 0 makes `step-N.tmp/`; (2) each rank writes its file and a sidecar, synced;
(3) rank 0 folds the sidecars into the manifest, renames, moves the pointer; (4) every rank learns whether
that worked. A barrier stands between two phases; it is a callable, since this room knows no ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.container import (
    Container,
    Entry,
    check_bytes,
    file_digest,
    read_box,
    write_container,
)
from mega.core.checkpoint.disk import creating, opening, read_file, sync_directory, write_all
from mega.core.checkpoint.manifest import (
    Attached,
    Manifest,
    check_attachment_name,
    check_tiling,
    rank_file,
    read_manifest,
    read_sidecar,
    write_manifest,
    write_sidecar,
)
from mega.core.checkpoint.pieces import DTYPES, Box, CheckpointError, Piece

_STEP = re.compile(r"step-(\d{7,15})")
_POINTER = "latest"


class SaveError(RuntimeError):
    """A save that failed. Nothing was published and every earlier checkpoint is as it was."""


@dataclass(frozen=True)
class SaveReport:
    """What one rank wrote, and how long the save took it, waiting included."""

    bytes: int
    seconds: float


class CheckpointStore:
    """The checkpoints of one run, under one directory.

    >>> store = CheckpointStore(Path("runs/a"))
    >>> store.save(10, [Piece("weights/w", (2,), (0,), torch.ones(2))], {"samples": 40})
    >>> store.open(store.newest()).read([Piece("weights/w", (2,), (0,), w)])
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        meta: Mapping[str, Any],
        *,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] = lambda: None,
        attachments: Mapping[str, Path | bytes] | None = None,
    ) -> SaveReport:
        """Publish one checkpoint; all ranks call this together. Over all ranks, pieces tile their tensors.

        meta, attachments: rank 0's count. meta is plain JSON; attachments are small files, by plain name.
        An older checkpoint of the same step is replaced when the new one is complete.
        Errors: on every rank, SaveError if any rank failed (disk full, no permission, pieces that do not
        tile their tensors), naming the file; earlier checkpoints stay as they are.
        """
        began = time.monotonic()
        working = self._path(step).with_suffix(".tmp")
        written: list[Container] = []

        def prepare() -> None:
            if rank == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._recover()
                for left in self.directory.glob("step-*.tmp"):  # of a save that was killed
                    shutil.rmtree(left, ignore_errors=True)
                working.mkdir()

        def write() -> None:
            written.append(_write_rank(working, step, rank, world, pieces))

        def publish() -> None:
            if rank == 0:
                self._publish(step, world, working, dict(meta), attachments or {})

        fault: BaseException | None = None
        for phase in (prepare, write, publish):
            if fault is None:  # a failed rank still meets the others at every barrier
                try:
                    phase()
                except Exception as error:
                    fault = error
            barrier()
        published = not working.exists() and self._path(step).is_dir()
        barrier()
        if fault is not None or not published:
            if working.exists():
                _unlink(working / rank_file(rank), _sidecar(working, rank))
            if rank == 0:
                shutil.rmtree(working, ignore_errors=True)
            raise self._failure(step, rank, fault) from fault
        return SaveReport(written[0].size, time.monotonic() - began)

    def _publish(
        self,
        step: int,
        world: int,
        working: Path,
        meta: dict[str, Any],
        attachments: Mapping[str, Path | bytes],
    ) -> None:
        attached = {name: _attach(working, name, source) for name, source in attachments.items()}
        containers = {}
        for rank in range(world):
            sidecar = _sidecar(working, rank)
            if not sidecar.exists():
                raise SaveError(f"rank {rank} did not complete {working / rank_file(rank)}")
            containers[rank_file(rank)] = read_sidecar(sidecar)
            sidecar.unlink()
        manifest = Manifest(step, world, containers, attached, meta)
        check_tiling(manifest, working)
        write_manifest(working, manifest)
        sync_directory(working)
        final = self._path(step)
        previous = final.with_suffix(".old")
        pointer = self.directory / f"{_POINTER}.tmp"
        pointer.unlink(missing_ok=True)
        with creating(pointer) as descriptor:
            write_all(descriptor, f"{final.name}\n".encode())
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(final, previous)
        os.rename(working, final)  # here it is published; all that took space was done before
        os.rename(pointer, self.directory / _POINTER)
        sync_directory(self.directory)
        shutil.rmtree(previous, ignore_errors=True)

    def _failure(self, step: int, rank: int, fault: BaseException | None) -> SaveError:
        kept = ", ".join(map(str, self.steps())) or "none"
        where = f"{self.directory}: step {step} was not saved"
        if fault is None:
            return SaveError(f"{where}: another rank failed (published steps: {kept})")
        if isinstance(fault, OSError):
            name = fault.filename or self._path(step)
            free = shutil.disk_usage(self.directory).free if self.directory.exists() else 0
            reason = f"{name}: {fault.strerror or fault}; {free} bytes are free"
        else:
            reason = str(fault)
        return SaveError(f"{where}: rank {rank}: {reason} (published steps: {kept})")

    def steps(self) -> list[int]:
        """Published steps, oldest first. Published means renamed into place; `newest` also verifies."""
        if not self.directory.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in os.scandir(self.directory) if _is_directory(entry))
        return sorted(int(match[1]) for match in found if match)

    def newest(self, *, verify: bool = True, tell: Callable[[str], None] = lambda line: None) -> int | None:
        """The newest published step that can be trusted; None only where nothing was ever published.

        verify: hash every file first; else only manifest and sizes are checked. tell: is given a line for
        every checkpoint passed over and for a pointer that names another one.
        Errors: CheckpointError if there are checkpoints or a pointer, but none can be trusted: a run is
        never silently started afresh.
        """
        self._recover()
        steps = self.steps()
        for step in reversed(steps):
            try:
                checkpoint = self.open(step)
                if verify:
                    checkpoint.verify()
            except CheckpointError as error:
                tell(f"step {step} is passed over: {error}")
                continue
            pointer = self._pointer()
            if pointer != self._path(step).name:
                tell(f"{self.directory / _POINTER} says {pointer!r}; the newest whole one is step {step}")
            return step
        if steps:
            raise CheckpointError(f"{self.directory}: none of the checkpoints {steps} can be trusted")
        if os.path.lexists(self.directory / _POINTER):
            raise CheckpointError(
                f"{self.directory / _POINTER} says {self._pointer()!r}, but no checkpoint is there; "
                "remove it to start afresh"
            )
        return None

    def open(self, step: int) -> Checkpoint:
        """Read and check the manifest of one step. Errors: CheckpointError naming what is wrong with it."""
        path = self._path(step)
        if path.is_symlink() or not path.is_dir():
            published = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no such checkpoint (published steps: {published})")
        checkpoint = Checkpoint(path)
        if checkpoint.step != step:
            raise CheckpointError(f"{path}: the manifest is that of step {checkpoint.step}")
        return checkpoint

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:07d}"

    def _pointer(self) -> str:
        try:
            return read_file(self.directory / _POINTER, 200).decode("ascii", "replace").strip()
        except CheckpointError as error:
            return str(error)

    def _recover(self) -> None:
        """Undo a replacement that was cut between its two renames: the old one comes back."""
        if not self.directory.is_dir():
            return
        for entry in os.scandir(self.directory):
            final = Path(entry.path).with_suffix("")
            if entry.name.endswith(".old") and _STEP.fullmatch(final.name) and not final.exists():
                try:
                    os.rename(entry.path, final)
                except FileNotFoundError:
                    continue  # another rank was faster


class Checkpoint:
    """One published checkpoint, opened for reading.

    step, world: of the run that saved it. meta: its plain state. tensors: key -> (whole shape, dtype).
    attachments: file name -> path. Errors of the constructor: CheckpointError naming the file at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.step = self._manifest.step
        self.world = self._manifest.world
        self.meta = self._manifest.meta
        self._stored: dict[str, list[tuple[str, Entry]]] = {}
        for name, container in self._manifest.containers.items():
            with opening(path / name) as (_, size):
                if size != container.size:
                    raise CheckpointError(f"{path / name}: {size} bytes, {container.size} were saved")
            for entry in container.entries:
                self._stored.setdefault(entry.key, []).append((name, entry))
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (stored[0][1].whole, DTYPES[stored[0][1].dtype]) for key, stored in self._stored.items()
        }
        self.attachments: Mapping[str, Path] = {name: path / name for name in self._manifest.attachments}
        self._sound: set[tuple[str, int]] = set()

    @property
    def bytes(self) -> int:
        return sum(container.size for container in self._manifest.containers.values())

    def read(self, wanted: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `wanted` in place, from whatever layout they were saved in.

        cast: convert where dtypes differ, instead of refusing. verify: first hash every stored rectangle
        that is touched, once; else only the bytes needed are read.
        Errors: CheckpointError naming the tensor (unknown key, other shape or dtype) or the damaged file.
        """
        by_file: dict[str, list[tuple[Entry, Box, torch.Tensor]]] = {}
        for piece in wanted:
            piece.check()
            if not piece.box.elements:
                continue
            for name, entry, shared in self._sources(piece, cast):
                part = piece.tensor[shared.inside(piece.box)]
                by_file.setdefault(name, []).append((entry, shared, part))
        with torch.no_grad():
            for name in sorted(by_file):
                with opening(self.path / name) as (descriptor, _):
                    for entry, shared, part in sorted(by_file[name], key=lambda read: read[0].offset):
                        if verify:
                            self._check(name, descriptor, entry)
                        read_box(self.path / name, descriptor, entry, shared, part)

    def _sources(self, piece: Piece, cast: bool) -> list[tuple[str, Entry, Box]]:
        if piece.key not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {piece.key}")
        whole, dtype = self.tensors[piece.key]
        if whole != piece.whole:
            raise CheckpointError(f"{self.path}: {piece.key} has shape {whole}, {piece.whole} is wanted")
        if dtype != piece.tensor.dtype and not cast:
            raise CheckpointError(f"{self.path}: {piece.key} is {dtype}, {piece.tensor.dtype} is wanted")
        found = []
        for name, entry in self._stored[piece.key]:
            shared = entry.box.meet(piece.box)
            if shared:
                found.append((name, entry, shared))
        present = sum(shared.elements for _, _, shared in found)
        assert present == piece.box.elements, f"{piece.key}: the manifest's tiling was checked"
        return found

    def _check(self, name: str, descriptor: int, entry: Entry) -> None:
        if (name, entry.offset) not in self._sound:
            check_bytes(
                self.path / name, descriptor, entry.offset, entry.bytes, entry.digest, f"tensor {entry.key}"
            )
            self._sound.add((name, entry.offset))

    def verify(self) -> None:
        """Hash every byte again. Errors: CheckpointError naming the first bad file, and the tensor."""
        present = {entry.name for entry in os.scandir(self.path)}
        for name in sorted(present ^ self._manifest.names):
            fault = "does not belong here" if name in present else "is missing"
            raise CheckpointError(f"{self.path / name}: {fault}")
        for name, container in self._manifest.containers.items():
            path = self.path / name
            with opening(path) as (descriptor, _):
                check_bytes(path, descriptor, 0, container.header, container.digest, "the header")
                for entry in container.entries:
                    self._check(name, descriptor, entry)
        for name, attached in self._manifest.attachments.items():
            if file_digest(self.path / name) != (attached.size, attached.digest):
                raise CheckpointError(f"{self.path / name}: not the bytes that were saved (sha256 differs)")


def _write_rank(working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece]) -> Container:
    """One rank's container and its sidecar."""
    kept = []
    for piece in pieces:
        piece.check()
        if piece.box.elements:
            kept.append(piece)
    path = working / rank_file(rank)
    total = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in kept)
    try:
        container = write_container(path, kept, {"step": step, "rank": rank, "world": world})
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({total} bytes to write)", str(path)) from error
    write_sidecar(_sidecar(working, rank), container)
    return container


def _attach(working: Path, name: str, source: Path | bytes) -> Attached:
    check_attachment_name(name)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    with creating(working / name) as descriptor:
        write_all(descriptor, data)
    return Attached(*file_digest(working / name))


def _sidecar(working: Path, rank: int) -> Path:
    return working / f"rank-{rank:05d}.json"


def _unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
