"""Read and write one rank's file, which is a safetensors container. This module does not use the safetensors library,
because it must hash bytes before writing them.

The safetensors format is 8 bytes of header length (little endian), a JSON header, and raw row-major bytes without gaps.
Any safetensors reader can open the file. The header's `__metadata__` records which rectangle of which logical tensor
each entry contains, so the file can be interpreted without the manifest. Each thread needs memory for one block.
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

from mega.core.checkpoint.own.disk import BLOCK, new_file, open_file, read_into, run_concurrently, write_all
from mega.core.checkpoint.own.pieces import FOREIGN_DTYPES, FOREIGN_NAMES, Box, CheckpointError, Piece

SMALL_ROW = 16 << 10
"""Rows with fewer stored bytes than this are read whole and sliced in memory, because one read call per row would take
longer."""

Fetch = Callable[[Piece, Box], torch.Tensor]
"""Function that takes a piece and the box of one block of the piece, in coordinates of the logical tensor, and returns
the block. The function is called just before the block is written. It can supply the values of a piece whose tensor is
a meta tensor. One thread requests the blocks of a piece in order; blocks of different pieces are requested
concurrently."""


def has_memory(piece: Piece, box: Box) -> torch.Tensor:
    """The default `Fetch`, for pieces whose tensors are not meta tensors."""
    return piece.tensor[box.inside(piece.box)]


@dataclass(frozen=True)
class Entry:
    """One stored rectangle of a logical tensor."""

    key: str
    """The logical tensor's name in the checkpoint."""
    dtype: str
    """The safetensors name of the dtype."""
    whole: tuple[int, ...]
    """The logical tensor's shape."""
    box: Box
    """The stored rectangle, in coordinates of the logical tensor."""
    offset: int
    """The position of the rectangle's first byte in the file."""
    digest: str
    """The sha256 of the rectangle's bytes."""

    @property
    def bytes(self) -> int:
        return self.box.elements * FOREIGN_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Container:
    """Description of a container file that was written."""

    size: int
    """Number of bytes of the whole file."""
    header: int
    """Number of bytes of the length field and the JSON header."""
    digest: str
    """The sha256 of the length field and the JSON header."""
    entries: tuple[Entry, ...]
    """The stored rectangles, in the order of their bytes."""


def write_container(
    path: Path, pieces: Sequence[Piece], description: dict[str, object] | None, fetch: Fetch = has_memory
) -> Container:
    """Write `pieces` as one safetensors file, and sync the file to disk. Each piece must have at least one element.

    description: plain values to store in `__metadata__` together with the list of rectangles. If None, `__metadata__`
    contains only `"format": "pt"`, which other tools expect.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # aligns every entry
    names = _entry_names(ordered)
    header = _header(names, ordered, description)
    *offsets, size = accumulate((piece.bytes for piece in ordered), initial=len(header))
    with new_file(path) as descriptor:
        write_all(descriptor, header)

        def write(job: tuple[Piece, int]) -> Entry:
            piece, offset = job
            digest = _write_entry(descriptor, piece, offset, fetch)
            return Entry(piece.key, FOREIGN_NAMES[piece.tensor.dtype], piece.whole, piece.box, offset, digest)

        entries = run_concurrently(write, list(zip(ordered, offsets, strict=True)), size)
    return Container(size, len(header), hashlib.sha256(header).hexdigest(), tuple(entries))


def _write_entry(descriptor: int, piece: Piece, offset: int, fetch: Fetch) -> str:
    """Write one rectangle's bytes at `offset` and return their sha256. Each block is hashed before it is written."""
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
    """Return the names of the entries. A single rectangle of a key is named `key`; several rectangles of a key are
    named `key@0`, `key@1`, ..."""
    total, used = Counter(piece.key for piece in pieces), Counter[str]()
    names = []
    for piece in pieces:
        names.append(piece.key if total[piece.key] == 1 else f"{piece.key}@{used[piece.key]}")
        used[piece.key] += 1
    return names


def _header(names: Sequence[str], pieces: Sequence[Piece], description: dict[str, object] | None) -> bytes:
    """Return the length field and the JSON header, padded so that the first entry is aligned to 8 bytes."""
    metadata = {"format": "pt"}
    if description is not None:
        rectangles = {
            name: {"key": piece.key, "whole": piece.whole, "start": piece.start}
            for name, piece in zip(names, pieces, strict=True)
        }
        metadata["mega"] = json.dumps({**description, "pieces": rectangles}, separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, piece in zip(names, pieces, strict=True):
        end = begin + piece.bytes
        header[name] = {
            "dtype": FOREIGN_NAMES[piece.tensor.dtype],
            "shape": list(piece.size),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def blocks(box: Box, item: int) -> Iterator[Box]:
    """Split a rectangle into blocks of at most about `BLOCK` bytes, in row-major order. item: size of an element in
    bytes.

    A row that is longer than a block is split too, so that no copy is larger than a block.
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
    """Return the bytes of a contiguous CPU tensor. The strides are set to (1,), because a tensor with one element is
    contiguous for any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def read_box(path: Path, descriptor: int, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Fill `target`, which has the shape of `box`, with the rectangle `box` of the stored `entry`. The entry must
    contain `box`.

    Rows are read in blocks. Only the bytes inside `box` are read from long rows. Values are converted if the target's
    dtype differs.
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
    """Read the rectangle `box`, whose rows fit into one block, into `target`. The bytes are read directly into the
    target if possible, otherwise through a buffer.

    stored entry [4, 6]      `box`        row shorter than SMALL_ROW: read whole rows, slice in memory
    . . . . . .
    . . x x x .              [2, 3]       long rows: one read for each contiguous run
    . . x x x .
    . . . . . .
    """
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
    """Return the shape of the longest runs of `box` that are contiguous in the memory of `stored`.

    >>> _run_shape(Box((0, 0, 0), (4, 5, 6)), Box((1, 2, 0), (2, 3, 6)))
    (3, 6)
    """
    dims = len(box.size)
    first = dims
    while first > 0 and (first == dims or box.size[first] == stored.size[first]):
        first -= 1
    return box.size[first:]


def _read_runs(path: Path, descriptor: int, entry: Entry, box: Box, target: torch.Tensor) -> None:
    """Fill `target`, a contiguous CPU tensor of the entry's dtype, with the rectangle `box` of the stored entry."""
    view = _memory(target)
    item = FOREIGN_DTYPES[entry.dtype].itemsize
    run_shape = _run_shape(entry.box, box)
    run = prod(run_shape) * item
    strides = [prod(entry.box.size[dim + 1 :]) * item for dim in range(len(box.size))]
    corner = [a - b for a, b in zip(box.start, entry.box.start, strict=True)]
    base = entry.offset + sum(offset * stride for offset, stride in zip(corner, strides, strict=True))
    outer = box.size[: len(box.size) - len(run_shape)]
    for number, index in enumerate(product(*map(range, outer))):
        offset = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        read_into(descriptor, view[number * run : (number + 1) * run], offset, path)


def check_bytes(path: Path, descriptor: int, begin: int, length: int, digest: str, what: str) -> None:
    """Hash `length` bytes of a file and compare the hash with `digest`. what: name of the checked bytes in errors.
    Errors: CheckpointError naming the file and `what`."""
    actual = hashlib.sha256()
    buffer = bytearray(min(BLOCK, length))
    for offset in range(begin, begin + length, BLOCK):
        view = memoryview(buffer)[: min(BLOCK, begin + length - offset)]
        read_into(descriptor, view, offset, path)
        actual.update(view)
    if actual.hexdigest() != digest:
        raise CheckpointError(f"{path}: the bytes of {what} are not those that were saved (sha256 differs)")


def file_digest(path: Path) -> tuple[int, str]:
    """Return the size and the sha256 of a regular file."""
    hasher = hashlib.sha256()
    with open_file(path) as (descriptor, size):
        while block := os.read(descriptor, BLOCK):
            hasher.update(block)
    return size, hasher.hexdigest()
