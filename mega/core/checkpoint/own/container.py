"""One rank's file: a safetensors container written by us, so that bytes are hashed on their way to the disk.

The layout is safetensors' own: 8 bytes of header length (little endian), a JSON header, raw row-major
bytes without holes. Any safetensors reader opens it; its `__metadata__` says which rectangle of which
logical tensor every entry is, so that a file explains itself without its manifest. Memory: one block a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from pathlib import Path

import torch

from mega.core.checkpoint.own.disk import BLOCK, creating, opening, read_into, side_by_side, write_all
from mega.core.checkpoint.own.pieces import FOREIGN_DTYPES, NAMES, Box, CheckpointError, Piece

SMALL_ROW = 16 << 10
"""Stored rows of fewer bytes are read whole and cut in memory: a call a row would cost more."""

Fetch = Callable[[Piece, Box], torch.Tensor]
"""Gives a rectangle of a piece whose tensor has no memory (a meta tensor), about a block of it just before it is
written. The rectangle counts from the logical tensor's corner. Blocks of one piece come in order and from one thread,
those of several pieces side by side."""


def has_memory(piece: Piece, box: Box) -> torch.Tensor:
    """The `Fetch` of pieces that bring their elements with them."""
    return piece.tensor[box.inside(piece.box)]


@dataclass(frozen=True)
class Entry:
    """One stored rectangle: the logical tensor it belongs to, its bytes' place in a file, their sha256."""

    key: str
    dtype: str
    whole: tuple[int, ...]
    box: Box
    offset: int
    digest: str

    @property
    def bytes(self) -> int:
        return self.box.elements * FOREIGN_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Container:
    """What a written file is known by: its size, its header's length and sha256, its entries in order."""

    size: int
    header: int
    digest: str
    entries: tuple[Entry, ...]


def write_container(
    path: Path, pieces: Sequence[Piece], about: dict[str, object] | None, fetch: Fetch = has_memory
) -> Container:
    """Write `pieces` (none empty) as one safetensors file; it is on the disk when this returns.

    about: plain values to put along with the rectangles in the file's own description; None describes nothing
        and says only, as other tools want it, that the tensors are torch's.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # so that every entry is aligned
    names = _entry_names(ordered)
    header = _header(names, ordered, about)
    *offsets, size = accumulate((piece.bytes for piece in ordered), initial=len(header))
    with creating(path) as descriptor:
        write_all(descriptor, header)

        def write(job: tuple[Piece, int]) -> Entry:
            piece, offset = job
            digest = _write_entry(descriptor, piece, offset, fetch)
            return Entry(piece.key, NAMES[piece.tensor.dtype], piece.whole, piece.box, offset, digest)

        entries = side_by_side(write, list(zip(ordered, offsets, strict=True)), size)
    return Container(size, len(header), hashlib.sha256(header).hexdigest(), tuple(entries))


def _write_entry(descriptor: int, piece: Piece, offset: int, fetch: Fetch) -> str:
    """Write one rectangle's bytes at `offset`, hashed before; their sha256."""
    digest = hashlib.sha256()
    for box in blocks(piece.box, piece.tensor.element_size()):
        tensor = fetch(piece, box)
        assert (tuple(tensor.shape), tensor.dtype) == (box.size, piece.tensor.dtype), piece.key
        block = _memory(tensor.detach().cpu().contiguous())
        digest.update(block)
        write_all(descriptor, block, offset)
        offset += block.nbytes
    return digest.hexdigest()


def _entry_names(pieces: Sequence[Piece]) -> list[str]:
    """A key's only rectangle has the key's name; several are `key@0`, `key@1`, ..."""
    total, seen = Counter(piece.key for piece in pieces), Counter[str]()
    names = []
    for piece in pieces:
        names.append(piece.key if total[piece.key] == 1 else f"{piece.key}@{seen[piece.key]}")
        seen[piece.key] += 1
    return names


def _header(names: Sequence[str], pieces: Sequence[Piece], about: dict[str, object] | None) -> bytes:
    """The length and the JSON header, padded so that the first entry is aligned to 8 bytes."""
    metadata = {"format": "pt"}
    if about is not None:
        rectangles = {
            name: {"key": piece.key, "whole": piece.whole, "start": piece.start}
            for name, piece in zip(names, pieces, strict=True)
        }
        metadata["mega"] = json.dumps({**about, "pieces": rectangles}, separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, piece in zip(names, pieces, strict=True):
        end = begin + piece.bytes
        header[name] = {
            "dtype": NAMES[piece.tensor.dtype],
            "shape": list(piece.size),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def blocks(box: Box, item: int) -> Iterator[Box]:
    """A rectangle cut into runs of at most about a block of bytes, in row-major order. item: bytes of an element.

    A single row longer than a block is cut further, so that nothing larger than a block is ever copied.
    """
    if box.elements * item <= BLOCK:
        yield box
        return
    dim = next(number for number, size in enumerate(box.size) if size > 1)
    rows = max(1, BLOCK * box.size[dim] // (box.elements * item))
    for begin in range(0, box.size[dim], rows):
        start, size = list(box.start), list(box.size)
        start[dim] += begin
        size[dim] = min(rows, box.size[dim] - begin)
        yield from blocks(Box(tuple(start), tuple(size)), item)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU. One element counts as contiguous, whatever its strides say."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def read_box(path: Path, descriptor: int, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Fill `target` (shape of `box`) with the rectangle `box` of the stored `entry`, which contains it.

    Reads runs of bytes, not the entry; rows are taken a block at a time. Values are converted if the
    target's dtype differs.
    """
    if not box.size:
        _read_rows(path, descriptor, entry, Box((), ()), target)
        return
    row = prod(box.size[1:]) * FOREIGN_DTYPES[entry.dtype].itemsize
    rows = max(1, BLOCK // row)
    for begin in range(0, box.size[0], rows):
        count = min(rows, box.size[0] - begin)
        part = Box((box.start[0] + begin, *box.start[1:]), (count, *box.size[1:]))
        _read_rows(path, descriptor, entry, part, target[begin : begin + count])


def _read_rows(path: Path, descriptor: int, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """`read_box` for rows that fit a block: straight into the target, or through a buffer where needed."""
    dtype = FOREIGN_DTYPES[entry.dtype]
    row = prod(entry.box.size[1:]) * dtype.itemsize
    if row < SMALL_ROW and box.size[1:] != entry.box.size[1:]:
        rows = max(1, BLOCK // row)
        for begin in range(0, box.size[0], rows):
            count = min(rows, box.size[0] - begin)
            part = Box((box.start[0] + begin, *box.start[1:]), (count, *box.size[1:]))
            whole_rows = Box((part.start[0], *entry.box.start[1:]), (count, *entry.box.size[1:]))
            buffer = torch.empty(whole_rows.size, dtype=dtype)
            _read_runs(path, descriptor, entry, whole_rows, buffer)
            target[begin : begin + count].copy_(buffer[part.inside(whole_rows)])
    elif target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype:
        _read_runs(path, descriptor, entry, box, target.detach())
    else:
        buffer = torch.empty(box.size, dtype=dtype)
        _read_runs(path, descriptor, entry, box, buffer)
        target.copy_(buffer)


def _run_shape(stored: Box, box: Box) -> tuple[int, ...]:
    """The shape of the longest run of `box` that is contiguous in the memory of `stored`.

    >>> _run_shape(Box((0, 0, 0), (4, 5, 6)), Box((1, 2, 0), (2, 3, 6)))
    (3, 6)
    """
    dims = len(box.size)
    first = dims
    while first > 0 and (first == dims or box.size[first] == stored.size[first]):
        first -= 1
    return box.size[first:]


def _read_runs(path: Path, descriptor: int, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Fill the memory of `target` (contiguous, the entry's dtype, on the CPU) with the rectangle `box`."""
    view = _memory(target)
    item = FOREIGN_DTYPES[entry.dtype].itemsize
    run_shape = _run_shape(entry.box, box)
    run = prod(run_shape) * item
    strides = [prod(entry.box.size[dim + 1 :]) * item for dim in range(len(box.size))]
    corner = [a - b for a, b in zip(box.start, entry.box.start, strict=True)]
    base = entry.offset + sum(place * stride for place, stride in zip(corner, strides, strict=True))
    outer = box.size[: len(box.size) - len(run_shape)]
    for number, index in enumerate(product(*map(range, outer))):
        place = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        read_into(descriptor, view[number * run : (number + 1) * run], place, path)


def check_bytes(path: Path, descriptor: int, begin: int, length: int, digest: str, what: str) -> None:
    """Hash a run of a file. Errors: CheckpointError naming the file and `what` lies there."""
    found = hashlib.sha256()
    buffer = bytearray(min(BLOCK, length))
    for offset in range(begin, begin + length, BLOCK):
        view = memoryview(buffer)[: min(BLOCK, begin + length - offset)]
        read_into(descriptor, view, offset, path)
        found.update(view)
    if found.hexdigest() != digest:
        raise CheckpointError(f"{path}: the bytes of {what} are not those that were saved (sha256 differs)")


def file_digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a regular file."""
    found = hashlib.sha256()
    with opening(path) as (descriptor, size):
        while block := os.read(descriptor, BLOCK):
            found.update(block)
    return size, found.hexdigest()
