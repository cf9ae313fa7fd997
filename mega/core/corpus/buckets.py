"""Groups near duplicates, given the band keys of all documents. Only one number per document is held in memory; all
other data is on disk.

    1 pairs_of_bands     band keys are distributed over files by value and sorted; documents with equal keys form a
                         bucket; the pairs of all buckets are then distributed and sorted, and repeated pairs removed
    2 (near_duplicates)  the shingles of the paired documents are written, in the order of the documents
    3 groups             documents that overlap enough are grouped, and the first document of a group is kept

This module does not depend on texts or signatures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

_ROWS_TOGETHER = 1 << 21
_MOST_FILES = 512
_MOST_PAIRWISE = 64
"""Maximum number of documents in a bucket that are compared pairwise. Each further document is compared only with the
first and the preceding document of the bucket, so the number of comparisons is not quadratic for large buckets."""


class Distributed:
    """A table with two numbers per row. Each row also has an owner number, which determines the file that stores the
    row. A file is sorted when it is read."""

    def __init__(self, folder: Path, name: str, expected: int) -> None:
        count = min(max(1, -(-expected // _ROWS_TOGETHER)), _MOST_FILES)
        self._paths = [folder / f"{name}-{i}.tmp" for i in range(count)]
        self._stack = contextlib.ExitStack()
        self._files = [self._stack.enter_context(open(path, "wb")) for path in self._paths]  # noqa: SIM115

    def add(self, owners: Numbers, rows: Numbers) -> None:
        """Write rows [n, 2]. Rows with equal owners go to the same file."""
        file_numbers = owners % np.uint64(len(self._files))
        if len(self._files) == 1:
            self._files[0].write(rows.tobytes())
            return
        order = np.argsort(file_numbers, kind="stable")
        rows, bounds = rows[order], np.searchsorted(file_numbers[order], np.arange(len(self._files) + 1))
        for i, file in enumerate(self._files):
            file.write(rows[bounds[i] : bounds[i + 1]].tobytes())

    def sorted(self) -> Iterator[Numbers]:
        """Yield the rows of each file, sorted by the first and then by the second number, and delete the file
        afterwards."""
        self._stack.close()
        for path in self._paths:
            rows = np.fromfile(path, np.uint64).reshape(-1, 2)
            yield rows[np.lexsort((rows[:, 1], rows[:, 0]))]
            path.unlink()


def pairs_of_bands(folder: Path, bands: Iterator[tuple[int, NDArray[np.uint64]]], documents: int, count: int) -> int:
    """Write `pairs.bin`, which contains the candidate pairs as sorted, distinct rows of two document indices. Returns
    the number of pairs.

    bands: for each block of documents, the index of the block's first document, and the keys [documents in the block,
    count]. NO_KEY marks a missing key.
    """
    keyed = Distributed(folder, "bands", documents * count)
    for first, keys in bands:
        numbers = np.arange(first, first + len(keys), dtype=np.uint64)
        for band in range(count):
            present = keys[:, band] != NO_KEY
            band_keys = keys[present, band]
            keyed.add(band_keys, np.column_stack([band_keys, numbers[present]]))
    pairs = Distributed(folder, "pairs", documents)
    for rows in keyed.sorted():
        for pair_rows in _pairs(rows):
            pairs.add(pair_rows[:, 0] // np.uint64(_ROWS_TOGETHER // 8), pair_rows)
    total = 0
    with open(folder / "pairs.bin.part", "wb") as file:
        for rows in pairs.sorted():
            different = np.ones(len(rows), np.bool_)
            different[1:] = (rows[1:] != rows[:-1]).any(1)
            file.write(rows[different].tobytes())
            total += int(different.sum())
    os.replace(folder / "pairs.bin.part", folder / "pairs.bin")
    return total


NO_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Placeholder for the key of a document that has no key for a band."""


def _pairs(rows: Numbers) -> Iterator[Numbers]:
    """Yield the candidate pairs of all buckets. A bucket consists of consecutive rows with equal keys."""
    keys, numbers = rows[:, 0], rows[:, 1]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(rows) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(starts, len(rows)))
    position = np.arange(len(rows)) - np.repeat(starts, sizes)  # index of each row in its bucket
    size_of = np.repeat(sizes, sizes)
    small = size_of <= _MOST_PAIRWISE
    for gap in range(1, min(int(sizes.max(initial=0)), _MOST_PAIRWISE)):
        members = np.flatnonzero((position >= gap) & (small if gap > 1 else size_of > 1))
        if len(members):
            yield np.column_stack([numbers[members - gap], numbers[members]])
    members = np.flatnonzero(~small & (position > 0))
    if len(members):
        yield np.column_stack([numbers[members - position[members]], numbers[members]])


class ShingleFile:
    """A file with the shingles of documents in ascending order of document index, read one document at a time."""

    def __init__(self, folder: Path) -> None:
        self._numbers = np.fromfile(folder / "shingles.numbers", np.uint64)
        self._ends = np.fromfile(folder / "shingles.ends", np.uint64)
        self._file = os.open(folder / "shingles.bin", os.O_RDONLY)
        self._last: tuple[int, Numbers] | None = None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def of(self, number: int) -> Numbers:
        """The shingles of a document."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        index = int(np.searchsorted(self._numbers, np.uint64(number)))
        begin, end = (int(self._ends[i]) if i >= 0 else 0 for i in (index - 1, index))
        return np.frombuffer(os.pread(self._file, 8 * (end - begin), 8 * begin), np.uint64)

    def keep(self, number: int) -> Numbers:
        """Return the shingles of a document, as `of` does, and cache them, because the following pairs often contain
        the same document."""
        shingles = self.of(number)
        self._last = (number, shingles)
        return shingles

    @staticmethod
    def write(folder: Path, blocks: Iterator[tuple[Numbers, Numbers, Numbers]]) -> None:
        """Write the shingles. blocks: for each block, the document indices, the end offset of each document's shingles,
        and all shingles."""
        written_hashes = 0
        with (
            open(folder / "shingles.numbers", "wb") as numbers,
            open(folder / "shingles.ends", "wb") as ends,
            open(folder / "shingles.bin", "wb") as hashes,
        ):
            for block_numbers, block_ends, block_hashes in blocks:
                numbers.write(block_numbers.astype(np.uint64).tobytes())
                ends.write((block_ends + np.uint64(written_hashes)).astype(np.uint64).tobytes())
                hashes.write(block_hashes.tobytes())
                written_hashes += len(block_hashes)


class Pair(NamedTuple):
    """Two documents and their similarity."""

    first: int
    second: int
    similarity: float


def similar_pairs(
    folder: Path, compare: Callable[[Numbers, Numbers], float], least: float, skip: Callable[[int, int], bool]
) -> Iterator[Pair]:
    """Yield the pairs of `pairs.bin` whose similarity is at least `least`, in order. Pairs for which `skip` returns
    True are not compared."""
    shingles = ShingleFile(folder)
    with open(folder / "pairs.bin", "rb") as file:
        while len(rows := np.fromfile(file, np.uint64, 2 * _ROWS_TOGETHER).reshape(-1, 2)):
            for first, second in rows.tolist():
                if skip(first, second):
                    continue
                similarity = compare(shingles.keep(first), shingles.of(second))
                if similarity >= least:
                    yield Pair(first, second, similarity)
    shingles.close()


class DocumentGroups:
    """Disjoint groups of documents (union-find). A group is identified by its first document."""

    def __init__(self, documents: int) -> None:
        self._parent = np.arange(documents, dtype=np.uint64)

    def root(self, number: int) -> int:
        """Return the first document of the group to which a document belongs."""
        parent = self._parent
        while (above := int(parent[number])) != number:
            parent[number] = parent[above]
            number = above
        return number

    def joined(self, first: int, second: int) -> bool:
        """Whether two documents are in the same group."""
        return self.root(first) == self.root(second)

    def join(self, first: int, second: int) -> None:
        """Merge the groups of two documents."""
        one, other = sorted((self.root(first), self.root(second)))
        self._parent[other] = one

    def members(self) -> dict[int, list[int]]:
        """Return a dict: first document -> all documents, for each group of two or more documents."""
        others_of: dict[int, list[int]] = {}
        for number in np.flatnonzero(self._parent != np.arange(len(self._parent), dtype=np.uint64)).tolist():
            others_of.setdefault(self.root(number), []).append(number)
        return {root: [root, *others_of[root]] for root in sorted(others_of)}


def begins_of(sizes: Sequence[int]) -> list[int]:
    """Return the start offsets of consecutive runs of the given sizes, followed by the end of the last run."""
    return [0, *np.cumsum(np.array(sizes, np.int64)).tolist()]
