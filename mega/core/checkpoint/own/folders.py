"""Exported folders, which appear under their final name complete or not at all, and the leftovers of killed writers.

A folder is filled next to its final path, as `NAME.<12 hexadecimal digits>.tmp`, under a lock that the operating system
releases when its writer ends. The next writer of the same name, or `mega checkpoint clean NAME`, can therefore
distinguish abandoned folders from folders that are still being filled. The lock is on a file inside the folder, because
NFS does not share locks of directories between machines. Without that file, or on a file system without locks, nothing
is removed. This module does not depend on the contents of folders.
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
"""The file in a folder that the folder's writer keeps locked; the writer deletes this file before renaming the
folder."""


def check_fresh(save: Path) -> None:
    """Errors: ValueError if no new folder can be written at `save`."""
    if (url := url_of(save)) is not None:
        raise ValueError(f"--save-dir {url}: only mega checkpoints can be written to an object store; give a folder")
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise ValueError(f"{save}: exists and is not an empty folder")


def filled_folder(save: Path, fill: Callable[[Path], int], size: int) -> int:
    """Fill a folder next to `save`, then rename it to `save`; return what `fill` returns. A failure leaves nothing.

    size: number of bytes that `fill` will write, for the message about a full disk.
    """
    check_fresh(save)
    save = Path(os.path.realpath(save))  # resolve "." and links: the target is renamed, not the link
    try:
        with folder_next_to(save) as working:
            result = fill(working)
            (working / LOCK).unlink()
            sync_directory(working)
            working.rename(save)  # replaces an empty folder of that name
    except OSError as error:
        free = f"; {shutil.disk_usage(save.parent).free} bytes are free" if save.parent.exists() else ""
        raise OSError(f"{save}: was not written: {error.strerror or error} ({size} bytes to write){free}") from error
    sync_directory(save.parent)
    return result


@contextlib.contextmanager
def folder_next_to(save: Path) -> Iterator[Path]:
    """A new folder next to `save`, deleted when the block ends unless it was renamed. Abandoned folders are removed
    first."""
    save = Path(os.path.realpath(save))
    sweep(save)
    working, descriptor = _locked_folder(save)
    try:
        yield working
    finally:
        os.close(descriptor)  # before deletion, because NFS keeps open files and therefore their folder
        shutil.rmtree(working, ignore_errors=True)


def _locked_folder(save: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock. Retries if a sweep removes the folder before it is
    locked."""
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
    """Remove the folders that killed writers of `save` left, and return them. Files and links are not touched."""
    save = Path(os.path.realpath(save))
    name = re.compile(rf"{re.escape(save.name)}\.[0-9a-f]{{12}}\.tmp")
    candidates = sorted(path for path in save.parent.glob("*.tmp") if name.fullmatch(path.name))
    return [path for path in candidates if not path.is_symlink() and _removed(path, dry_run)]


def _removed(folder: Path, dry_run: bool) -> bool:
    """Remove a folder of this user that no process has locked; return whether it was such a folder."""
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
