"""Checkpoints in an object store (S3, or any other store that fsspec supports), with the same files and manifest as on
a disk.

An object store cannot rename directories. A checkpoint counts as published when its seal, `manifest.json.sha256`,
exists. The seal is therefore written after all other files of the checkpoint, and before the pointer file. Files are
written and read through a local folder of this process (in $TMPDIR), one rank's files at a time. Containers are
downloaded when they are first needed, and hashed as on a disk. The local copies are deleted when the Python object that
represents the store is garbage collected.

An object store can neither replace a checkpoint atomically nor lock a checkpoint against removal. Replacing a published
step, unless it is suspect, and removing old steps are therefore refused.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mega.core.checkpoint.own.container import Fetch
from mega.core.checkpoint.own.directory import Attachments, CheckpointStore, sidecar, write_rank
from mega.core.checkpoint.own.manifest import MANIFEST, WEIGHTS_ONLY, rank_file, read_manifest, state_file
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.checkpoint.own.steps import STEP
from mega.core.checkpoint.own.trusted import TrustedSteps
from mega.core.files import POINTER, SEAL
from mega.core.untrusted import Json


class _Files:
    """A wrapper for an fsspec file system. Errors are raised as one-line OSErrors that name the URL, except
    FileNotFoundError, which is raised unchanged."""

    def __init__(self, files: Any, url: str) -> None:
        self._files, self._url = files, url

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._files, name)

        def call(*args: object, **kwargs: object) -> object:
            try:
                return act(*args, **kwargs)
            except FileNotFoundError:
                raise
            except Exception as error:  # each store's library raises different classes
                reason = " ".join(str(error).split()) or type(error).__name__
                raise OSError(f"{self._url}: cannot be reached ({name}): {reason}") from error

        return call


class RemoteSteps(TrustedSteps):
    """The steps under a URL such as s3://bucket/run or memory://run.

    Errors of the constructor: ValueError if fsspec, or the library for this URL's protocol, is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped, unused-ignore]

            files, self._root = url_to_fs(url)
        except ImportError as error:
            if missing := next((name for name in ("fsspec", "s3fs") if name in str(error)), None):
                raise ValueError(f"{url}: needs {missing}; pip install '.[remote]' in a clone") from None
            raise ValueError(f"{url}: cannot be reached: {error}") from None
        except ValueError as error:
            raise ValueError(f"{url}: cannot be reached: {error}") from None
        self._files = _Files(files, url)
        super().__init__(Path(tempfile.mkdtemp(prefix="mega-remote-")))
        self.place = url
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def steps(self) -> list[int]:
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False))
        candidates = sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)
        return [step for step in candidates if self._there(step, SEAL)]

    def existing(self, steps: Iterable[int]) -> set[int]:
        return set(steps)

    def leftovers(self) -> list[Path]:
        return []

    def open(self, step: int) -> Checkpoint:
        if not self._there(step, SEAL):
            published = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self._at(step)}: no such checkpoint (published steps: {published})")
        return RemoteCheckpoint(self, step)

    def _pointer(self) -> str | None:
        path = f"{self._root}/{POINTER}"
        if not self._files.exists(path):
            return None
        return bytes(self._files.cat_file(path)[:200]).decode("ascii", "replace").strip()

    def digest(self, step: int) -> str:
        return bytes(self._files.cat_file(self._at(step, SEAL))[:64]).decode("ascii", "replace")

    def _note(self, name: str) -> bytes | None:
        path = f"{self._root}/{name}"
        return bytes(self._files.cat_file(path)) if self._files.exists(path) else None

    def _set_note(self, name: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", data)

    def _recover(self) -> None:
        """Do nothing, because a save in an object store has no renames that could be interrupted."""

    def _at(self, step: int, name: str = "") -> str:
        return f"{self._root}/{self.path(step).name}/{name}".rstrip("/")

    def _there(self, step: int, name: str) -> bool:
        return bool(self._files.exists(self._at(step, name)))

    def _put(self, path: Path, step: int) -> None:
        self._files.put_file(str(path), self._at(step, path.name))

    def fetch(self, step: int, name: str) -> Path:
        """Return the local path of a checkpoint's file, after downloading the file if necessary."""
        path = self.path(step) / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self.directory)) / name
            try:
                self._files.get_file(self._at(step, name), str(partial))
            except FileNotFoundError:
                raise CheckpointError(f"{self._at(step, name)}: is missing") from None
            partial.rename(path)
            partial.parent.rmdir()
        return path

    def sizes(self, step: int) -> Mapping[str, int]:
        """File name -> size in bytes, for a checkpoint's files in the object store."""
        self._files.invalidate_cache()
        files = self._files.ls(self._at(step), detail=True)
        return {str(file["name"]).rsplit("/", 1)[-1]: int(file["size"] or 0) for file in files}


class RemoteStore(RemoteSteps, CheckpointStore):
    """The checkpoints under a URL, which can be read and saved."""

    def _prepare(self, working: Path) -> None:
        step = int(working.stem.removeprefix("step-"))
        if self._there(step, SEAL):
            self._unpublish_suspect(step)
        if self._there(step, SEAL):
            raise ValueError(f"{self._at(step)}: is there already, and an object store cannot replace it whole")
        if self._files.exists(self._at(step)):
            self._files.rm(self._at(step), recursive=True)  # files left by a killed save
        self._files.makedirs(self._at(step), exist_ok=True)

    def _unpublish_suspect(self, step: int) -> None:
        """Unpublish a suspect step, which a resumed run skipped and now saves again."""
        verdict = self.verdicts().get(step)
        if verdict is not None and (verdict.status, verdict.manifest) == ("suspect", self.digest(step)):
            self._files.rm_file(self._at(step, SEAL))
            self._files.invalidate_cache()

    def _write(self, working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
        working.mkdir(exist_ok=True)
        bytes_written = write_rank(working, step, rank, world, pieces, fetch)
        for path in (working / rank_file(rank), working / state_file(rank), sidecar(working, rank)):
            if path.exists():
                self._put(path, step)
                path.unlink()
        return bytes_written

    def _publish(self, step: int, world: int, working: Path, meta: dict[str, Json], attachments: Attachments) -> None:
        sidecars = [sidecar(working, rank) for rank in range(world)]
        for path in sidecars:
            self._files.get_file(self._at(step, path.name), str(path))
        self._seal(step, world, working, meta, attachments)
        for name in (*attachments, MANIFEST):
            self._put(working / name, step)
        for path in sidecars:
            self._files.rm_file(self._at(step, path.name))
        self._put(working / SEAL, step)  # the seal publishes the checkpoint
        self._files.pipe_file(f"{self._root}/{POINTER}", f"{self.path(step).name}\n".encode())
        shutil.rmtree(working)

    def _clear(self) -> None:
        """Remove the local files of a failed save. Files that were already uploaded are ignored by readers, and the
        next save removes them."""
        for folder in self.directory.glob("*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)

    def _where(self, step: int) -> tuple[str, int | None]:
        return self._at(step), None


class RemoteCheckpoint(Checkpoint):
    """A checkpoint whose files are downloaded when they are first needed. The local copies are deleted together with
    the Python object that represents the store."""

    def __init__(self, store: RemoteSteps, step: int) -> None:
        self.store, self._number, self._sizes = store, step, store.sizes(step)
        for name in {MANIFEST, SEAL, WEIGHTS_ONLY} & self._sizes.keys():
            store.fetch(step, name)
        path = store.path(step)
        for name in read_manifest(path).attachments:
            store.fetch(step, name)
        super().__init__(path)

    def _file(self, name: str) -> Path:
        return self.store.fetch(self._number, name)

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            raise CheckpointError(f"{self.path / name}: is missing")
        return self._sizes[name]

    def _present(self) -> Iterable[str]:
        return self._sizes
