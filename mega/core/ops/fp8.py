"""GEMMs of a linear layer in fp8. Operands are in 8 bits with one scale per tensor, and sums are in fp32 (Micikevicius
et al. 2022).

    e4m3  inputs and weights    3 bits of mantissa, up to 448
    e5m2  gradients of outputs  2 bits of mantissa, up to 57344

The scale of an operand maps its largest magnitude to the limit of the format. Scales are computed from the current
tensor rather than from earlier steps, so checkpoints need no history. A scale is computed from the local tensor, so
rounding depends on the parallel layout and the microbatch size. This module emulates fp8 in plain torch; kernels/fp8.py
contains the fast implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mega.core.ops.matmuls import Factor, Matmuls

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""fp8 dtype -> the largest finite number of the format."""
FORWARD, BACKWARD = LIMITS
TINY = 1e-30
"""Lower bound for the largest magnitude of a tensor, which avoids a division by 0 for tensors of zeros."""


class Cast(NamedTuple):
    """A tensor x [r, c] in fp8, where x = inverse * rows = inverse * columns^T, up to rounding."""

    rows: torch.Tensor | None  # [r, c]
    columns: torch.Tensor | None  # [c, r]
    inverse: torch.Tensor  # fp32 scalar


def cast(x: torch.Tensor, dtype: torch.dtype, *, rows: bool = False, columns: bool = False) -> Cast:
    """Cast x [r, c] to an fp8 `dtype`, as `rows`, transposed as `columns`, or both. Non-finite numbers become NaN.

    >>> x = torch.tensor([[1.0, -2.0]])
    >>> found = cast(x, torch.float8_e4m3fn, rows=True)
    >>> found.rows.tolist(), round(found.inverse.item() * 448, 6)
    ([[224.0, -448.0]], 2.0)
    """
    largest = x.abs().amax().float().clamp(min=TINY)
    narrow = (x.float() * (LIMITS[dtype] / largest)).to(dtype)
    return Cast(narrow if rows else None, narrow.t().contiguous() if columns else None, largest / LIMITS[dtype])


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_a: torch.Tensor,
    inverse_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """Compute a b^T inverse_a inverse_b + bias, [m, n] in `dtype`, for a [m, k] and b [n, k] in fp8 and bias [n]. Sums
    are in fp32.

    fast: whether to allow less exact accumulation if this is faster on the device.
    """
    out = (a.float() @ b.float().t()) * (inverse_a * inverse_b)
    return (out if bias is None else out + bias.float()).to(dtype)


@dataclass(frozen=True)
class NarrowMatmuls(Matmuls):
    """Base class of a linear layer's GEMMs in fp8, with scales per tensor or per block."""

    wide: Matmuls
    """The GEMMs of layers in which fp8 would cost too much accuracy."""

    def exact(self) -> Matmuls:
        return self.wide

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.forward(x, factor.weight, factor.bias)


@dataclass(frozen=True)
class Fp8Matmuls(NarrowMatmuls):
    """The GEMMs of a linear layer in fp8."""

    cast: Callable[..., Cast] = cast
    """The function `cast`, or a faster implementation."""
    multiply: Callable[..., torch.Tensor] = multiply
    """The function `multiply`, or a faster implementation."""

    @property
    def words(self) -> str:  # type: ignore[override]
        return "fp8, emulated" if self.multiply is multiply else "cuBLAS in fp8"

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        a, b = (self.cast(factor.detach(), FORWARD, rows=True) for factor in (x, weight))
        return self.multiply(a.rows, b.rows, a.inverse, b.inverse, x.dtype, bias, fast=True)

    def prepare(self, grad: torch.Tensor) -> Cast:
        return self.cast(grad, BACKWARD, rows=True, columns=True)

    def dgrad(self, grad: Cast, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        b = self.cast(weight.detach(), FORWARD, columns=True)
        return self.multiply(grad.rows, b.columns, grad.inverse, b.inverse, weight.dtype)

    def wgrad(self, grad: Cast, x: torch.Tensor) -> torch.Tensor:
        return self._gradient(grad, x, x.dtype)

    def accumulate_wgrad(self, main_grad: torch.Tensor, grad: Cast, x: torch.Tensor) -> None:
        main_grad.add_(self._gradient(grad, x, torch.float32))

    def _gradient(self, grad: Cast, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        b = self.cast(x.detach(), FORWARD, columns=True)
        return self.multiply(grad.columns, b.columns, grad.inverse, b.inverse, dtype)
