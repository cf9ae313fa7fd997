"""GEMMs of a linear layer in fp8. Operands are in 8 bits with one scale per tensor, and sums are in fp32 (Micikevicius
et al. 2022).

    e4m3  inputs and weights    3 bits of mantissa, up to 448
    e5m2  gradients of outputs  2 bits of mantissa, up to 57344

The scale of an operand maps its largest magnitude to the limit of the format. Scales are computed from the current
tensor rather than from earlier steps, so checkpoints need no history. A scale is computed from the local tensor, so
rounding depends on the parallel layout and the microbatch size. This module emulates fp8 in plain torch; kernels/fp8.py
contains the fast implementation.

Casts move many bytes, so they are shared where this is possible. An input is cast once, by rows for `forward` and by
columns for `wgrad`, and only the columns are saved. A weight may have a function `shared_cast` that returns a cast by
rows and columns, which all passes of a step share (parallel/weight_casts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from mega.core.ops.fused_casts import FusedCasts, largest_of, prepared
from mega.core.ops.matmuls import Factor, Matmuls
from mega.core.ops.operand import Input, Operand

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

    @property
    def by_rows(self) -> Operand:
        """x, for a GEMM that sums over c."""
        assert self.rows is not None
        return Operand(self.rows, self.inverse)

    @property
    def by_columns(self) -> Operand:
        """x^T, for a GEMM that sums over r."""
        assert self.columns is not None
        return Operand(self.columns, self.inverse)


def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = False,
    columns: bool = False,
    into: Cast | None = None,
    largest: torch.Tensor | None = None,
) -> Cast:
    """Cast x [r, c] to an fp8 `dtype`, as `rows`, transposed as `columns`, or both. Non-finite numbers become NaN.

    into: an earlier cast with the same forms of a tensor of the same shape, to be overwritten and returned. largest:
    the result of `largest_of` for x.

    >>> x = torch.tensor([[1.0, -2.0]])
    >>> found = cast(x, torch.float8_e4m3fn, rows=True)
    >>> found.rows.tolist(), round(found.inverse.item() * 448, 6)
    ([[224.0, -448.0]], 2.0)
    """
    largest = (x.abs().amax().float() if largest is None else largest.amax()).clamp(min=TINY)
    narrow = (x.float() * (LIMITS[dtype] / largest)).to(dtype)
    result = Cast(narrow if rows else None, narrow.t().contiguous() if columns else None, largest / LIMITS[dtype])
    if into is None:
        return result
    overwrite(into, result)
    return into


def overwrite(old: object, new: object) -> None:
    """Copy a cast to an earlier cast with the same forms."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        for pair in zip(old, new, strict=True):
            overwrite(*pair)
    elif isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        old.copy_(new)


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


AnyCast = TypeVar("AnyCast")
"""The type of the casts of an implementation."""


@dataclass(frozen=True)
class NarrowMatmuls(Matmuls, Generic[AnyCast]):
    """Base class of a linear layer's GEMMs in fp8, with scales per tensor or per block."""

    wide: Matmuls
    """The GEMMs of layers in which fp8 would cost too much accuracy."""
    saves_narrow: bool = True
    """Whether a layer saves its input in fp8. If norms and activations are recomputed, other ops save the remaining
    inputs, so a copy in fp8 would need additional memory."""
    accumulate: Callable[..., bool] | None = None
    """Function that computes wgrad in place, `cublaslt_fp8.accumulate`, or None."""
    fused: FusedCasts | None = None

    def exact(self) -> Matmuls:
        return self.wide

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.forward(x, factor.weight, factor.bias)

    def cast_weight(
        self, weight: torch.Tensor, *, rows: bool = False, columns: bool = False, into: AnyCast | None = None
    ) -> AnyCast:
        """Cast a weight, with the arguments of `cast`."""
        raise NotImplementedError

    def _weight(self, weight: torch.Tensor, *, rows: bool = False, columns: bool = False) -> AnyCast:
        """Return the shared cast of a weight, or cast the weight if it has none."""
        shared: Callable[[], AnyCast] | None = getattr(weight, "shared_cast", None)
        return self.cast_weight(weight, rows=rows, columns=columns) if shared is None else shared()

    @property
    def overwrites(self) -> bool:
        return True

    def write_wgrad(self, main_grad: torch.Tensor, grad: AnyCast, x: Input) -> None:
        self._put_wgrad(main_grad, grad, x, overwrite=True)

    def accumulate_wgrad(self, main_grad: torch.Tensor, grad: AnyCast, x: Input) -> None:
        self._put_wgrad(main_grad, grad, x, overwrite=False)

    def _put_wgrad(self, main_grad: torch.Tensor, grad: AnyCast, x: Input, *, overwrite: bool) -> None:
        a, b = self._factors(grad, x)
        if self.accumulate is not None and self.accumulate(main_grad, a, b, overwrite=overwrite):
            return
        if overwrite:
            main_grad.copy_(self._gemm(a, b, torch.float32))
        else:
            main_grad.add_(self._gemm(a, b, torch.float32))

    def wgrad(self, grad: AnyCast, x: Input) -> torch.Tensor:
        return self._gemm(*self._factors(grad, x), torch.float32 if isinstance(x, Operand) else x.dtype)

    def _factors(self, grad: AnyCast, x: Input) -> tuple[Operand, Operand]:
        """Return the operands dy^T and x^T of `wgrad`."""
        raise NotImplementedError

    def _gemm(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        """Return a b^T for the operands from `_factors`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8Matmuls(NarrowMatmuls[Cast]):
    """The GEMMs of a linear layer in fp8."""

    cast: Callable[..., Cast] = cast
    """The function `cast`, or a faster implementation."""
    multiply: Callable[..., torch.Tensor] = multiply
    """The function `multiply`, or a faster implementation."""

    @property
    def words(self) -> str:  # type: ignore[override]
        return "fp8, emulated" if self.multiply is multiply else "cuBLAS in fp8"

    def operands(self, x: torch.Tensor) -> tuple[Operand, Operand] | None:
        if not self.saves_narrow:
            return None
        cast = self._cast_input(x, rows=True, columns=True)
        return cast.by_rows, cast.by_columns

    def forward(
        self,
        x: Input,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        a = x if isinstance(x, Operand) else self._cast_input(x, rows=True).by_rows
        b = self._weight(weight, rows=True)
        return self.multiply(a.narrow, b.rows, a.inverse, b.inverse, weight.dtype, bias, fast=True)

    def prepare(self, grad: torch.Tensor) -> Cast:
        fused = prepared(grad)
        if isinstance(fused, Cast):
            return fused
        return self.cast(grad, BACKWARD, rows=True, columns=True, largest=largest_of(grad))

    def dgrad(self, grad: Cast, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        b = self._weight(weight, columns=True)
        return self.multiply(grad.rows, b.columns, grad.inverse, b.inverse, weight.dtype)

    def cast_weight(
        self, weight: torch.Tensor, *, rows: bool = False, columns: bool = False, into: Cast | None = None
    ) -> Cast:
        return self.cast(weight.detach(), FORWARD, rows=rows, columns=columns, into=into)

    def _cast_input(self, x: torch.Tensor, **forms: bool) -> Cast:
        return self.cast(x.detach(), FORWARD, **forms, largest=largest_of(x))

    def _factors(self, grad: Cast, x: Input) -> tuple[Operand, Operand]:
        b = x if isinstance(x, Operand) else self._cast_input(x, columns=True).by_columns
        return grad.by_columns, b

    def _gemm(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        return self.multiply(a.narrow, b.narrow, a.inverse, b.inverse, dtype)
