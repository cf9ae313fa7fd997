"""Files as bytes in memory's address space, and files that are read piece by piece where that is not wanted.

It knows nothing of what the bytes mean.
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
    """The whole file, read as it is touched. A small one is read at once: a map holds a file descriptor.

    Raises ValueError naming the file where it cannot be had.
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
    """The whole file, read now. Raises ValueError naming it where it cannot be had."""
    with _opened(path) as file:
        return file.read()


class Unmapped:
    """An array in a file of which `array[first:last]` is read when it is asked for.

    For file systems whose maps are slow, or fail with a signal where a file has been cut meanwhile.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        self._path, self._dtype, self._file = path, dtype, _opened(path)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Raises ValueError naming the file where it has become shorter."""
        first, last, _ = wanted.indices(self._length)
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
    """Raise this process's own limit of open files to the hard one; False where it is there already."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == most:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return True
