"""Atomic writes and file locks. A file is written under a temporary name, synced to the disk, and then renamed."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

SEAL = "manifest.json.sha256"
"""Name of a file that every mega checkpoint contains."""

POINTER = "latest"
"""Name of the file, next to a run's checkpoints, that contains the name of the newest checkpoint."""

WHOLE_BYTES, PARTS, PART_BYTES = 1 << 24, 64, 1 << 14
"""A content digest reads files of up to WHOLE_BYTES completely, and reads PARTS blocks of PART_BYTES from each larger
file."""

_URL = re.compile(r"([a-z][a-z0-9+]+):/{1,2}([^/].*)")


def url_of(place: Path | str) -> str | None:
    """Return `place` as a URL, even if a `Path` removed one of its slashes; None for a path in the file system.

    >>> url_of("s3://bucket/run"), url_of(Path("s3://bucket/run")), url_of("runs/first")
    ('s3://bucket/run', 's3://bucket/run', None)
    """
    match = _URL.fullmatch(str(place))
    return f"{match[1]}://{match[2]}" if match else None


def fingerprint(values: Mapping[str, object]) -> str:
    """sha256 of named values, independent of their order, for use as the key of a result that is cached in a file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def sampled_digest(path: Path) -> str:
    """sha256 of a file's size and content; of a large file, only evenly spaced blocks are read.

    The digest distinguishes files quickly, but does not detect every changed byte. Errors: OSError if the file cannot
    be read.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        for number in range(PARTS if size > WHOLE_BYTES else 0):
            file.seek((size - PART_BYTES) * number // (PARTS - 1))
            digest.update(file.read(PART_BYTES))
    return digest.hexdigest()


def check_folder(flag: str, value: object, folder: Path | str) -> None:
    """Check that `folder` is writable or can be created, and that it is not inside a mega checkpoint.

    Another file in a checkpoint would make its verification fail. Errors: ValueError naming flag and value.
    """
    check_spelling(flag, value, str(folder))
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        if existing.is_symlink():
            raise ValueError(
                f"{flag} {value}: {existing} links to {os.readlink(existing)}, which is not there; make it first"
            )
        existing = existing.parent
    _check_outside(flag, value, existing.resolve())
    if not existing.is_dir():
        raise ValueError(f"{flag} {value}: {existing} is not a directory; name another place")
    try:
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError
        # A file system may refuse to write although the permission bits allow it.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f" ({error.strerror})" if error.strerror else ""
        raise ValueError(
            f"{flag} {value}: nothing may be written into {existing}{reason}; name another place"
        ) from None


def check_spelling(flag: str, value: object, folder: str) -> None:
    """Check that a folder is not named by a home directory that no shell has expanded, or by an incomplete URL, for
    which a folder `~` or `s3:` would be created. Errors: ValueError."""
    if folder == "~" or folder.startswith("~/"):
        home = os.path.expanduser(folder)
        rule = "~ is expanded by a shell, at the beginning of a word alone"
        raise ValueError(f"{flag} {value}: {rule}; write {home}, or ./{folder} for such a folder")
    if re.match(r"[A-Za-z][A-Za-z0-9+]+:(/|$)", folder):
        rule = "is not a URL with a name, such as s3://bucket/run"
        raise ValueError(f"{flag} {value}: {'must be a path on this machine' if url_of(folder) else rule}")


def _check_outside(flag: str, value: object, folder: Path) -> None:
    """Check that `folder` is not inside a mega checkpoint."""
    for step in (folder, *folder.parents):
        if (step / SEAL).exists():
            raise ValueError(f"{flag} {value}: {step} is a checkpoint, which holds nothing else; name another place")


def check_save_dir(place: Path) -> None:
    """Check that `--save-dir` can be a folder; a folder in an object store is not checked. Errors: ValueError if it
    cannot be one."""
    if url_of(place) is None:
        check_folder("--save-dir", place, place)


def check_file(flag: str, path: str) -> None:
    """Check that an output file can be written, before the work whose result it stores. Errors: ValueError if it cannot
    be written."""
    target = os.path.realpath(path)  # a link may point to a file that does not exist yet
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise ValueError(f"{flag} {path}: is a directory; must be a file")
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path}: directory {folder} does not exist; create it, or name another file")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise ValueError(f"{flag} {path}: cannot be written by this user; name another file")
    _check_outside(flag, path, Path(folder))


def check_not_input(
    flag: str, value: Path | str, inputs: Iterable[Path | str], outputs: Iterable[Path | str] | None = None
) -> None:
    """Check that no output replaces an input. outputs: the files to write; by default `value` is the only one. Errors:
    ValueError."""
    output_paths = {os.path.realpath(path) for path in ([value] if outputs is None else outputs)}
    for path in inputs:
        if os.path.realpath(path) in output_paths:
            raise ValueError(f"{flag} {value}: would replace the input {path}; name another place, or give other files")


def check_source(flag: str, place: Path | str) -> None:
    """Check that an input path exists, before the libraries that read it are imported. URLs are checked later.

    Errors: ValueError naming flag and path, and a file next to it with a similar name.
    """
    if url_of(place) is not None:
        return
    if not os.path.exists(place):
        path = Path(place)
        if path.is_symlink():
            raise ValueError(f"{flag} {place}: links to {os.readlink(path)}, which is not there")
        with contextlib.suppress(OSError):
            if names := difflib.get_close_matches(path.name, os.listdir(path.parent), n=1):
                raise ValueError(f"{flag} {place}: no such file or directory (nearest: {path.parent / names[0]})")
        raise ValueError(f"{flag} {place}: no such file or directory")
    if os.path.isdir(place) and not os.listdir(place):
        raise ValueError(
            f"{flag} {place}: is empty; must be a run's directory, a step-NNNNNNN in it, or others' weights"
        )


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` when the block succeeds and removed when it fails.

    A device or a pipe, such as /dev/null, is written directly: a rename would replace the device with a plain file.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            name_place(error, path)
        raise
    sync_directory(path.parent)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together, such as a vocabulary and its merges. No file is replaced before all of them
    have been written and synced, so that a full disk leaves all earlier files. Errors: OSError naming a file."""
    with contextlib.ExitStack() as files:
        for path, data in contents.items():
            file = files.enter_context(whole_file(path))
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                name_place(error, path)
                raise


def name_place(error: OSError, path: Path) -> None:
    """Add the file's name to an OSError, because the error of a failed write, such as on a full disk, does not name the
    file."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def sync_directory(directory: Path) -> None:
    """Sync renames inside `directory` to the disk, if its file system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def locked_alone(descriptor: int) -> bool:
    """Acquire an exclusive lock on an open file, held until the file is closed. Return False if another process has the
    lock.

    The lock of a killed process is released. A file system without locks grants the lock to every process.
    """
    import fcntl  # Unix only; subcommands without locks must also run on other systems

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
