"""Arrays that take long to compute and depend on nothing but a key: computed once, then mapped from the disk.

An entry is a directory named by the key's hash. It is written beside its place and renamed, so it is whole or
absent; a lock lets one process of a machine compute while the others wait. Where nothing can be written, the
arrays live in memory. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega.core.files import sync_directory, whole_file

Arrays = dict[str, NDArray[Any]]


def cached(
    directory: Path | None, key: Mapping[str, Any], names: Sequence[str], compute: Callable[[], Arrays]
) -> Arrays:
    """The arrays `names` of `compute()`, from `directory` if they are there, and kept there if they can be.

    key: everything that the arrays depend on, as plain JSON values.
    """
    if directory is None:
        return compute()
    entry = directory / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]
    found = _load(entry, names)
    if found is not None:
        return found
    with contextlib.ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(entry.with_suffix(".lock")))
        except OSError:
            return _load(entry, names) or compute()
        found = _load(entry, names)
        if found is not None:
            return found
        arrays = compute()
        try:
            _publish(entry, key, arrays)
        except OSError as error:
            logging.getLogger("mega").warning("index cache %s: not written (%s)", directory, error)
        return _load(entry, names) or arrays


def _load(entry: Path, names: Sequence[str]) -> Arrays | None:
    """The entry's arrays, mapped; None where one is missing, cut short or no array."""
    try:
        # A plain ndarray over the map: indexing numpy's memmap class costs microseconds.
        return {name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)) for name in names}
    except (OSError, ValueError, EOFError):
        return None


def _publish(entry: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    """Write all files into a directory of their own and rename it to `entry`."""
    unique = uuid.uuid4().hex[:12]
    temporary = entry.with_name(f"{entry.name}.{unique}.tmp")
    temporary.mkdir()
    try:
        for name, array in arrays.items():
            with whole_file(temporary / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        with whole_file(temporary / "key.json") as file:
            file.write(json.dumps(dict(key), indent=1, sort_keys=True).encode())
        if entry.exists():  # broken, or it would have been loaded
            broken = entry.with_name(f"{entry.name}.{unique}.broken")
            os.replace(entry, broken)
            shutil.rmtree(broken, ignore_errors=True)
        os.replace(temporary, entry)
        sync_directory(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine holds `path`; a killed holder's lock dies with it."""
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks: several may compute, one is kept
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
