"""The block of a logical tensor that a rank holds: always one rectangle, plus padding at its end.

This module uses only shapes and axis coordinates; it does not depend on torch, process groups or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mega.core.architecture import Tensor, padded
from mega.core.architecture.tensor import TENSOR_AXES
from mega.core.config.resolve import divisors


@dataclass(frozen=True)
class Shard:
    """One rank's block of one logical tensor."""

    tensor: Tensor
    start: tuple[int, ...]
    """First index of the rectangle in each dim of the logical tensor."""
    size: tuple[int, ...]
    """Shape of the rectangle without padding; 0 in a dim where the rank holds only vocabulary padding."""
    local: tuple[int, ...]
    """Shape of the block in memory: `size` plus padding at the end."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the logical tensor."""
        return self.tensor.shape

    @property
    def elements(self) -> int:
        """Number of elements in memory, including padding."""
        return prod(self.local)


def shard(tensor: Tensor, coordinates: Mapping[str, tuple[int, int]]) -> Shard:
    """Return the block of `tensor` at `coordinates` (axis -> (index, size); an absent axis has size 1).

    >>> from mega.core.architecture import Cut, Init
    >>> vocabulary = Tensor("t", (10, 4), (0,), Init(), (Cut(0, "tp", 10, multiple=4),))
    >>> block = shard(vocabulary, {"tp": (1, 2)})
    >>> block.start, block.size, block.local
    ((8, 0), (2, 4), (8, 4))

    Errors: ValueError if the number of parts is not divisible by the size of the axis.
    """
    start, size, local = [0] * len(tensor.shape), list(tensor.shape), list(tensor.shape)
    for cut in tensor.cuts:
        index, ranks = coordinates.get(cut.axis, (0, 1))
        parts = padded(cut.parts, ranks, cut.multiple) if cut.multiple else cut.parts
        if parts % ranks:
            raise ValueError(
                f"--{cut.axis} {ranks}: {tensor.name} has {parts} parts; "
                f"they must divide by {cut.axis} (valid: {', '.join(map(str, divisors(parts)))})"
            )
        width = tensor.shape[cut.dim] // cut.parts  # number of elements of one indivisible part: a head's width, or 1
        run = parts // ranks * width
        begin = min(index * run, tensor.shape[cut.dim])
        start[cut.dim] = begin
        size[cut.dim] = min(run, tensor.shape[cut.dim] - begin)
        local[cut.dim] = run
    return Shard(tensor, tuple(start), tuple(size), tuple(local))


def on_tensor_rank(index: int, tp: int) -> dict[str, tuple[int, int]]:
    """Coordinates of one of `tp` tensor ranks, in a layout that cuts experts like all other tensors."""
    return {axis: (index, tp) for axis in TENSOR_AXES.values()}


def span_rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return elements [begin, end) of a row-major block as at most three rectangles (start, size), in order.

    A flat range (an optimizer shard) of a matrix consists of the tail of a row, whole rows, and the head of a row.

    >>> span_rectangles((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    >>> span_rectangles((7,), 2, 5)
    [((2,), (3,))]
    """
    assert len(shape) in (1, 2), "logical tensors are vectors or matrices"
    if begin >= end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    columns = shape[1]
    rectangles: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while begin < end:
        row, column = divmod(begin, columns)
        if column or end - begin < columns:  # part of a row
            width = min(columns - column, end - begin)
            rectangles.append(((row, column), (1, width)))
            begin += width
        else:
            rows = (end - begin) // columns
            rectangles.append(((row, 0), (rows, columns)))
            begin += rows * columns
    return rectangles
