"""Check the header of a GGUF file in one bounded pass: the file must contain all items that the header lists.

The check is needed because the `gguf` library creates an object for every item that the header lists, even if the file
does not contain the item.
Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

from mega.core.checkpoint.own.pieces import CheckpointError

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a number -> its size in bytes."""

MOST_DIMS = 4
MOST_ITEMS = 1 << 22
"""Maximum number of items in all arrays of a header, and maximum number of tensors. The numbers are limited because the
`gguf` library creates an object for each item. Large vocabularies have a million items."""


def check_header(path: Path) -> None:
    """Check the header of a file. Errors: CheckpointError naming the item that is missing from the file or not
    supported."""
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path}: not a GGUF file that is read: it ends within its header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            HeaderWalk(data).header()
        except ValueError as error:
            raise CheckpointError(f"{path}: not a GGUF file that is read: {error}") from None


class HeaderWalk:
    """A position in a file. The position advances as the header is parsed. Errors: ValueError if the header is
    invalid."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._items = data, 0, 0

    def header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if (version := self._number("<I")) not in VERSIONS:
            raise ValueError(f"version {version & 0xFFFF or version >> 24}, little-endian 2 and 3 are read")
        tensors, keys = self._number("<Q"), self._number("<Q")
        self._announced("metadata", keys, 13)
        self._announced("tensors", tensors, 24)
        for _ in range(keys):
            key = self._string()
            self._value(key, self._number("<I"))
        for _ in range(tensors):
            self._tensor(self._string())

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        (value,) = struct.unpack_from(kind, self._data, self._skip(size))
        return int(value)

    def _skip(self, size: int) -> int:
        """Advance by `size` bytes, and return the previous position."""
        begin, remaining = self._at, len(self._data) - self._at
        if size > remaining:
            raise ValueError(f"it ends within its header ({size} bytes are announced, {remaining} are left)")
        self._at += size
        return begin

    def _string(self) -> str:
        size = self._number("<Q")
        begin = self._skip(size)
        try:
            return self._data[begin : begin + min(size, 200)].decode(errors="ignore" if size > 200 else "strict")
        except UnicodeDecodeError:
            raise ValueError(f"a string at byte {begin} is not UTF-8") from None

    def _announced(self, what: str, count: int, size: int) -> None:
        """Check that `count` items of at least `size` bytes fit between the current position and the end of the
        file."""
        self._items += count
        if count * size > (remaining := len(self._data) - self._at) or self._items > MOST_ITEMS:
            raise ValueError(
                f"{what[:80]}: announces {count} items, {remaining} bytes are left (at most {MOST_ITEMS} items)"
            )

    def _value(self, key: str, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind in SIZES:
            self._skip(SIZES[kind])
        elif kind == ARRAY:
            item, count = self._number("<I"), self._number("<Q")
            self._announced(key, count, 8 if item == STRING else SIZES.get(item, 1))
            if item == STRING:
                for _ in range(count):
                    self._string()
            elif item in SIZES:
                self._skip(count * SIZES[item])
            else:
                raise ValueError(f"{key[:80]}: is an array of type {item}; numbers and strings are read")
        else:
            raise ValueError(f"{key[:80]}: has the type {kind}, which there is not")

    def _tensor(self, name: str) -> None:
        dims = self._number("<I")
        if not 1 <= dims <= MOST_DIMS:
            raise ValueError(f"{name[:80]}: has {dims} dimensions (valid: 1 to {MOST_DIMS})")
        shape = [self._number("<Q") for _ in range(dims)]
        if not 0 < prod(shape) < 1 << 60:
            raise ValueError(f"{name[:80]}: has the shape {tuple(reversed(shape))}")
        self._skip(12)  # the tensor's type and offset
