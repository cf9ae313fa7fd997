"""Files that appear whole or not at all, written next to their path, flushed to the disk, then renamed; and locks."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

SEAL = "manifest.json.sha256"
"""A file that every checkpoint of ours has."""

POINTER = "latest"
"""A file next to our checkpoints, with the newest one's name."""

WHOLE_BYTES, PARTS, PART_BYTES = 1 << 24, 64, 1 << 14
"""Up to which size a digest of content is of all of it, and else of how many parts of how many bytes."""

_URL = re.compile(r"([a-z][a-z0-9+]+):/{1,2}([^/].*)")


def url_of(place: Path | str) -> str | None:
    """The URL that a place is, also where a `Path` took one of its slashes; None for a place in the file system.

    >>> url_of("s3://bucket/run"), url_of(Path("s3://bucket/run")), url_of("runs/first")
    ('s3://bucket/run', 's3://bucket/run', None)
    """
    found = _URL.fullmatch(str(place))
    return f"{found[1]}://{found[2]}" if found else None


def fingerprint(about: Mapping[str, object]) -> str:
    """sha256 of values by name, in whatever order: of what decides an answer that is kept in a file."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def sampled_digest(path: Path) -> str:
    """sha256 of a file's size and content. Of a large one, of parts from its first byte to its last: it tells another
    file in a moment, though not every other byte. Errors: OSError."""
    size = path.stat().st_size
    found = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES:
            found.update(file.read())
        for number in range(PARTS if size > WHOLE_BYTES else 0):
            file.seek((size - PART_BYTES) * number // (PARTS - 1))
            found.update(file.read(PART_BYTES))
    return found.hexdigest()


def check_folder(flag: str, value: object, folder: Path | str) -> None:
    """See that files can be put into `folder`, or that it can be made. A checkpoint of ours would not verify any more.

    Errors: ValueError naming flag and value.
    """
    above = Path(folder).absolute()
    while not above.exists() and above != above.parent:
        if above.is_symlink():
            raise ValueError(
                f"{flag} {value}: {above} links to {os.readlink(above)}, which is not there; make it first"
            )
        above = above.parent
    _check_outside(flag, value, above.resolve())
    if not above.is_dir():
        raise ValueError(f"{flag} {value}: {above} is not a directory; name another place")
    try:
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError
        tempfile.TemporaryFile(dir=above).close()  # what the rights of a folder do not say: a file system's own rules
    except OSError as error:
        why = f" ({error.strerror})" if error.strerror else ""
        raise ValueError(f"{flag} {value}: nothing may be written into {above}{why}; name another place") from None


def _check_outside(flag: str, value: object, folder: Path) -> None:
    for step in (folder, *folder.parents):
        if (step / SEAL).exists():
            raise ValueError(f"{flag} {value}: {step} is a checkpoint, which holds nothing else; name another place")


def check_save_dir(place: Path) -> None:
    """See that `--save-dir`, which may be in an object store, can be a folder. Errors: ValueError."""
    if url_of(place) is None:
        check_folder("--save-dir", place, place)


def check_file(flag: str, path: str) -> None:
    """A file that is asked for must not turn out to be impossible when the work is done. Errors: ValueError."""
    place = os.path.realpath(path)  # a link may lead to a file that is still to be made
    folder = os.path.dirname(place)
    if os.path.isdir(place):
        raise ValueError(f"{flag} {path}: is a directory; must be a file")
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path}: directory {folder} does not exist; create it, or name another file")
    if not os.access(place if os.path.exists(place) else folder, os.W_OK):
        raise ValueError(f"{flag} {path}: cannot be written by this user; name another file")
    _check_outside(flag, path, Path(folder))


def check_source(flag: str, place: Path | str) -> None:
    """See that there is something to read at a path, before what reads it is loaded; a URL is tried later.

    Errors: ValueError naming flag and path, and what lies next to it under a near name.
    """
    if url_of(place) is not None:
        return
    if not os.path.exists(place):
        path = Path(place)
        with contextlib.suppress(OSError):
            if near := difflib.get_close_matches(path.name, os.listdir(path.parent), n=1):
                raise ValueError(f"{flag} {place}: no such file or directory (nearest: {path.parent / near[0]})")
        raise ValueError(f"{flag} {place}: no such file or directory")
    if os.path.isdir(place) and not os.listdir(place):
        raise ValueError(
            f"{flag} {place}: is empty; must be a run's directory, a step-NNNNNNN in it, or others' weights"
        )


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends well and vanishes when it does not.

    A device or a pipe, such as /dev/null, is written to as it is: a rename would put a plain file in its place.
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


def name_place(error: OSError, path: Path) -> None:
    """Give an error of the machine the file that it is about: a failed write, as on a full disk, does not name it."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` survive a power cut, where its file system allows that."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def locked_alone(descriptor: int) -> bool:
    """Lock what is open for this process alone, until it is closed; False where another has it.

    A killed holder's lock dies with it. A file system without locks admits every process.
    """
    import fcntl  # Unix has it alone, and who only asks for an estimate needs none

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
