"""Applies a function to whole matrices, of which each rank stores only rows, columns or a span of a bucket.

    parts of a bucket's matrices  --to owner ranks-->  whole matrices  --function-->  --back-->  parts

Each matrix has one owner among the ranks that hold the bucket, so the matrices are divided among these ranks. If
several ranks hold the same part, one of them sends it. A matrix is assembled before the function is applied, so the
result does not depend on the sharding.
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
"""A function from a matrix to a matrix of the same shape."""


class Rectangle(NamedTuple):
    """A rectangle of one of a bucket's matrices."""

    matrix: int  # index of the matrix
    start: tuple[int, ...]  # first row and column
    size: tuple[int, ...]  # rows and columns

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


class _Plan(NamedTuple):
    """The exchanges of one bucket. The outer lists have an entry for each rank of the axis."""

    shapes: dict[int, tuple[int, ...]]
    """Index -> shape of each matrix that this rank owns."""
    own: list[Rectangle]
    """The blocks in this rank's span, in order."""
    sent: list[list[Rectangle]]
    """Blocks that this rank sends to each owner."""
    received: list[list[Rectangle]]
    """Blocks that this rank receives, as owner, from each rank."""
    returned: list[list[Rectangle]]
    """Blocks of results that this rank, as owner, returns to each rank."""
    regained: list[list[Rectangle]]
    """Blocks of results that each owner returns to this rank."""


class WholeMatrices:
    """Applies functions to whole matrices. The plan of a bucket's exchanges is computed at its first use."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}

    def mapped(self, bucket: Bucket, flat: torch.Tensor, function: MatrixFunction) -> torch.Tensor:
        """Apply `function` to each matrix of the bucket and return this rank's span of the results.

        flat: this rank's span of the matrices. Padding of the result is 0.
        """
        plan = self._plans.get(id(bucket))
        if plan is None:
            plan = self._plans[id(bucket)] = _plan(bucket)
        axis, device = bucket.data.with_tp, bucket.own_weights.device  # the optimizer state may be on the host
        # 1 send each block to the owner of its matrix
        parts = dict(zip(plan.own, (part for _, _, part in bucket.rectangles(flat, bucket.span[0])), strict=True))
        received = exchange(_joined(parts, plan.sent, flat).to(device), axis, _sizes(plan.sent), _sizes(plan.received))
        # 2 assemble whole matrices and apply the function
        whole = {number: received.new_empty(shape) for number, shape in plan.shapes.items()}
        for block, part in _blocks(plan.received, received):
            block.of(whole[block.matrix]).copy_(part)
        results = {number: function(matrix) for number, matrix in whole.items()}
        # 3 send the results back
        blocks = {block: block.of(results[block.matrix]) for row in plan.returned for block in row}
        returned = exchange(
            _joined(blocks, plan.returned, received), axis, _sizes(plan.returned), _sizes(plan.regained)
        )
        out = torch.zeros_like(flat)
        destinations = dict(zip(plan.own, (part for _, _, part in bucket.rectangles(out, bucket.span[0])), strict=True))
        for block, part in _blocks(plan.regained, returned):
            destinations[block].copy_(part)
        return out


def _plan(bucket: Bucket) -> _Plan:
    """Return the plan of a bucket. All ranks of the bucket compute their plans from the same table of blocks, so that
    the plans match."""
    axis = bucket.data.with_tp
    shapes = {shard.name: shard.whole for shard, _ in bucket.runs()}
    names = list(shapes)
    begin, end = bucket.span
    own_blocks = [
        Rectangle(names.index(shard.name), start, tuple(part.shape))
        for shard, start, part in bucket.rectangles(torch.empty(end - begin, device="meta"), begin)
    ]
    held_blocks = [
        [Rectangle(matrix, (row, column), (rows, columns)) for matrix, row, column, rows, columns in blocks]
        for blocks in gather_json(
            [[block.matrix, *block.start, *block.size] for block in own_blocks], axis, bucket.own_weights.device
        )
    ]
    owners = _owners([shapes[name] for name in names], axis.size)
    holders: dict[Rectangle, list[int]] = defaultdict(list)
    for rank, row in enumerate(held_blocks):
        for block in row:
            holders[block].append(rank)
    elements = [sum(prod(block.size) for block in holders if block.matrix == number) for number in range(len(names))]
    assert elements == [prod(shapes[name]) for name in names], f"{axis.name}: holds no whole matrices"
    # (sender, owner) -> blocks. An owner that holds a block sends the block to itself. For other blocks, the sender
    # depends on the matrix, so that the ranks share the work.
    table: dict[tuple[int, int], list[Rectangle]] = defaultdict(list)
    for block, ranks in holders.items():
        owner = owners[block.matrix]
        table[owner if owner in ranks else ranks[block.matrix % len(ranks)], owner].append(block)
    everyone = range(axis.size)
    return _Plan(
        {number: shapes[name] for number, name in enumerate(names) if owners[number] == axis.index},
        own_blocks,
        [table[axis.index, rank] for rank in everyone],
        [table[rank, axis.index] for rank in everyone],
        [[block for block in held_blocks[rank] if owners[block.matrix] == axis.index] for rank in everyone],
        [[block for block in own_blocks if owners[block.matrix] == rank] for rank in everyone],
    )


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Return the owner of each matrix. Matrices are assigned in descending order of work, each to the rank with the
    least work so far.

    >>> _owners([(4, 4), (8, 8), (4, 4), (4, 4)], 2)
    [1, 0, 1, 1]
    """
    work, owners = [0] * size, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -prod(shapes[number]) * min(shapes[number])):
        owners[number] = rank = work.index(min(work))
        work[rank] += prod(shapes[number]) * min(shapes[number])
    return owners


def _joined(
    parts: dict[Rectangle, torch.Tensor], rows: Sequence[Sequence[Rectangle]], like: torch.Tensor
) -> torch.Tensor:
    return torch.cat([like.new_empty(0), *(parts[block].reshape(-1) for row in rows for block in row)])


def _sizes(rows: Sequence[Sequence[Rectangle]]) -> list[int]:
    return [sum(prod(block.size) for block in row) for row in rows]


def _blocks(rows: Sequence[Sequence[Rectangle]], flat: torch.Tensor) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    position = 0
    for block in (block for row in rows for block in row):
        yield block, flat[position : position + prod(block.size)].view(block.size)
        position += prod(block.size)
