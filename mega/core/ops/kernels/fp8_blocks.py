"""Casts to fp8 with one scale per block, in one pass. A program reads a tile of 128 x 128, which consists of whole
blocks of both shapes in both directions. GEMMs use cuBLAS, or a Triton kernel on devices for which cuBLAS has no such
GEMMs.

Scales have the layout that cuBLAS requires:

    rows of 1 x 128       inverse [r, k / 128] with strides (1, r)
    blocks of 128 x 128   inverse [r / 128, k / 128] with strides (k / 128 rounded up to a multiple of 4, 1)
"""

from __future__ import annotations

import torch

from mega.core.config.sections import FP8_BLOCK as BLOCK
from mega.core.device import block_scaled_matmuls
from mega.core.ops.block_scales import LIMIT
from mega.core.ops.fp8 import FORWARD, TINY
from mega.core.ops.fp8_blocks import BlockCast
from mega.core.ops.kernels.language import cdiv, jit, launch, tl
from mega.core.ops.operand import Operand

WARPS = 4
"""Warps of a program that casts a tile of BLOCK x BLOCK. By rows and columns, 4 warps cast at 2.4 TB/s on an H100, 8
warps at 1.6 TB/s; a copy reaches 3.0 TB/s."""
WEIGHT_WARPS, MULTIPLYING = 8, 8
"""Warps of a program that casts a block of a weight, and of one that multiplies."""
ALIGNED = 4
"""For blocks of 128 x 128, the distance between two rows of scales must be a multiple of this number."""


@jit
def scales(largest, LIMIT: tl.constexpr, TINY: tl.constexpr):
    """Return (factor, inverse) for each block, as in `block_scales.quantise`. largest: the largest magnitudes in fp32,
    which this function rounds to bf16, half to even."""
    bits = largest.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    largest = tl.maximum(bits.to(tl.float32, bitcast=True), TINY)
    limit = tl.zeros_like(largest) + LIMIT
    return tl.div_rn(limit, largest), tl.div_rn(largest, limit)


@jit
def _cast_rows(
    x_at, rows_at, columns_at, row_scales_at, column_scales_at, tall, wide,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < tall)[:, None] & (column < wide)[None, :]
    offset = row[:, None] * wide + column[None, :]
    x = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
    if ROWS:
        factor, inverse = scales(tl.max(tl.abs(x), 1), LIMIT, TINY)
        tl.store(rows_at + offset, (x * factor[:, None]).to(rows_at.dtype.element_ty), mask)
        tl.store(row_scales_at + tl.program_id(0).to(tl.int64) * tall + row, inverse, row < tall)
    if COLUMNS:
        factor, inverse = scales(tl.max(tl.abs(x), 0), LIMIT, TINY)
        narrow = tl.trans((x * factor[None, :]).to(columns_at.dtype.element_ty))
        tl.store(columns_at + column[:, None] * tall + row[None, :], narrow, tl.trans(mask))
        tl.store(column_scales_at + tl.program_id(1).to(tl.int64) * wide + column, inverse, column < wide)


@jit
def _cast_blocks(
    x_at, rows_at, columns_at, row_scales_at, column_scales_at, tall, wide, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_row, block_column = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row, column = block_row * BLOCK + tl.arange(0, BLOCK), block_column * BLOCK + tl.arange(0, BLOCK)
    mask = (row < tall)[:, None] & (column < wide)[None, :]
    offset = row[:, None] * wide + column[None, :]
    x = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
    factor, inverse = scales(tl.max(tl.max(tl.abs(x), 1), 0), LIMIT, TINY)
    narrow = (x * factor).to(rows_at.dtype.element_ty if ROWS else columns_at.dtype.element_ty)
    if ROWS:
        tl.store(rows_at + offset, narrow, mask)
        tl.store(row_scales_at + block_row * row_stride + block_column, inverse)
    if COLUMNS:
        tl.store(columns_at + column[:, None] * tall + row[None, :], tl.trans(narrow), tl.trans(mask))
        tl.store(column_scales_at + block_column * column_stride + block_row, inverse)


@jit
def _multiply(
    a_at, b_at, out_at, a_scales_at, b_scales_at, m, n, k, b_stride,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a_scales_at += row
    b_scales_at += tl.program_id(0).to(tl.int64) * b_stride if BLOCKS else column
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for begin in range(0, k, BLOCK):
        depth = begin + tl.arange(0, BLOCK)
        a = tl.load(a_at + row[:, None] * k + depth[None, :], (row < m)[:, None] & (depth < k)[None, :], 0.0)
        b = tl.load(b_at + column[None, :] * k + depth[:, None], (column < n)[None, :] & (depth < k)[:, None], 0.0)
        scale = tl.load(a_scales_at, row < m, 0.0)[:, None]
        scale = scale * (tl.load(b_scales_at) if BLOCKS else tl.load(b_scales_at, column < n, 0.0)[None, :])
        total += tl.dot(a, b) * scale
        a_scales_at += m
        b_scales_at += 1 if BLOCKS else n
    mask = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_at + row[:, None] * n + column[None, :], total.to(out_at.dtype.element_ty), mask)


def cast_rows(x: torch.Tensor, *, rows: bool = False, columns: bool = False) -> BlockCast:
    """Implement `ops.fp8_blocks.cast_rows`."""
    x = x.contiguous()
    tall, wide = x.shape
    cast = BlockCast(new_rows(x, tall, wide) if rows else None, new_rows(x, wide, tall) if columns else None)
    _launch(_cast_rows, x, cast, WARPS)
    return cast


def cast_blocks(
    weight: torch.Tensor, *, rows: bool = False, columns: bool = False, into: BlockCast | None = None
) -> BlockCast:
    """Implement `ops.fp8_blocks.cast_blocks`."""
    weight = weight.contiguous()
    tall, wide = weight.shape
    if into is None:
        into = BlockCast(
            _blocks(weight, tall, wide) if rows else None, _blocks(weight, wide, tall) if columns else None
        )
    strides = tuple(0 if each is None else each.inverse.stride(0) for each in into)
    _launch(_cast_blocks, weight, into, WEIGHT_WARPS, *strides)
    return into


def new_rows(x: torch.Tensor, tall: int, wide: int) -> Operand:
    """Allocate an operand [tall, wide] in rows of 1 x 128."""
    inverse = torch.empty(cdiv(wide, BLOCK), tall, dtype=torch.float32, device=x.device).t()
    return Operand(torch.empty(tall, wide, dtype=FORWARD, device=x.device), inverse)


def _blocks(x: torch.Tensor, tall: int, wide: int) -> Operand:
    """Allocate an operand [tall, wide] in blocks of 128 x 128."""
    count = cdiv(wide, BLOCK)
    stride = cdiv(count, ALIGNED) * ALIGNED
    inverse = torch.empty(cdiv(tall, BLOCK), stride, dtype=torch.float32, device=x.device)[:, :count]
    return Operand(torch.empty(tall, wide, dtype=FORWARD, device=x.device), inverse)


def _launch(kernel: object, x: torch.Tensor, cast: BlockCast, warps: int, *strides: int) -> None:
    (rows, row_scales), (columns, column_scales) = ((None, None) if each is None else each for each in cast)
    tall, wide = x.shape
    launch(
        kernel, (cdiv(wide, BLOCK), cdiv(tall, BLOCK)),
        x, rows, columns, row_scales, column_scales, tall, wide, *strides,
        ROWS=rows is not None, COLUMNS=columns is not None, LIMIT=LIMIT, TINY=TINY, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip


def multiply(
    a: Operand, b: Operand, dtype: torch.dtype, bias: torch.Tensor | None = None, *, blocks: bool = True
) -> torch.Tensor:
    """Implement `ops.fp8_blocks.multiply`. cuBLAS requires every dimension to be a multiple of 16."""
    device = a.narrow.device
    by_cublas = device.type == "meta" or block_scaled_matmuls(device)
    out = (_by_cublas if by_cublas else _by_kernel)(a, b, dtype, blocks)
    return out if bias is None else out.add_(bias)


def _by_cublas(a: Operand, b: Operand, dtype: torch.dtype, blocks: bool) -> torch.Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    kind, scales = ScalingType.BlockWise1x128, b.inverse
    if blocks:  # cuBLAS expects the transpose, including the padding that aligns its columns
        kind, stride = ScalingType.BlockWise128x128, b.inverse.stride(0)
        scales = b.inverse.as_strided((stride, len(b.inverse)), (1, stride))
    return scaled_mm(a.narrow, b.narrow.t(), a.inverse, ScalingType.BlockWise1x128, scales, kind, output_dtype=dtype)


def _by_kernel(a: Operand, b: Operand, dtype: torch.dtype, blocks: bool) -> torch.Tensor:
    (m, k), n = a.narrow.shape, len(b.narrow)
    out = torch.empty(m, n, dtype=dtype, device=a.narrow.device)
    launch(
        _multiply, (cdiv(n, BLOCK), cdiv(m, BLOCK)),
        a.narrow, b.narrow, out, a.inverse, b.inverse, m, n, k, b.inverse.stride(0),
        BLOCKS=blocks, BLOCK=BLOCK, num_warps=MULTIPLYING,
    )  # fmt: skip
    return out
