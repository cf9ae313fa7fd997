"""Exported folders, which appear under their name complete or not at all, and what killed writers of them left.

A folder is filled next to its place, as `NAME.<12 hexadecimal digits>.tmp`, under a lock that ends with its writer,
however that ends. So the next writer of the same name, or `mega checkpoint clean NAME`, can distinguish what is
abandoned from what is still being filled. The lock is on a file in it, since NFS keeps those of directories from other
machines. Without that file, or where a file system has no locks, nothing is removed. Knows nothing of contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from mega.core.files import sync_directory, url_of

LOCK = ".writing"
"""The file in a folder that its writer has locked; it goes before the folder gets its name."""


def check_fresh(save: Path) -> None:
    """Errors: ValueError where no folder can be filled at `save`."""
    if (url := url_of(save)) is not None:
        raise ValueError(f"--save-dir {url}: only checkpoints of ours go to an object store; give a folder")
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise ValueError(f"{save}: exists and is not an empty folder")


def filled_folder(save: Path, fill: Callable[[Path], int], size: int) -> int:
    """Fill a folder next to `save`, then give it that name; what `fill` returns. Nothing is left where that fails.

    size: bytes that `fill` is to write, for what is said of a disk that does not take them.
    """
    check_fresh(save)
    save = Path(os.path.realpath(save))  # "." and links: what they mean gets the name
    try:
        with folder_next_to(save) as working:
            written = fill(working)
            (working / LOCK).unlink()
            sync_directory(working)
            working.rename(save)  # an empty folder of that name gives way
    except OSError as error:
        free = f"; {shutil.disk_usage(save.parent).free} bytes are free" if save.parent.exists() else ""
        raise OSError(f"{save}: was not written: {error.strerror or error} ({size} bytes to write){free}") from error
    sync_directory(save.parent)
    return written


@contextlib.contextmanager
def folder_next_to(save: Path) -> Iterator[Path]:
    """A new folder next to `save`, which goes when the block ends unless it was renamed. Abandoned ones go first."""
    save = Path(os.path.realpath(save))
    sweep(save)
    working, descriptor = _locked_folder(save)
    try:
        yield working
    finally:
        os.close(descriptor)  # first, since NFS keeps files that are open, and their folder
        shutil.rmtree(working, ignore_errors=True)


def _locked_folder(save: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock. Should a sweep take it between the two, another is made."""
    while True:
        working = save.with_name(f"{save.name}.{uuid.uuid4().hex[:12]}.tmp")
        working.mkdir(parents=True)
        descriptor = os.open(working / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (working / LOCK).exists():
            return working, descriptor
        os.close(descriptor)


def sweep(save: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the folders that writers of `save` filled when they were killed; which they are. Files and links stay."""
    save = Path(os.path.realpath(save))
    name = re.compile(rf"{re.escape(save.name)}\.[0-9a-f]{{12}}\.tmp")
    others = sorted(path for path in save.parent.glob("*.tmp") if name.fullmatch(path.name))
    return [path for path in others if not path.is_symlink() and _removed(path, dry_run)]


def _removed(folder: Path, dry_run: bool) -> bool:
    """Remove a folder of this user's that no process has locked; whether it is one."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if dry_run:
            return True
        (folder / LOCK).unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
