"""Muon, which makes the momentum of each matrix nearly orthogonal, so that steps in all directions have about equal
size.

    m <- mu m + (1 - mu) g                          Nesterov: u = mu m + (1 - mu) g, else u = m
    X <- u / |u|;  steps of  A = X X';  X <- a X + (b A + c A A) X          singular values towards 1
    p <- p - lr decay p - lr factor scale X

Source: Jordan et al. 2024, Liu et al. 2025; coefficients and scales of Megatron-core. Muon updates the matrices of
layers, which are in separate buckets; AdamW updates embeddings, the output layer, biases and norms. Each logical matrix
is made orthogonal separately, even if matrices are fused in memory (query, key and value; gate and up) or ranks hold
shards of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from math import sqrt

import torch

from mega.core.optim.adam import AdamW
from mega.core.optim.rule import Allocator, FlatState, Ranks, ShardState, StepArgs

Coefficients = tuple[tuple[float, float, float], ...]
"""Coefficients a, b, c of each Newton-Schulz step."""

COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
REPEATS_LAST = ("polar_express",)
"""Names of the coefficient lists whose last entry is repeated if there are more steps than entries. Other lists start
again from the first entry."""

SMALLEST_NORM = 1e-7
"""Lower limit of the norm by which a matrix is divided, so that a matrix of zeros stays zero."""


@dataclass(frozen=True)
class Muon:
    """Muon with its constants."""

    others: AdamW
    """The update rule for all tensors that are not matrices of a layer."""
    momentum: float = 0.95
    nesterov: bool = False
    coefficients: str = "quintic"
    """Name of a list in `COEFFICIENTS`."""
    steps: int = 5
    """Number of Newton-Schulz steps."""
    scale: str = "spectral"
    """Scale of the update of a matrix [out, in]. "spectral": sqrt(max(out, in)); "shape_scaling": sqrt(max(1, out /
    in)); "unit_rms_norm": sqrt(out / in)."""
    factor: float = 1.0
    """An additional factor of every matrix update."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the matrix products, unless masters are float64."""

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        if not owned.bucket.reduction.whole:
            self.others.start(owned, allocator)
            return
        begin, end = owned.bucket.span
        owned.moments = {"momentum": FlatState(begin, allocator.zeros(end - begin))}

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        if not owned.bucket.reduction.whole:
            self.others.step(owned, master, grad, ranks, args)
            return
        momentum = owned.moments["momentum"].values
        momentum.lerp_(grad, 1 - self.momentum)
        update = grad.lerp_(momentum, self.momentum) if self.nesterov else momentum
        update = ranks.matrices(owned.bucket, update, self.direction)
        master.mul_(1 - args.lr * args.decay).sub_(update, alpha=args.lr)

    def direction(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the update [out, in] of a matrix, without the learning rate."""
        out, columns = matrix.shape
        ratio = out / columns
        square: float = {"spectral": max(out, columns), "shape_scaling": max(1.0, ratio), "unit_rms_norm": ratio}[
            self.scale
        ]
        return orthogonal(matrix, self.polynomials(), self.dtype) * (self.factor * sqrt(square))

    def polynomials(self) -> Iterator[tuple[float, float, float]]:
        """Yield the coefficients a, b, c of each Newton-Schulz step."""
        entries = COEFFICIENTS[self.coefficients]
        repeats_last = self.coefficients in REPEATS_LAST
        return islice(chain(entries, repeat(entries[-1])) if repeats_last else cycle(entries), self.steps)


def orthogonal(matrix: torch.Tensor, steps: Iterator[tuple[float, float, float]], dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix with all singular values near 1, by Newton-Schulz steps in `dtype` (float64 for a float64
    matrix).

    A matrix with more rows than columns is transposed, so that X X' has the smaller size.
    """
    x: torch.Tensor = matrix / matrix.norm().clamp(min=SMALLEST_NORM)
    if matrix.dtype != torch.float64:
        x = x.to(dtype)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for a, b, c in steps:
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if transposed else x).to(matrix.dtype)
