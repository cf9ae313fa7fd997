"""Read a published checkpoint in any layout. Only the requested bytes are read; requesting a tensor that is not stored
is an error.

The manifest is checked before it is used. An open checkpoint has a shared lock on the manifest, so that retention does
not remove a checkpoint that is being read. This module does not depend on ranks; the caller passes the list of pieces
to read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch

from mega.core.checkpoint.own.container import Entry, check_bytes, file_digest, read_box
from mega.core.checkpoint.own.disk import open_file, run_concurrently
from mega.core.checkpoint.own.manifest import MANIFEST, read_manifest
from mega.core.checkpoint.own.pieces import DTYPES, Box, CheckpointError, Piece, UnreadableError


class Checkpoint:
    """A published checkpoint, opened for reading.

    step: the saved step. world: number of ranks that saved the step. meta: plain state of the run. tensors: key ->
    (whole shape, dtype). digest: sha256 of the manifest, which covers these values and every stored byte.
    Errors of the constructor: CheckpointError naming the file at fault.
    """

    foreign = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock()
        self._manifest = read_manifest(path)
        self.step = self._manifest.step
        self.world = self._manifest.world
        self.meta = self._manifest.meta
        self.digest = self._manifest.digest
        self._stored: dict[str, list[tuple[str, Entry]]] = {}
        for name, container in self._manifest.containers.items():
            size = self._size(name)
            if size != container.size:
                raise CheckpointError(f"{path / name}: {size} bytes, {container.size} were saved")
            for entry in container.entries:
                self._stored.setdefault(entry.key, []).append((name, entry))
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (stored[0][1].whole, DTYPES[stored[0][1].dtype]) for key, stored in self._stored.items()
        }
        self._sound: set[tuple[str, int]] = set()

    def _lock(self) -> None:
        """Take a shared lock on the manifest for the lifetime of this object, if the file system supports locks."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _file(self, name: str) -> Path:
        """Return the local path of one of the checkpoint's files."""
        return self.path / name

    def _size(self, name: str) -> int:
        with open_file(self.path / name) as (_, size):
            return size

    def _present(self) -> Iterable[str]:
        """The names of all files in the directory. Errors: CheckpointError if the directory cannot be read."""
        try:
            return [entry.name for entry in os.scandir(self.path)]
        except OSError as error:
            raise UnreadableError.of(self.path, error) from error

    @property
    def weights_only(self) -> bool:
        """Whether the optimizer's state was removed intentionally."""
        return bool(self._manifest.leaving)

    @property
    def bytes(self) -> int:
        return sum(container.size for container in self._manifest.containers.values())

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `pieces` in place. The checkpoint may have been saved in any layout.

        cast: whether to convert values where dtypes differ; otherwise an error is raised. verify: whether to check the
        hash of every stored rectangle that overlaps a piece, before the rectangle is first read; otherwise only the
        required bytes are read. Errors: CheckpointError naming the tensor (unknown key, wrong shape or dtype) or the
        damaged file.
        """
        parts: dict[tuple[str, int], list[tuple[Entry, Box, torch.Tensor]]] = {}
        size = 0
        for piece in pieces:
            piece.check()
            if not piece.box.elements:
                continue
            size += piece.bytes
            for name, entry, shared in self._sources(piece, cast):
                part = piece.tensor[shared.inside(piece.box)]
                parts.setdefault((name, entry.offset), []).append((entry, shared, part))

        def fill(place: tuple[str, int]) -> None:
            path = self._file(place[0])
            with torch.no_grad(), open_file(path) as (descriptor, _):
                for entry, shared, part in parts[place]:
                    if verify:
                        self._check(place[0], descriptor, entry)
                    read_box(path, descriptor, entry, shared, part)

        run_concurrently(fill, sorted(parts), size)

    def _sources(self, piece: Piece, cast: bool) -> list[tuple[str, Entry, Box]]:
        if piece.key not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {piece.key}")
        piece.check_source(self.path, self.tensors[piece.key], cast)
        sources = []
        for name, entry in self._stored[piece.key]:
            shared = entry.box.intersection(piece.box)
            if shared:
                sources.append((name, entry, shared))
        present = sum(shared.elements for _, _, shared in sources)
        assert present == piece.box.elements, f"{piece.key}: the manifest's tiling was checked"
        return sources

    def _check(self, name: str, descriptor: int, entry: Entry) -> None:
        if (name, entry.offset) not in self._sound:
            check_bytes(self.path / name, descriptor, entry.offset, entry.bytes, entry.digest, f"tensor {entry.key}")
            self._sound.add((name, entry.offset))

    def verify(self) -> None:
        """Hash every byte of the checkpoint. Errors: CheckpointError naming the first file at fault and, if known, the
        tensor."""
        present = set(self._present())
        for name in sorted((present - self._manifest.leaving) ^ self._manifest.names):
            fault = "does not belong here" if name in present else "is missing"
            raise CheckpointError(f"{self.path / name}: {fault}")
        for name, container in self._manifest.containers.items():
            path = self._file(name)
            with open_file(path) as (descriptor, _):
                check_bytes(path, descriptor, 0, container.header, container.digest, "the header")
                check = partial(self._check, name, descriptor)
                run_concurrently(check, container.entries, container.size)
        self.check_attachments()

    @cached_property
    def attachments(self) -> Mapping[str, Path]:
        """File name -> path, for the small files stored with the tensors. The files' hashes are checked. Errors:
        CheckpointError naming a damaged file."""
        self.check_attachments()
        return {name: self.path / name for name in self._manifest.attachments}

    def check_attachments(self) -> None:
        """Hash the small files stored with the tensors. Errors: CheckpointError naming a damaged file."""
        for name, record in self._manifest.attachments.items():
            if file_digest(self.path / name) != (record.size, record.digest):
                raise CheckpointError(f"{self.path / name}: not the bytes that were saved (sha256 differs)")
