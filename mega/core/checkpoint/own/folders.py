"""Write exported folders atomically, so that a folder appears under its final name only when it is complete, and remove
the incomplete folders of killed writers.

A folder is filled next to its final path, as `NAME.<12 hexadecimal digits>.tmp`, under a lock that the operating system
releases when its writer ends. The next writer of the same name, or `mega checkpoint clean NAME`, can therefore
distinguish abandoned folders from folders that are still being filled. The lock is on a file inside the folder, because
NFS does not share directory locks between machines. Folders without the lock file, and all folders on a file system
without locks, are never removed. This module does not depend on the contents of folders.
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
"""Name of the lock file in a folder that is being filled. The writer deletes this file before it renames the folder."""


def check_fresh(save: Path) -> None:
    """Check that a new folder can be written at `save`. Errors: ValueError with the reason if the folder cannot be
    written."""
    if (url := url_of(save)) is not None:
        raise ValueError(f"--save-dir {url}: only mega checkpoints can be written to an object store; give a folder")
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise ValueError(f"{save}: exists and is not an empty folder")


def filled_folder(save: Path, fill: Callable[[Path], int], size: int) -> int:
    """Fill a folder next to `save`, then rename it to `save`. Return the result of `fill`. After a failure, the folder
    is removed.

    size: number of bytes that `fill` will write, for the message about a full disk.
    """
    check_fresh(save)
    save = Path(os.path.realpath(save))  # resolves "." and links, so that a link's target is replaced, not the link
    try:
        with folder_next_to(save) as working:
            result = fill(working)
            (working / LOCK).unlink()
            sync_directory(working)
            working.rename(save)  # an empty folder of the same name is replaced
    except OSError as error:
        free = f"; {shutil.disk_usage(save.parent).free} bytes are free" if save.parent.exists() else ""
        raise OSError(f"{save}: was not written: {error.strerror or error} ({size} bytes to write){free}") from error
    sync_directory(save.parent)
    return result


@contextlib.contextmanager
def folder_next_to(save: Path) -> Iterator[Path]:
    """Yield a new folder next to `save`. The new folder is deleted at the end of the `with` block unless it was
    renamed. Abandoned folders are removed first."""
    save = Path(os.path.realpath(save))
    sweep(save)
    working, descriptor = _locked_folder(save)
    try:
        yield working
    finally:
        os.close(descriptor)  # closed before deletion, because NFS keeps open files and their folder
        shutil.rmtree(working, ignore_errors=True)


def _locked_folder(save: Path) -> tuple[Path, int]:
    """Return (a new folder, the descriptor that holds its lock). If another process removes the folder as abandoned
    before it is locked, the function retries."""
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
    """Remove the unfinished folders of killed writers of `save`, and return the paths of these folders. Files and links
    are not removed."""
    save = Path(os.path.realpath(save))
    name = re.compile(rf"{re.escape(save.name)}\.[0-9a-f]{{12}}\.tmp")
    candidates = sorted(path for path in save.parent.glob("*.tmp") if name.fullmatch(path.name))
    return [path for path in candidates if not path.is_symlink() and _removed(path, dry_run)]


def _removed(folder: Path, dry_run: bool) -> bool:
    """Remove a folder if this user owns it and no process has locked it. Return whether both conditions are met."""
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
