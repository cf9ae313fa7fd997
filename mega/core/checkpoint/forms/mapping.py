"""Tables that say where every element comes from in another checkpoint, and the proof that none is lost.

All formats differ from ours by the same few moves: rows in another order (fused query-key-value, rotary
pairs), tensors laid side by side or cut over files (tensor ranks, stages), a transposed matrix, padding.
A table of fragments says all of that; one function reads by it, one proves it. Knows no format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Protocol

import torch

from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.pieces import Box, CheckpointError, tiling_fault

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype."""


class Source(Protocol):
    """Anything that tensors are read from, by name and rectangle."""

    @property
    def tensors(self) -> Tensors:
        """What is there."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The rectangle `box` of the tensor `name`."""


@dataclass(frozen=True)
class Fragment:
    """A rectangle of a target tensor and the place in a source tensor where its elements are.

    at: the rectangle in the target. rows: for each of its rows, the source's row. column: the source's
    first column (of a matrix). transposed: the source is stored [in, out]; `rows` are its columns then.
    """

    source: str
    at: Box
    rows: range
    column: int = 0
    transposed: bool = False

    @property
    def taken(self) -> tuple[range, range]:
        """Rows and columns of the source that this fragment uses."""
        width = self.at.size[1] if len(self.at.size) > 1 else 1
        columns = range(self.column, self.column + width)
        return (columns, self.rows) if self.transposed else (self.rows, columns)


@dataclass(frozen=True)
class Target:
    """One tensor to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True)
class Table:
    """A whole conversion.

    copies: (tensor, its original): source tensors that must equal others and are not read further.
    dropped: rows of a source tensor that are padding. ignored: source tensors that carry nothing.
    repeats: source tensors that may be used more than once (padding of a target, tied copies).
    """

    targets: tuple[Target, ...]
    copies: tuple[tuple[str, str], ...] = ()
    dropped: Mapping[str, range] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    repeats: frozenset[str] = frozenset()


def whole(name: str, source: str, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False) -> Target:
    """A target that is one source tensor, unchanged or transposed."""
    at = Box((0,) * len(shape), shape)
    rows = range(shape[0]) if shape else range(1)
    return Target(name, shape, dtype, (Fragment(source, at, rows, transposed=transposed),))


def moved_alike(table: Table, target: Callable[[str], str], source: Callable[[str], str], dtype: torch.dtype) -> Table:
    """The same moves for other tensors of the same shapes: `target` and `source` turn the table's names into theirs."""
    return Table(
        tuple(
            Target(
                target(each.name),
                each.shape,
                dtype,
                tuple(replace(fragment, source=source(fragment.source)) for fragment in each.fragments),
            )
            for each in table.targets
        ),
        copies=tuple((source(copy), source(original)) for copy, original in table.copies),
        dropped={source(name): rows for name, rows in table.dropped.items()},
        repeats=frozenset(map(source, table.repeats)),
    )


def joined(tables: Iterable[Table]) -> Table:
    """Several conversions as one."""
    tables = list(tables)
    return Table(
        tuple(target for table in tables for target in table.targets),
        copies=tuple(pair for table in tables for pair in table.copies),
        dropped={name: rows for table in tables for name, rows in table.dropped.items()},
        ignored=frozenset().union(*(table.ignored for table in tables)),
        repeats=frozenset().union(*(table.repeats for table in tables)),
    )


def stacked(parts: Iterable[tuple[str, range]], columns: int | None, column: int = 0) -> tuple[Fragment, ...]:
    """Fragments that lay runs of source rows (source, rows) under one another.

    columns: width of the matrix, None for vectors. column: the target's first column.

    >>> [f.at.start for f in stacked([("a", range(2)), ("b", range(5, 8))], columns=4)]
    [(0, 0), (2, 0)]
    """
    fragments, row = [], 0
    for source, rows in parts:
        at = Box((row,), (len(rows),)) if columns is None else Box((row, column), (len(rows), columns))
        fragments.append(Fragment(source, at, rows))
        row += len(rows)
    return tuple(fragments)


def beside(parts: Sequence[str], rows: int, width: int) -> tuple[Fragment, ...]:
    """Fragments that lay whole sources of `rows` x `width` next to one another.

    >>> [f.at.start for f in beside(["a", "b"], rows=2, width=5)]
    [(0, 0), (0, 5)]
    """
    return tuple(
        Fragment(part, Box((0, number * width), (rows, width)), range(rows)) for number, part in enumerate(parts)
    )


def assemble(target: Target, box: Box, source: Source) -> torch.Tensor:
    """The rectangle `box` of `target`, read from `source` by the table; it may be a view of what the source holds."""
    for fragment in target.fragments:
        if not box.size or fragment.at.meet(box) == box:
            return _read(fragment, box, source)
    made = torch.empty(box.size, dtype=target.dtype)
    for fragment in target.fragments:
        shared = fragment.at.meet(box)
        if shared is not None:
            made[shared.inside(box)] = _read(fragment, shared, source)
    return made


def _read(fragment: Fragment, shared: Box, source: Source) -> torch.Tensor:
    if not shared.size:
        return source.read(fragment.source, shared)
    first = shared.start[0] - fragment.at.start[0]
    rows = fragment.rows[first : first + shared.size[0]]
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
    if len(shared.size) == 1:
        return source.read(fragment.source, Box((low,), (high - low,)))[:: rows.step]
    column = fragment.column + shared.start[1] - fragment.at.start[1]
    width = shared.size[1]
    if fragment.transposed:
        return source.read(fragment.source, Box((column, low), (width, high - low))).T
    return source.read(fragment.source, Box((low, column), (high - low, width)))[:: rows.step]


def prove(table: Table, tensors: Tensors) -> None:
    """Every target element has one origin, every source element one use, and dtypes agree.

    tensors: what the source holds. Errors: CheckpointError naming the tensor at fault.
    """
    used: dict[str, list[tuple[range, range]]] = {}
    for target in table.targets:
        fault = tiling_fault(target.shape, [fragment.at for fragment in target.fragments])
        if fault:
            raise CheckpointError(f"{target.name}: {fault}")
        for fragment in target.fragments:
            if fragment.source not in tensors:
                raise CheckpointError(f"{fragment.source}: is missing ({target.name} is made of it)")
            dtype = tensors[fragment.source][1]
            if dtype != target.dtype:
                raise CheckpointError(f"{fragment.source}: is {dtype}, {target.name} is {target.dtype}")
            used.setdefault(fragment.source, []).append(fragment.taken)
    for name, rows in table.dropped.items():
        used.setdefault(name, []).append((rows, range(_matrix(tensors[name][0])[1])))
    copies = {copy for copy, _ in table.copies}
    for name, (shape, _) in tensors.items():
        if name not in table.ignored and name not in copies:
            fault = _use_fault(_matrix(shape), used.get(name, []), name in table.repeats)
            if fault:
                raise CheckpointError(f"{name} {shape}: {fault}")


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0] if shape else 1), prod(shape[1:])


def _use_fault(shape: tuple[int, int], uses: Sequence[tuple[range, range]], repeats: bool) -> str | None:
    """Why `uses` (rows, columns) do not take every element of a matrix exactly once; None if they do.

    Between two neighbouring column borders all columns fare alike, so rows are counted once for each.
    """
    if not uses:
        return None if prod(shape) == 0 else "nothing is made of it"
    if list(uses) == [(range(shape[0]), range(shape[1]))]:
        return None
    for rows, _ in uses:
        if rows and (min(rows[0], rows[-1]) < 0 or max(rows[0], rows[-1]) >= shape[0]):
            return f"rows {rows} are wanted"
    borders = sorted({0, shape[1], *(border for _, columns in uses for border in (columns.start, columns.stop))})
    if borders[0] < 0 or borders[-1] > shape[1]:
        return f"columns {borders[0]} to {borders[-1]} are wanted"
    for begin, end in pairwise(borders):
        counts = Counter(row for rows, columns in uses if begin in columns for row in rows)
        if len(counts) != shape[0]:
            return f"{shape[0] - len(counts)} rows of columns {begin} to {end} are never used"
        if not repeats and max(counts.values()) > 1:
            return f"rows of columns {begin} to {end} are used more than once"
    return None


def check_copies(table: Table, source: Source) -> None:
    """Errors: CheckpointError naming a tensor that should equal another and does not."""
    for copy, original in table.copies:
        (shape, dtype), (other_shape, other_dtype) = source.tensors[copy], source.tensors[original]
        if (shape, dtype) != (other_shape, other_dtype):
            raise CheckpointError(f"{copy}: is {dtype} {shape}, but {original} is {other_dtype} {other_shape}")
        for box in blocks(Box((0,) * len(shape), shape), dtype.itemsize):
            a, b = (source.read(name, box).contiguous().view(torch.uint8) for name in (copy, original))
            if not torch.equal(a, b):
                raise CheckpointError(f"{copy}: differs from {original}, which it should repeat")
