"""Cache arrays that are expensive to compute and depend only on a key. Cached arrays are memory-mapped.

An entry is one safetensors file, named by the hash of its key. The file contains the 8-byte length of a JSON header,
then the header with the key and the offsets of the arrays, then the arrays. The file is written under a temporary name
and then renamed, so that it is either complete or absent. A lock ensures that only one process per machine computes the
arrays, while other processes wait. If the folder is not writable, the arrays stay in memory. No pickles are loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega.core.data.mapped import mapped
from mega.core.files import whole_file
from mega.core.untrusted import Json

Arrays = dict[str, NDArray[Any]]

_NAMES = {"b1": "BOOL", "i2": "I16", "i4": "I32", "i8": "I64", "u2": "U16", "u4": "U32", "u8": "U64"}
_DTYPES = {name: np.dtype(f"<{code}") for code, name in _NAMES.items()}
_BLOCK = 1 << 24


def cached(
    directory: Path | None, key: Mapping[str, object], names: Sequence[str], compute: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays `names` of `compute()`. Cached arrays are read from `directory`. Other arrays are computed and,
    if possible, written to `directory`.

    key: all values on which the arrays depend, in JSON types.
    """
    if directory is None:
        return compute()
    encoded_key = json.dumps(key, sort_keys=True)
    entry = directory / f"{hashlib.sha256(encoded_key.encode()).hexdigest()[:40]}.safetensors"
    cached_arrays = _load(entry, encoded_key, names)
    if cached_arrays is not None:
        return cached_arrays
    with contextlib.ExitStack() as resources:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            resources.enter_context(_locked(entry.with_suffix(".lock")))
        except OSError:
            return _load(entry, encoded_key, names) or compute()
        # Another process may have written the entry while this process waited for the lock.
        cached_arrays = _load(entry, encoded_key, names)
        if cached_arrays is not None:
            return cached_arrays
        arrays = compute()
        try:
            _sweep(entry)
            _publish(entry, encoded_key, arrays)
        except OSError as error:
            logging.getLogger("mega").warning("index cache %s: not written (%s)", directory, error)
        return _load(entry, encoded_key, names) or arrays


def _load(entry: Path, key: str, names: Sequence[str]) -> Arrays | None:
    """Return the entry's arrays, memory-mapped; None if the file is missing, truncated or damaged, or has a different
    key."""
    try:
        stored = mapped(entry)
        begin = 8 + int.from_bytes(stored[:8], "little")
        header = json.loads(stored[8:begin])
        if header["__metadata__"]["key"] != key:
            return None
        arrays = {}
        for name in names:
            dtype, shape = _DTYPES[header[name]["dtype"]], header[name]["shape"]
            first, last = header[name]["data_offsets"]
            if not 0 <= first <= last <= len(stored) - begin or last - first != math.prod(shape) * dtype.itemsize:
                return None
            arrays[name] = np.frombuffer(stored, dtype, math.prod(shape), begin + first).reshape(shape)
        return arrays
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _publish(entry: Path, key: str, arrays: Arrays) -> None:
    """Write all arrays atomically into one file. Arrays with the widest dtype come first, so that every array is
    aligned."""
    header: dict[str, Json] = {"__metadata__": {"format": "np", "key": key}}
    in_order = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, array in in_order:
        begin, end = end, end + array.nbytes
        dtype = _NAMES[array.dtype.str[1:]]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the arrays begin at a multiple of 8
    with whole_file(entry) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, array in in_order:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for first in range(0, len(data), _BLOCK):
                file.write(data[first : first + _BLOCK].data)


def _sweep(entry: Path) -> None:
    """Remove temporary files of this entry that killed processes left behind. Call this with the entry's lock held."""
    for stale in entry.parent.glob(f"{entry.name}.*.tmp"):
        stale.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among the processes of this machine. The operating system releases the lock if
    the process dies."""
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):  # without file locks, several processes may compute; the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
