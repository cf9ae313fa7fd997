"""Read files as memory maps, or read arrays in files without a memory map.

This module does not interpret the bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_SMALL = 1 << 16


def mapped(path: Path) -> mmap.mmap | bytes:
    """Return a file as a memory map. Small files are read immediately instead, because a map keeps a file descriptor.

    Raises ValueError naming the file if it cannot be read.
    """
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size <= _SMALL:
            return file.read()
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno == errno.EMFILE and _more_descriptors():
                return mapped(path)
            raise ValueError(f"{path}: cannot be mapped ({error.strerror}); see ulimit -n") from None


def whole(path: Path) -> bytes:
    """Return the content of a file. Raises ValueError naming the file if the file cannot be read."""
    with _opened(path) as file:
        return file.read()


class Unmapped:
    """An array in a file. `array[first:last]` reads items from the file.

    Used for file systems on which memory maps are slow, or on which reading a mapped file raises a signal after the
    file was truncated.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        self._path, self._dtype, self._file = path, dtype, _opened(path)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> NDArray[np.integer]:
        """Read items. Raises ValueError naming the file if the file was truncated."""
        first, last, _ = span.indices(self._length)
        width = self._dtype.itemsize
        data = os.pread(self._file.fileno(), max(last - first, 0) * width, first * width)
        if len(data) < (last - first) * width:
            raise ValueError(f"{self._path}: has become shorter since it was opened")
        return np.frombuffer(data, self._dtype)


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        if error.errno == errno.EMFILE and _more_descriptors():
            return _opened(path)
        raise ValueError(f"{path}: cannot be opened ({error.strerror})") from None


def _more_descriptors() -> bool:
    """Raise this process's soft limit on open files to the hard limit. Return False if the soft limit already equals
    the hard limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == hard_limit:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return True
