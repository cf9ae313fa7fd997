"""Tables that map the elements of one checkpoint to those of another, for conversions in both directions, and the
checks that such a table is complete.

Every checkpoint format can be converted to the project's format by a few operations: a different order of rows (fused
query-key-value, rotary pairs), tensors that are concatenated or split over files (tensor ranks, stages), transposed
matrices, and padding. The module of a format defines only the table for reading, which maps the format's tensors to
mega tensors. `inverted` derives the table for writing. `assemble` reads tensors through a table, and `prove` checks a
table. This module does not depend on any particular format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Protocol

import torch

from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors, whole_box


class Source(Protocol):
    """An object that reads rectangles of named tensors."""

    @property
    def tensors(self) -> Tensors:
        """Name -> shape and dtype of every stored tensor."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read the rectangle `box` of the tensor `name`."""


@dataclass(frozen=True)
class Span:
    """A range of rows of a tensor and, for a matrix, a range of columns. The range of rows may have a stride."""

    rows: range
    columns: range | None = None

    @property
    def ranges(self) -> tuple[range, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


@dataclass(frozen=True)
class Fragment:
    """Elements of a target tensor and the corresponding elements of a source tensor, in the same order."""

    source: str
    """The source tensor's name."""
    target_span: Span
    """Rows and columns of the target tensor."""
    source_span: Span
    """Rows and columns of the source tensor."""
    transposed: bool = False
    """Whether the source is stored as [in, out], in which case the source's rows are the target's columns."""

    def inverted(self, target: str) -> Fragment:
        """Return the fragment for the opposite direction, which produces the source tensor from `target`."""
        return Fragment(target, self.source_span, self.target_span, self.transposed)


@dataclass(frozen=True)
class Target:
    """A tensor to assemble from source tensors. The target has the same dtype as the sources."""

    name: str
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True)
class Table:
    """A complete conversion, described by a mapping from source tensors to target tensors."""

    targets: tuple[Target, ...]
    """All tensors that the conversion produces."""
    copies: tuple[tuple[str, Fragment], ...] = ()
    """(target, fragment): elements of a target that are also stored in a second source tensor. Both copies must be
    equal."""
    padding: Mapping[str, tuple[range, str]] = field(default_factory=dict)
    """Source tensor -> (padding rows, the target whose last row fills the padding when the source format is
    written)."""
    ignored: frozenset[str] = frozenset()
    """Source tensors that do not contain weights, and are not converted."""
    repeats: frozenset[str] = frozenset()
    """Source tensors whose elements may be used more than once."""

    def tensors(self, sources: Tensors) -> Tensors:
        """Return a dict: name -> (shape, dtype), for the tensors that are assembled from `sources`. Errors:
        CheckpointError naming a missing source."""
        for target in self.targets:
            if (source := target.fragments[0].source) not in sources:
                raise CheckpointError(f"{source}: is missing ({target.name} is made of it)")
        return {each.name: (each.shape, sources[each.fragments[0].source][1]) for each in self.targets}

    @property
    def elements(self) -> int:
        """Number of elements of all targets."""
        return sum(prod(target.shape) for target in self.targets)


def stacked(parts: Iterable[tuple[str, range]], columns: int | None) -> tuple[Fragment, ...]:
    """Return fragments that concatenate ranges of source rows. parts: (source, rows) for each range.

    columns: number of columns of the matrix; None for vectors.

    >>> [f.target_span.rows for f in stacked([("a", range(2)), ("b", range(5, 8))], columns=4)]
    [range(0, 2), range(2, 5)]
    """
    fragments, row = [], 0
    width = None if columns is None else range(columns)
    for source, rows in parts:
        fragments.append(Fragment(source, Span(range(row, row + len(rows)), width), Span(rows, width)))
        row += len(rows)
    return tuple(fragments)


def next_to(parts: Sequence[str], rows: int, width: int) -> tuple[Fragment, ...]:
    """Return fragments that concatenate whole source tensors of shape [rows, width] along columns.

    >>> [f.target_span.columns for f in next_to(["a", "b"], rows=2, width=5)]
    [range(0, 5), range(5, 10)]
    """
    return tuple(
        Fragment(part, Span(range(rows), range(n * width, (n + 1) * width)), Span(range(rows), range(width)))
        for n, part in enumerate(parts)
    )


def whole(shape: tuple[int, ...], source: str, transposed: bool = False) -> Fragment:
    """Return the fragment of a target that is a copy of one source tensor, optionally transposed."""
    at = Span(*map(range, shape))
    return Fragment(source, at, Span(*reversed(at.ranges)) if transposed else at, transposed)


def gathered(
    shape: tuple[int, ...], parts: Sequence[str], dim: int | None, runs: Sequence[range] | None = None
) -> tuple[Fragment, ...]:
    """Return the fragments of a tensor that is split along `dim` over the source tensors `parts`. If `dim` is None, the
    first source contains the whole tensor.

    runs: rows of each source in the order of the target; None if the orders are the same.

        dim 0, runs [even, odd]:            dim 1:
        target = a[even]                    target = a | b
                 a[odd]
                 b[even]
                 b[odd]
    """
    if dim is None:
        return (whole(shape, parts[0]),)
    if dim == 1:
        return next_to(parts, shape[0], shape[1] // len(parts))
    runs = [range(shape[0] // len(parts))] if runs is None else runs
    return stacked([(part, run) for part in parts for run in runs], shape[1] if len(shape) == 2 else None)


def renamed(table: Table, target: Callable[[str], str], source: Callable[[str], str]) -> Table:
    """Return a copy of `table` for other tensors of the same shapes. `target` and `source` translate the names of
    targets and sources."""

    def moved(fragment: Fragment) -> Fragment:
        return replace(fragment, source=source(fragment.source))

    return Table(
        tuple(Target(target(each.name), each.shape, tuple(map(moved, each.fragments))) for each in table.targets),
        copies=tuple((target(name), moved(fragment)) for name, fragment in table.copies),
        padding={source(name): (rows, target(target_name)) for name, (rows, target_name) in table.padding.items()},
        repeats=frozenset(map(source, table.repeats)),
    )


def joined(tables: Iterable[Table]) -> Table:
    """Return one table that combines several tables."""
    tables = list(tables)
    return Table(
        tuple(target for table in tables for target in table.targets),
        copies=tuple(pair for table in tables for pair in table.copies),
        padding={name: rows for table in tables for name, rows in table.padding.items()},
        ignored=frozenset().union(*(table.ignored for table in tables)),
        repeats=frozenset().union(*(table.repeats for table in tables)),
    )


def inverted(table: Table) -> Table:
    """Return the table of the reverse conversion, which produces every source tensor from the targets, including copies
    and padding.

    >>> table = Table((Target("x", (4,), stacked([("a", range(2)), ("b", range(2))], None)),))
    >>> [(target.name, target.fragments[0].source_span.rows) for target in inverted(table).targets]
    [('a', range(0, 2)), ('b', range(2, 4))]
    """
    copies: dict[str, list[Fragment]] = {}
    for name, fragment in table.copies:
        copies.setdefault(name, []).append(fragment)
    fragments_of: dict[str, list[Fragment]] = {}
    for target in table.targets:
        for fragment in (*target.fragments, *copies.get(target.name, ())):
            fragments_of.setdefault(fragment.source, []).append(fragment.inverted(target.name))
        last, *columns = map(range, target.shape)
        for name, (rows, filled) in table.padding.items():
            if filled == target.name:
                filler = Span(last[-1:], *columns)
                fragments_of.setdefault(name, []).extend(
                    Fragment(filled, Span(range(n, n + 1), *columns), filler) for n in rows
                )
    targets = tuple(
        Target(name, _extent(each.target_span for each in fragments), tuple(fragments))
        for name, fragments in fragments_of.items()
    )
    return Table(targets, repeats=frozenset(copies) | {filled for _, filled in table.padding.values()})


def _extent(spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the shape of the tensor that `spans` cover."""
    return tuple(1 + max(each[-1] for each in ranges) for ranges in zip(*(span.ranges for span in spans), strict=True))


# Reading


def assemble(target: Target, box: Box, source: Source) -> torch.Tensor:
    """Return the rectangle `box` of `target`, read from `source` through the target's fragments. The result may be a
    view of the source's memory."""
    tensor: torch.Tensor | None = None
    for fragment in target.fragments:
        if (shared := _shared(fragment, box, source)) is None:
            continue
        index, part = shared
        if part.shape == box.size:
            return part
        tensor = torch.empty(box.size, dtype=part.dtype) if tensor is None else tensor
        tensor[index] = part
    assert tensor is not None, f"{target.name}: the table was proven"
    return tensor


def _shared(fragment: Fragment, box: Box, source: Source) -> tuple[tuple[slice, ...], torch.Tensor] | None:
    """Intersect a fragment with the rectangle `box` of its target, and return (index into the rectangle, elements).

    Return None if fragment and rectangle do not overlap.
    """
    # `source_ranges` keeps the target's order of dims until the read, so that one loop can restrict both ranges.
    index, source_ranges = (
        [],
        list(reversed(fragment.source_span.ranges) if fragment.transposed else fragment.source_span.ranges),
    )
    for dim, (span, start, size) in enumerate(zip(fragment.target_span.ranges, box.start, box.size, strict=True)):
        first, last = (min(max(0, -((span.start - n) // span.step)), len(span)) for n in (start, start + size))
        if first >= last:
            return None
        index.append(slice(span[first] - start, span[last - 1] - start + 1, span.step))
        source_ranges[dim] = source_ranges[dim][first:last]
    if fragment.transposed:
        source_ranges.reverse()
    part = source.read(
        fragment.source, Box(tuple(r[0] for r in source_ranges), tuple(r[-1] + 1 - r[0] for r in source_ranges))
    )
    part = part[tuple(slice(None, None, each.step) for each in source_ranges)]
    return tuple(index), part.T if fragment.transposed else part


class Assembled:
    """A source of the tensors that a table produces from another source."""

    def __init__(self, table: Table, source: Source) -> None:
        self._targets, self._source = {target.name: target for target in table.targets}, source
        self.tensors: Tensors = table.tensors(source.tensors)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return assemble(self._targets[name], box, self._source)


# Proof


def prove(table: Table, tensors: Tensors) -> None:
    """Check that every target element comes from exactly one source element, that every source element is used exactly
    once (apart from `ignored` and `repeats`), and that dtypes agree.

    tensors: the source's tensors. Errors: CheckpointError naming the tensor at fault.
    """
    uses: dict[str, list[Span]] = {}
    for name, fragment in _fragments(table):
        if fragment.source not in tensors:
            raise CheckpointError(f"{fragment.source}: is missing ({name} is made of it)")
        shape = tensors[fragment.source][0]
        if len(shape) != len(fragment.source_span.ranges):
            raise CheckpointError(
                f"{fragment.source}: has shape {shape}, expected {len(fragment.source_span.ranges)} dims"
            )
        uses.setdefault(fragment.source, []).append(fragment.source_span)
    expected = table.tensors(tensors)
    for target in table.targets:
        for fragment in target.fragments:
            if (dtype := tensors[fragment.source][1]) != expected[target.name][1]:
                raise CheckpointError(f"{fragment.source}: is {dtype}, {target.name} is {expected[target.name][1]}")
        if fault := _fault(target.shape, [fragment.target_span for fragment in target.fragments], "filled"):
            raise CheckpointError(f"{target.name}: {fault}")
    for name, (rows, _) in table.padding.items():
        uses.setdefault(name, []).append(Span(rows, *map(range, tensors[name][0][1:])))
    for name, (shape, _) in tensors.items():
        if name in table.ignored:
            continue
        if fault := _fault(shape, uses.get(name, []), repeats=name in table.repeats):
            implied = _extent(uses[name]) if name in uses else shape
            mismatch = "" if implied == shape else f", the model implies {implied}"
            raise CheckpointError(f"{name} {shape}{mismatch}: {fault}")


def _fragments(table: Table) -> Iterator[tuple[str, Fragment]]:
    for target in table.targets:
        yield from ((target.name, fragment) for fragment in target.fragments)
    yield from table.copies


def _fault(shape: tuple[int, ...], uses: Sequence[Span], done: str = "used", repeats: bool = False) -> str | None:
    """Explain why `uses` do not cover every element of a tensor exactly once; None if they do.

    All columns between two consecutive rectangle edges have the same uses, so rows are counted once per interval.
    """
    if not uses:
        return None if prod(shape) == 0 else "nothing is made of it"
    height, width = shape[0], prod(shape[1:])
    rectangles = [(use.rows, range(1) if use.columns is None else use.columns) for use in uses]
    if rectangles == [(range(height), range(width))]:
        return None
    for rows, columns in rectangles:
        if rows[0] < 0 or rows[-1] >= height:
            return f"does not have the rows {rows}"
        if columns.start < 0 or columns.stop > width:
            return f"does not have the columns {columns.start} to {columns.stop}"
    borders = sorted({0, width, *(border for _, columns in rectangles for border in (columns.start, columns.stop))})
    for begin, end in pairwise(borders):
        counts = torch.zeros(height, dtype=torch.int32)
        for rows, columns in rectangles:
            if begin in columns:
                counts[rows.start : rows.stop : rows.step] += 1
        if absent := int((counts == 0).sum()):
            return f"{absent} rows of columns {begin} to {end} are never {done}"
        if not repeats and bool((counts > 1).any()):
            return f"rows of columns {begin} to {end} are {done} more than once"
    return None


def check_copies(table: Table, source: Source) -> None:
    """Compare the tensors that are stored several times. Errors: CheckpointError naming a copy that differs."""
    targets = {target.name: target for target in table.targets}
    for name, fragment in table.copies:
        target = targets[name]
        copy, original = fragment.source, target.fragments[0].source
        dtype, original_dtype = source.tensors[copy][1], source.tensors[original][1]
        if dtype != original_dtype:
            raise CheckpointError(f"{copy}: is {dtype}, but {original} is {original_dtype}")
        for box in blocks(whole_box(target.shape), dtype.itemsize):
            if (shared := _shared(fragment, box, source)) is None:
                continue
            index, part = shared
            a, b = (each.contiguous().view(torch.uint8) for each in (part, assemble(target, box, source)[index]))
            if not torch.equal(a, b):
                raise CheckpointError(f"{copy}: differs from {original}, which it should repeat")
