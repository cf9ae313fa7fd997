"""From the bands of all documents to groups of near duplicates, on disk: what grows with the corpus in memory is one
number for each document.

    1 pairs_of_bands   band keys are distributed over files by value and sorted; documents with an equal one form a
                       bucket; its pairs are distributed and sorted in turn, so that each is there once
    2 (elsewhere)      the shingles of the documents in pairs are written, in the order of the documents
    3 groups           pairs that overlap enough are joined, the first document of a group is the one that stays

It knows neither text nor signatures.
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
"""Documents of a bucket that are all compared with each other; further ones with the first of it, and with the one
before them."""


class Distributed:
    """Rows of two numbers, written to files by a number so that equal ones meet, and read sorted."""

    def __init__(self, folder: Path, name: str, expected: int) -> None:
        count = min(max(1, -(-expected // _ROWS_TOGETHER)), _MOST_FILES)
        self._paths = [folder / f"{name}-{i}.tmp" for i in range(count)]
        self._stack = contextlib.ExitStack()
        self._files = [self._stack.enter_context(open(path, "wb")) for path in self._paths]  # noqa: SIM115

    def add(self, owners: Numbers, rows: Numbers) -> None:
        """rows: [n, 2]; those with an equal owner are read together."""
        which = owners % np.uint64(len(self._files))
        if len(self._files) == 1:
            self._files[0].write(rows.tobytes())
            return
        order = np.argsort(which, kind="stable")
        rows, bounds = rows[order], np.searchsorted(which[order], np.arange(len(self._files) + 1))
        for i, file in enumerate(self._files):
            file.write(rows[bounds[i] : bounds[i + 1]].tobytes())

    def sorted(self) -> Iterator[Numbers]:
        """The rows of each file, by their first number, then by the second; the file is then gone."""
        self._stack.close()
        for path in self._paths:
            rows = np.fromfile(path, np.uint64).reshape(-1, 2)
            yield rows[np.lexsort((rows[:, 1], rows[:, 0]))]
            path.unlink()


def pairs_of_bands(folder: Path, bands: Iterator[tuple[int, NDArray[np.uint64]]], documents: int, count: int) -> int:
    """Write `pairs.bin`, rows of two numbers of documents, sorted, each once; returns how many.

    bands: number of the first document of a block, and the block's keys [documents, count]; the largest key is none.
    """
    keyed = Distributed(folder, "bands", documents * count)
    for first, keys in bands:
        numbers = np.arange(first, first + len(keys), dtype=np.uint64)
        for band in range(count):
            there = keys[:, band] != NO_KEY
            own = keys[there, band]
            keyed.add(own, np.column_stack([own, numbers[there]]))
    pairs = Distributed(folder, "pairs", documents)
    for rows in keyed.sorted():
        for found in _pairs(rows):
            pairs.add(found[:, 0] // np.uint64(_ROWS_TOGETHER // 8), found)
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


def _pairs(rows: Numbers) -> Iterator[Numbers]:
    """The pairs of all buckets: runs of rows with an equal key."""
    keys, numbers = rows[:, 0], rows[:, 1]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(rows) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(starts, len(rows)))
    place = np.arange(len(rows)) - np.repeat(starts, sizes)  # of each row in its bucket
    size_of = np.repeat(sizes, sizes)
    small = size_of <= _MOST_PAIRWISE
    for gap in range(1, min(int(sizes.max(initial=0)), _MOST_PAIRWISE)):
        chosen = np.flatnonzero((place >= gap) & (small if gap > 1 else size_of > 1))
        if len(chosen):
            yield np.column_stack([numbers[chosen - gap], numbers[chosen]])
    chosen = np.flatnonzero(~small & (place > 0))
    if len(chosen):
        yield np.column_stack([numbers[chosen - place[chosen]], numbers[chosen]])


class ShingleFile:
    """The shingles of some documents, in the order of their numbers, read one document at a time."""

    def __init__(self, folder: Path) -> None:
        self._numbers = np.fromfile(folder / "shingles.numbers", np.uint64)
        self._ends = np.fromfile(folder / "shingles.ends", np.uint64)
        self._file = os.open(folder / "shingles.bin", os.O_RDONLY)
        self._last: tuple[int, Numbers] | None = None

    def close(self) -> None:
        """It cannot be read any more."""
        os.close(self._file)

    def of(self, number: int) -> Numbers:
        """The shingles of a document."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        index = int(np.searchsorted(self._numbers, np.uint64(number)))
        begin, end = (int(self._ends[i]) if i >= 0 else 0 for i in (index - 1, index))
        return np.frombuffer(os.pread(self._file, 8 * (end - begin), 8 * begin), np.uint64)

    def keep(self, number: int) -> Numbers:
        """The same, of a document that the next pairs are of."""
        found = self.of(number)
        self._last = (number, found)
        return found

    @staticmethod
    def write(folder: Path, blocks: Iterator[tuple[Numbers, Numbers, Numbers]]) -> None:
        """blocks: numbers of documents, where the shingles of each end, and the shingles of all."""
        before = 0
        with (
            open(folder / "shingles.numbers", "wb") as numbers,
            open(folder / "shingles.ends", "wb") as ends,
            open(folder / "shingles.bin", "wb") as hashes,
        ):
            for own, own_ends, own_hashes in blocks:
                numbers.write(own.astype(np.uint64).tobytes())
                ends.write((own_ends + np.uint64(before)).astype(np.uint64).tobytes())
                hashes.write(own_hashes.tobytes())
                before += len(own_hashes)


class Pair(NamedTuple):
    """Two documents that overlap enough, and how much."""

    first: int
    second: int
    similarity: float


def similar_pairs(
    folder: Path, compare: Callable[[Numbers, Numbers], float], least: float, skip: Callable[[int, int], bool]
) -> Iterator[Pair]:
    """The pairs of `pairs.bin` that overlap by at least `least`, in order; `skip` says which need not be compared."""
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
    """Documents that are joined with each other, each group known by its first one."""

    def __init__(self, documents: int) -> None:
        self._parent = np.arange(documents, dtype=np.uint64)

    def root(self, number: int) -> int:
        """The first document of the group of one."""
        parent = self._parent
        while (above := int(parent[number])) != number:
            parent[number] = parent[above]
            number = above
        return number

    def joined(self, first: int, second: int) -> bool:
        """Whether two are in one group."""
        return self.root(first) == self.root(second)

    def join(self, first: int, second: int) -> None:
        """Put two, and all that are with them, into one group."""
        one, other = sorted((self.root(first), self.root(second)))
        self._parent[other] = one

    def members(self) -> dict[int, list[int]]:
        """The groups of two and more, by their first one."""
        found: dict[int, list[int]] = {}
        for number in np.flatnonzero(self._parent != np.arange(len(self._parent), dtype=np.uint64)).tolist():
            found.setdefault(self.root(number), []).append(number)
        return {root: [root, *found[root]] for root in sorted(found)}


def begins_of(sizes: Sequence[int]) -> list[int]:
    """Where each of some runs begins, and where the last one ends."""
    return [0, *np.cumsum(np.array(sizes, np.int64)).tolist()]
