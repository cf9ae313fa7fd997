"""Functions of whole matrices, of which every rank holds a part: rows or columns of its own, or a span of a bucket.

    parts of a bucket's matrices  --to their owners-->  whole matrices  --function-->  --back-->  parts

Every matrix has one owner among the ranks that hold the bucket, so that all of them compute, each other matrices. Where
several ranks hold the same part, one of them sends it. A matrix is put together before anything is computed, so the
result does not depend on how it was shared out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from mega.core.parallel.collectives import exchange, gather_json
from mega.core.parallel.gradients import Bucket

MatrixFunction = Callable[[torch.Tensor], torch.Tensor]
"""From a matrix to one of the same shape."""


class Rectangle(NamedTuple):
    """A rectangle of a bucket's matrix: which one, from which row and column, how many of them."""

    matrix: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


class _Plan(NamedTuple):
    """Who sends what. For each rank of the axis, the blocks that go to it, and that come from it, in order."""

    shapes: dict[int, tuple[int, ...]]
    """Of the matrices that this rank owns."""
    ours: list[Rectangle]
    """What our span holds, in its order."""
    sent: list[list[Rectangle]]
    received: list[list[Rectangle]]
    returned: list[list[Rectangle]]
    regained: list[list[Rectangle]]


class WholeMatrices:
    """Plans of exchange, each made when its bucket is first asked for."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}

    def mapped(self, bucket: Bucket, flat: torch.Tensor, function: MatrixFunction) -> torch.Tensor:
        """Our span of `function` of each of the bucket's matrices; 0 in the padding. flat: our span of the matrices."""
        plan = self._plans.get(id(bucket))
        if plan is None:
            plan = self._plans[id(bucket)] = _plan(bucket)
        axis, here = bucket.data.with_tp, bucket.own_weights.device  # which may be another than that of the state
        # 1 to the owners
        parts = dict(zip(plan.ours, (part for _, _, part in bucket.rectangles(flat, bucket.span[0])), strict=True))
        came = exchange(_joined(parts, plan.sent, flat).to(here), axis, _sizes(plan.sent), _sizes(plan.received))
        # 2 whole
        whole = {number: came.new_empty(shape) for number, shape in plan.shapes.items()}
        for block, part in _blocks(plan.received, came):
            block.of(whole[block.matrix]).copy_(part)
        found = {number: function(matrix) for number, matrix in whole.items()}
        # 3 and back
        blocks = {block: block.of(found[block.matrix]) for row in plan.returned for block in row}
        back = exchange(_joined(blocks, plan.returned, came), axis, _sizes(plan.returned), _sizes(plan.regained))
        out = torch.zeros_like(flat)
        into = dict(zip(plan.ours, (part for _, _, part in bucket.rectangles(out, bucket.span[0])), strict=True))
        for block, part in _blocks(plan.regained, back):
            into[block].copy_(part)
        return out


def _plan(bucket: Bucket) -> _Plan:
    """All ranks of the bucket come to the same plan, from what each of them holds."""
    axis = bucket.data.with_tp
    shapes = {shard.name: shard.whole for shard, _ in bucket.runs()}
    names = list(shapes)
    begin, end = bucket.span
    ours = [
        Rectangle(names.index(shard.name), start, tuple(part.shape))
        for shard, start, part in bucket.rectangles(torch.empty(end - begin, device="meta"), begin)
    ]
    held = [
        [Rectangle(matrix, (row, column), (rows, columns)) for matrix, row, column, rows, columns in blocks]
        for blocks in gather_json(
            [[block.matrix, *block.start, *block.size] for block in ours], axis, bucket.own_weights.device
        )
    ]
    owners = _owners([shapes[name] for name in names], axis.size)
    holders: dict[Rectangle, list[int]] = defaultdict(list)
    for rank, row in enumerate(held):
        for block in row:
            holders[block].append(rank)
    counted = [sum(prod(block.size) for block in holders if block.matrix == number) for number in range(len(names))]
    assert counted == [prod(shapes[name]) for name in names], f"{axis.name}: holds no whole matrices"
    table: dict[tuple[int, int], list[Rectangle]] = defaultdict(list)
    for block, ranks in holders.items():
        owner = owners[block.matrix]
        table[owner if owner in ranks else ranks[block.matrix % len(ranks)], owner].append(block)
    everyone = range(axis.size)
    return _Plan(
        {number: shapes[name] for number, name in enumerate(names) if owners[number] == axis.index},
        ours,
        [table[axis.index, rank] for rank in everyone],
        [table[rank, axis.index] for rank in everyone],
        [[block for block in held[rank] if owners[block.matrix] == axis.index] for rank in everyone],
        [[block for block in ours if owners[block.matrix] == rank] for rank in everyone],
    )


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """The rank of each matrix: the most work first, each to the rank that has the least.

    >>> _owners([(4, 4), (8, 8), (4, 4), (4, 4)], 2)
    [1, 0, 1, 1]
    """
    work, found = [0] * size, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -prod(shapes[number]) * min(shapes[number])):
        found[number] = rank = work.index(min(work))
        work[rank] += prod(shapes[number]) * min(shapes[number])
    return found


def _joined(
    parts: dict[Rectangle, torch.Tensor], rows: Sequence[Sequence[Rectangle]], like: torch.Tensor
) -> torch.Tensor:
    return torch.cat([like.new_empty(0), *(parts[block].reshape(-1) for row in rows for block in row)])


def _sizes(rows: Sequence[Sequence[Rectangle]]) -> list[int]:
    return [sum(prod(block.size) for block in row) for row in rows]


def _blocks(rows: Sequence[Sequence[Rectangle]], flat: torch.Tensor) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    at = 0
    for block in (block for row in rows for block in row):
        yield block, flat[at : at + prod(block.size)].view(block.size)
        at += prod(block.size)
