"""The steps under a directory, each a directory of its own, and the small files next to them.

    runs/a/latest                       the newest step's directory name
    runs/a/step-0000010/                one published checkpoint (directory.py)
    runs/a/step-0000010.tmp/            one that is being saved, or was; and .old, one that is being replaced

It knows what is there, not how it is saved (directory.py), nor which step a run may trust (trusted.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mega.core.checkpoint.own.disk import creating, read_file, write_all
from mega.core.checkpoint.own.manifest import WEIGHTS_ONLY
from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.files import POINTER, SEAL, locked_alone, sync_directory

STEP = re.compile(r"step-(\d{7,15})")
NOTHING = "holds no checkpoint (a directory with step-NNNNNNN in it is wanted)"
_NOTE_LIMIT = 16 << 20
"""Most bytes of a small file next to the steps."""
_LEFTOVER = re.compile(rf"(step-\d+|{POINTER}|{WEIGHTS_ONLY})\.(tmp|old)")


class StepFolder:
    """The steps of one run, under one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.place = str(directory)
        """What the user calls it."""

    def path(self, step: int) -> Path:
        """Where a step is, or would be, published."""
        return self.directory / f"step-{step:07d}"

    def steps(self) -> list[int]:
        """Published steps, oldest first. Published means renamed into place; `newest` also verifies."""
        if not self.directory.is_dir():
            return []
        found = (STEP.fullmatch(entry.name) for entry in os.scandir(self.directory) if _is_directory(entry))
        return sorted(int(match[1]) for match in found if match)

    def _linked(self) -> list[int]:
        """Steps that are only links, which are not followed; `find` reports that."""
        entries = os.scandir(self.directory) if self.directory.is_dir() else ()
        found = (STEP.fullmatch(entry.name) for entry in entries if entry.is_symlink())
        return [int(match[1]) for match in found if match]

    def still(self, steps: Iterable[int]) -> set[int]:
        """Those of some published steps that have not been removed since."""
        return {step for step in steps if self.path(step).is_dir()}

    def leftovers(self) -> list[Path]:
        """What killed saves and removals left; none of it is a checkpoint."""
        found = [path for end in ("tmp", "old") for path in self.directory.glob(f"*.{end}")]
        return sorted(path for path in found if _LEFTOVER.fullmatch(path.name) and not _only_copy(path))

    def open(self, step: int) -> Checkpoint:
        """Read and check the manifest of one step. Errors: CheckpointError naming what is wrong with it."""
        path = self.path(step)
        try:
            linked, there = path.is_symlink(), path.is_dir()
        except OSError as error:
            raise UnreadableError.of(path, error) from error
        if linked:
            raise CheckpointError(f"{path}: is a link, which is not followed; put the directory here, or name its own")
        if not there:
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
    def held(self) -> Iterator[None]:
        """The directory for one process that writes or removes. Without lock support, for every process.

        Errors: CheckpointError where another has it.
        """
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not locked_alone(descriptor):
                raise CheckpointError(f"another process is writing into {self.directory}")
            yield
        finally:
            os.close(descriptor)

    def _note(self, name: str) -> bytes | None:
        """A small file next to the steps; None where it is absent."""
        path = self.directory / name
        return read_file(path, _NOTE_LIMIT) if os.path.lexists(path) else None

    def _set_note(self, name: str, data: bytes) -> None:
        coming = self.directory / f"{name}.new"  # not a leftover, which a save in the background would remove
        coming.unlink(missing_ok=True)
        with creating(coming) as descriptor:
            write_all(descriptor, data)
        os.rename(coming, self.directory / name)
        sync_directory(self.directory)

    def _pointer(self) -> str | None:
        """What the pointer says; None where it is absent."""
        if not os.path.lexists(self.directory / POINTER):
            return None
        try:
            return read_file(self.directory / POINTER, 200).decode("ascii", "replace").strip()
        except CheckpointError as error:
            return str(error)

    def _recover(self) -> None:
        """Undo a replacement that was cut between its two renames: the old one comes back."""
        if not self.directory.is_dir():
            return
        for entry in os.scandir(self.directory):
            final = Path(entry.path).with_suffix("")
            if entry.name.endswith(".old") and STEP.fullmatch(final.name) and not final.exists():
                try:
                    os.rename(entry.path, final)
                except FileNotFoundError:
                    continue  # another rank was faster


def remove_leftover(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _only_copy(path: Path) -> bool:
    """Whether this is a checkpoint that was moved aside and whose replacement never came."""
    return path.suffix == ".old" and not path.with_suffix("").exists()


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
