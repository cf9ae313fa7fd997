"""The steps of a run, each in a subdirectory of the run's directory, and the small files next to them.

    runs/a/latest                       the newest step's directory name
    runs/a/step-0000010/                one published checkpoint (directory.py)
    runs/a/step-0000010.tmp/            an unfinished save; .old instead of .tmp: a checkpoint that is being replaced

This module lists the existing steps. Steps are saved by directory.py; trusted.py determines which steps a run may
trust.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mega.core.checkpoint.own.disk import new_file, read_file, write_all
from mega.core.checkpoint.own.manifest import WEIGHTS_ONLY
from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.files import POINTER, SEAL, locked_alone, sync_directory

STEP = re.compile(r"step-(\d{7,15})")
NOTHING = "holds no checkpoint (expected: a directory with step-NNNNNNN in it)"
_NOTE_LIMIT = 16 << 20
"""Maximum size in bytes of a small file next to the steps' directories."""
_LEFTOVER = re.compile(rf"(step-\d+|{POINTER}|{WEIGHTS_ONLY})\.(tmp|old)")


class StepFolder:
    """The steps of one run, stored under one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.place = str(directory)
        """The run's directory, as given by the user."""

    def path(self, step: int) -> Path:
        """Return the path of a published step. The step need not exist."""
        return self.directory / f"step-{step:07d}"

    def steps(self) -> list[int]:
        """Published steps, oldest first. A step counts as published if it was renamed to its final name; its bytes are
        not verified."""
        if not self.directory.is_dir():
            return []
        matches = (STEP.fullmatch(entry.name) for entry in os.scandir(self.directory) if _is_directory(entry))
        return sorted(int(match[1]) for match in matches if match)

    def linked(self) -> list[int]:
        """Steps whose directories are symbolic links. They cannot be opened, and `find` reports them."""
        entries = os.scandir(self.directory) if self.directory.is_dir() else ()
        matches = (STEP.fullmatch(entry.name) for entry in entries if entry.is_symlink())
        return [int(match[1]) for match in matches if match]

    def existing(self, steps: Iterable[int]) -> set[int]:
        """Return the steps in `steps` that still exist."""
        return {step for step in steps if self.path(step).is_dir()}

    def leftovers(self) -> list[Path]:
        """Incomplete directories that killed saves and removals left behind. They are not checkpoints."""
        candidates = [path for end in ("tmp", "old") for path in self.directory.glob(f"*.{end}")]
        return sorted(path for path in candidates if _LEFTOVER.fullmatch(path.name) and not _only_copy(path))

    def open(self, step: int) -> Checkpoint:
        """Open one step: read and check its manifest. Errors: CheckpointError naming the fault."""
        path = self.path(step)
        try:
            linked, exists = path.is_symlink(), path.is_dir()
        except OSError as error:
            raise UnreadableError.of(path, error) from error
        if linked:
            raise CheckpointError(f"{path}: is a link, which is not followed; put the directory here, or name its own")
        if not exists:
            published = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no such checkpoint (published steps: {published})")
        checkpoint = Checkpoint(path)
        if checkpoint.step != step:
            raise CheckpointError(f"{path}: the manifest is that of step {checkpoint.step}")
        return checkpoint

    def digest(self, step: int) -> str:
        """The hash of a published step's manifest, from its seal."""
        return read_file(self.path(step) / SEAL, 200)[:64].decode("ascii", "replace")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for a process that writes or removes steps. If the file system does not support locks,
        nothing is locked.

        Errors: CheckpointError if another process holds the lock.
        """
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not locked_alone(descriptor):
                raise CheckpointError(f"another process is writing into {self.directory}")
            yield
        finally:
            os.close(descriptor)

    def _note(self, name: str) -> bytes | None:
        """The content of a small file next to the steps' directories; None if the file does not exist."""
        path = self.directory / name
        return read_file(path, _NOTE_LIMIT) if os.path.lexists(path) else None

    def _set_note(self, name: str, data: bytes) -> None:
        partial = self.directory / f"{name}.new"  # not .tmp, because a background save removes .tmp files
        partial.unlink(missing_ok=True)
        with new_file(partial) as descriptor:
            write_all(descriptor, data)
        os.rename(partial, self.directory / name)
        sync_directory(self.directory)

    def _pointer(self) -> str | None:
        """The content of the pointer file; None if the file does not exist."""
        if not os.path.lexists(self.directory / POINTER):
            return None
        try:
            return read_file(self.directory / POINTER, 200).decode("ascii", "replace").strip()
        except CheckpointError as error:
            return str(error)

    def _recover(self) -> None:
        """Undo a replacement that was interrupted between its two renames: restore the old checkpoint."""
        if not self.directory.is_dir():
            return
        for entry in os.scandir(self.directory):
            final = Path(entry.path).with_suffix("")
            if entry.name.endswith(".old") and STEP.fullmatch(final.name) and not final.exists():
                try:
                    os.rename(entry.path, final)
                except FileNotFoundError:
                    continue  # another rank has renamed the checkpoint


def remove_leftover(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _only_copy(path: Path) -> bool:
    """Whether `path` is an old checkpoint, renamed to .old for a replacement that was never published."""
    return path.suffix == ".old" and not path.with_suffix("").exists()


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
