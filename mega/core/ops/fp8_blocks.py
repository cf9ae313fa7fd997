"""GEMMs of a linear layer in fp8 with one scale per block, as in the training of DeepSeek-V3 (DeepSeek-AI 2024, section
3.3). Operands are in e4m3, and sums are in fp32.

    forward   y  = x W^T      x in rows of 1 x 128, W in blocks of 128 x 128
    dgrad     dx = dy W       dy in rows of 1 x 128, W in blocks of 128 x 128
    wgrad     dW = dy^T x     dy^T and x^T in rows of 1 x 128, along the tokens

A block covers neighbouring elements of one logical tensor, if the sizes on a rank are multiples of 128
(config/check.py). The rounded operands then do not depend on the parallel layout or the microbatch size. This module
emulates the GEMMs in plain torch; kernels/fp8_blocks.py contains the fast implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mega.core.config.sections import FP8_BLOCK
from mega.core.ops.block_scales import WEIGHT_BLOCK, dequantise, quantise
from mega.core.ops.fp8 import NarrowMatmuls, overwrite
from mega.core.ops.fused_casts import prepared
from mega.core.ops.operand import Input, Operand

ROW_BLOCK = (1, FP8_BLOCK)
"""Shape of a block of an activation or of a gradient. The columns lie along the dim that the GEMM sums over."""


class BlockCast(NamedTuple):
    """A tensor x [r, c] as operands [r, k] of GEMMs, in e4m3. Scales have the shape [r, k / 128] or [r / 128, k / 128]
    and any strides."""

    rows: Operand | None  # x, for a GEMM that sums over c
    columns: Operand | None  # x^T, for a GEMM that sums over r


def cast_rows(x: torch.Tensor, *, rows: bool = False, columns: bool = False) -> BlockCast:
    """Cast x [r, c] in blocks of 1 x 128: as `rows`, transposed as `columns`, or both. The two casts are rounded
    separately, because their blocks differ."""
    return BlockCast(
        Operand(*quantise(x, ROW_BLOCK)) if rows else None,
        Operand(*quantise(x.t().contiguous(), ROW_BLOCK)) if columns else None,
    )


def cast_blocks(
    weight: torch.Tensor, *, rows: bool = False, columns: bool = False, into: BlockCast | None = None
) -> BlockCast:
    """Cast a weight [out, in] in blocks of 128 x 128: as `rows`, transposed as `columns`, or both. Both have the same
    elements and scales. into: as in `fp8.cast`."""
    narrow, inverse = quantise(weight, WEIGHT_BLOCK)
    result = BlockCast(
        Operand(narrow, inverse) if rows else None,
        Operand(narrow.t().contiguous(), inverse.t()) if columns else None,
    )
    if into is None:
        return result
    overwrite(into, result)
    return into


def multiply(
    a: Operand, b: Operand, dtype: torch.dtype, bias: torch.Tensor | None = None, *, blocks: bool = True
) -> torch.Tensor:
    """Compute a b^T + bias, [m, n] in `dtype`, for a [m, k] in rows of 1 x 128, b [n, k] and bias [n]. Sums are in
    fp32. blocks: whether b is in blocks of 128 x 128 instead of rows of 1 x 128."""
    wide = [
        dequantise(each.narrow, each.inverse, block, torch.float32)
        for each, block in ((a, ROW_BLOCK), (b, WEIGHT_BLOCK if blocks else ROW_BLOCK))
    ]
    out = wide[0] @ wide[1].t()
    return (out if bias is None else out + bias.float()).to(dtype)


@dataclass(frozen=True)
class BlockMatmuls(NarrowMatmuls[BlockCast]):
    """The GEMMs of a linear layer in fp8 with one scale per block."""

    cast_rows: Callable[..., BlockCast] = cast_rows
    """The function `cast_rows`, or a faster implementation."""
    cast_blocks: Callable[..., BlockCast] = cast_blocks
    """The function `cast_blocks`, or a faster implementation."""
    multiply: Callable[..., torch.Tensor] = multiply
    """The function `multiply`, or a faster implementation."""

    @property
    def words(self) -> str:  # type: ignore[override]
        return "fp8 in blocks, emulated" if self.multiply is multiply else "fp8 with scales of blocks"

    def operands(self, x: torch.Tensor) -> tuple[Operand, Operand] | None:
        if not self.saves_narrow:
            return None
        rows, columns = self.cast_rows(x.detach(), rows=True, columns=True)
        assert rows is not None and columns is not None
        return rows, columns

    def forward(
        self,
        x: Input,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        a = x if isinstance(x, Operand) else self.cast_rows(x.detach(), rows=True).rows
        return self.multiply(a, self._weight(weight, rows=True).rows, weight.dtype, bias)

    def prepare(self, grad: torch.Tensor) -> BlockCast:
        fused = prepared(grad)
        return fused if isinstance(fused, BlockCast) else self.cast_rows(grad, rows=True, columns=True)

    def dgrad(self, grad: BlockCast, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None, "--fp8 excludes --tp-overlap"
        return self.multiply(grad.rows, self._weight(weight, columns=True).columns, weight.dtype)

    def cast_weight(
        self, weight: torch.Tensor, *, rows: bool = False, columns: bool = False, into: BlockCast | None = None
    ) -> BlockCast:
        return self.cast_blocks(weight.detach(), rows=rows, columns=columns, into=into)

    def _factors(self, grad: BlockCast, x: Input) -> tuple[Operand, Operand]:
        b = x if isinstance(x, Operand) else self.cast_rows(x.detach(), columns=True).columns
        assert grad.columns is not None and b is not None
        return grad.columns, b

    def _gemm(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        return self.multiply(a, b, dtype, blocks=False)
