"""Adafactor, which stores the second moments of a matrix as one value per row and per column, and clips the RMS of
updates.

    R, C    running means of g^2 over each row and each column     n + m values for an n x m matrix
    V       R C / mean R; for a vector, running means of g^2
    u       g / sqrt V, divided by max(1, rms(u) / clip)
    p       p - rate u - lr decay p

Source: Shazeer and Stern 2018, algorithms 4 and 5, without momentum. Means are over whole logical tensors, across all
ranks that hold shards of a tensor. The rate is lr or, if `relative`, max(eps, rms p) x min(lr, 1 / sqrt step).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

import torch

from mega.core.ops.square_sum import square_sums
from mega.core.optim.rule import Allocator, FlatState, Ranks, ShardState, StepArgs
from mega.core.shard import Shard

SMALLEST = 1e-30
"""Constant added to squared gradients, to avoid a division by zero if a row's gradient is zero (the paper's first
epsilon)."""

LEAST_SIZE = 1e-3
"""Lower limit of the RMS of weights, for relative learning rates (the paper's second epsilon)."""

ROWS, COLUMNS = "factors/rows", "factors/columns"


@dataclass(frozen=True)
class Adafactor:
    """Adafactor with its constants."""

    decay_rate: float = 0.8
    """Exponent of the decay of running means, which is 1 - step^-decay_rate."""
    clip: float = 1.0
    """Maximum RMS of an update."""
    relative: bool = False
    """Whether the learning rate is relative to the RMS of the weights."""

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        begin, end = owned.bucket.span
        first = begin + owned.decay_end
        owned.moments = {"moment2": FlatState(first, allocator.zeros(end - first))}
        for shard, _ in _matrices(owned):
            rows, columns = shard.whole
            owned.factors[f"{ROWS}/{shard.name}"] = allocator.zeros(rows)
            owned.factors[f"{COLUMNS}/{shard.name}"] = allocator.zeros(columns)

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        decay = 1 - args.step**-self.decay_rate
        # 1 update the running means with the squared gradients
        self._take(owned, grad, ranks, decay)
        # 2 compute the update: the gradient divided by the root of the second moments
        update = torch.zeros_like(grad)
        self._divide(owned, grad, update, decay)
        # 3 compute the RMS of update and weights over whole tensors
        runs = list(owned.bucket.runs())
        squares = square_sums([x[run] for _, run in runs for x in (update, master)])
        totals = ranks.sums(owned.bucket, squares).view(-1, 2)
        elements = torch.tensor([prod(shard.whole) for shard, _ in runs], dtype=totals.dtype, device=totals.device)
        sizes = (totals / elements[:, None]).sqrt()
        # 4 decay the weights, clip the update and apply it
        master[: owned.decay_end].mul_(1 - args.lr * args.decay)
        for (_, run), (size, weight) in zip(runs, sizes.to(update.dtype), strict=True):
            rate = args.lr if not self.relative else weight.clamp(min=LEAST_SIZE) * min(args.lr, 1 / sqrt(args.step))
            master[run].sub_(update[run] * (rate / (size / self.clip).clamp(min=1.0)))

    def _take(self, owned: ShardState, grad: torch.Tensor, ranks: Ranks, decay: float) -> None:
        """Update the running means of rows and columns with this step's squared gradients, summed over all ranks."""
        step_factors = {key: torch.zeros_like(factor) for key, factor in owned.factors.items()}
        if not step_factors:
            return
        for shard, (row, column), part in owned.bucket.rectangles(grad[: owned.decay_end], owned.bucket.span[0]):
            squares = part.square()
            step_factors[f"{ROWS}/{shard.name}"][row : row + part.shape[0]] += squares.sum(1)
            step_factors[f"{COLUMNS}/{shard.name}"][column : column + part.shape[1]] += squares.sum(0)
        sums = ranks.sums(owned.bucket, torch.cat(list(step_factors.values())))
        totals = torch.split(sums, [len(one) for one in step_factors.values()])
        # In a matrix [n, m], the mean of a row is over m squares, and the mean of a column over n. `factors` has rows
        # first, so the lengths are m, n.
        lengths = (length for shard, _ in _matrices(owned) for length in reversed(shard.whole))
        for factor, total, length in zip(owned.factors.values(), totals, lengths, strict=True):
            factor.mul_(decay).add_(total / length + SMALLEST, alpha=1 - decay)

    def _divide(self, owned: ShardState, grad: torch.Tensor, update: torch.Tensor, decay: float) -> None:
        """Write the gradient divided by the root of the second moments into `update`."""
        begin, end = owned.bucket.span[0], owned.decay_end
        parts = zip(
            owned.bucket.rectangles(grad[:end], begin), owned.bucket.rectangles(update[:end], begin), strict=True
        )
        for (shard, (row, column), from_), (_, _, into) in parts:
            rows, columns = (owned.factors[f"{kind}/{shard.name}"] for kind in (ROWS, COLUMNS))
            row_scale = (rows[row : row + into.shape[0]] / rows.mean()).rsqrt()
            column_scale = columns[column : column + into.shape[1]].rsqrt()
            torch.mul(from_ * row_scale[:, None], column_scale, out=into)
        vectors, moment = grad[end:], owned.moments["moment2"].values
        moment.mul_(decay).add_(vectors.square() + SMALLEST, alpha=1 - decay)
        torch.mul(vectors, moment.rsqrt(), out=update[end:])


def _matrices(owned: ShardState) -> Iterator[tuple[Shard, slice]]:
    """Yield all logical matrices of the bucket, including matrices without elements in this rank's span."""
    return ((shard, run) for shard, run in owned.bucket.runs() if len(shard.whole) == 2)
