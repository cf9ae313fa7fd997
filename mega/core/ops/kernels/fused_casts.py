"""Kernels that compute a gradient and cast it to fp8, so that the gradient is never stored in 16 bits.

With one scale per tensor, a first pass computes only the largest magnitude, and a second pass computes the gradient
again and casts it. Reading the inputs twice moves fewer bytes than writing the gradient and reading it again. With
scales of blocks, a program computes whole blocks, so one pass is enough. Gradients are rounded to 16 bits before they
are cast, so results are bitwise equal to those of separate casts.
"""

from __future__ import annotations

from math import gcd

import torch

from mega.core.config.sections import FP8_BLOCK as BLOCK
from mega.core.ops.block_scales import LIMIT
from mega.core.ops.fp8 import BACKWARD, LIMITS, TINY, Cast
from mega.core.ops.fp8_blocks import BlockCast
from mega.core.ops.fused_casts import FusedCasts
from mega.core.ops.kernels.activation import gate_gradients
from mega.core.ops.kernels.fp8 import MAXIMA, new_cast, new_largest, read_largest, update_largest
from mega.core.ops.kernels.fp8_blocks import WARPS as BLOCK_WARPS
from mega.core.ops.kernels.fp8_blocks import new_rows, scales
from mega.core.ops.kernels.language import cdiv, jit, launch, next_power_of_2, tl

TALL, WIDE, WARPS = 64, 64, 8
"""Rows, columns and warps of a tile that is cast with one scale per tensor. On an H100, both passes over a gated
activation together read and write 2.9 TB/s, where a copy reaches 3.0 TB/s."""
READ_TALL, READ_WIDE, READ_WARPS = 32, 256, 8
"""Rows, columns and warps of a tile of which only the largest magnitude is computed."""
TOKENS, HEADS, HEAD_WARPS = 32, 16, 8
"""Tokens, maximum number of heads, and warps of a program that handles heads with one scale per tensor. The program
reads cosines and sines once for all its heads."""


@jit
def _store(by_rows, by_columns, row, column, mask, tall, wide, rows_at, columns_at):
    """Store a tile of a tensor [tall, wide], which was multiplied by the factors of its rows and of its columns."""
    offset = row.to(tl.int64)[:, None] * wide + column[None, :]
    transposed = column.to(tl.int64)[:, None] * tall + row[None, :]
    tl.store(rows_at + offset, by_rows.to(rows_at.dtype.element_ty), mask)
    tl.store(columns_at + transposed, tl.trans(by_columns.to(columns_at.dtype.element_ty)), tl.trans(mask))


# -- gated activations


@jit
def _gate_gradients(x_at, grad_at, tall, width, KIND: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Return the tiles of this program of the gradients of gate and up, rounded to the dtype of x, and the rows,
    columns and mask of the tiles."""
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    mask = (row < tall)[:, None] & (column < width)[None, :]
    address = x_at + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
    gate = tl.load(address, mask, 0.0).to(tl.float32)
    up = tl.load(address + width, mask, 0.0).to(tl.float32)
    grad = tl.load(grad_at + row.to(tl.int64)[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
    grad_gate, grad_up = gate_gradients(gate, up, grad, KIND)
    dtype = x_at.dtype.element_ty
    return grad_gate.to(dtype).to(tl.float32), grad_up.to(dtype).to(tl.float32), row, column, mask


@jit
def _gate_largest(
    x_at, grad_at, largest_at, tall, width,
    KIND: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    grad_gate, grad_up, _, _, _ = _gate_gradients(x_at, grad_at, tall, width, KIND, TALL, WIDE)
    top = tl.maximum(tl.abs(grad_gate), tl.abs(grad_up))
    update_largest(largest_at, top, tl.program_id(0) + tl.program_id(1), MAXIMA)


@jit
def _gate_cast(
    x_at, grad_at, rows_at, columns_at, largest_at, inverse_at, tall, width, limit, tiny,
    KIND: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    grad_gate, grad_up, row, column, mask = _gate_gradients(x_at, grad_at, tall, width, KIND, TALL, WIDE)
    largest = read_largest(largest_at, tiny, MAXIMA)
    factor = limit / largest
    grad_gate, grad_up = grad_gate * factor, grad_up * factor
    _store(grad_gate, grad_gate, row, column, mask, tall, 2 * width, rows_at, columns_at)
    _store(grad_up, grad_up, row, column + width, mask, tall, 2 * width, rows_at, columns_at)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_at, largest / limit)


def gate_gradient(x: torch.Tensor, grad: torch.Tensor, kind: int) -> Cast:
    """Implement `FusedCasts.gate_gradient` with one scale per tensor."""
    tall, width = x.shape[0], x.shape[1] // 2
    largest, cast = new_largest(x.device), new_cast(tall, 2 * width, BACKWARD, x.device)
    launch(
        _gate_largest, (cdiv(width, READ_WIDE), cdiv(tall, READ_TALL)), x, grad, largest, tall, width,
        KIND=kind, TALL=READ_TALL, WIDE=READ_WIDE, MAXIMA=MAXIMA, num_warps=READ_WARPS,
    )  # fmt: skip
    launch(
        _gate_cast, (cdiv(width, WIDE), cdiv(tall, TALL)),
        x, grad, cast.rows, cast.columns, largest, cast.inverse, tall, width, LIMITS[BACKWARD], TINY,
        KIND=kind, TALL=TALL, WIDE=WIDE, MAXIMA=MAXIMA, num_warps=WARPS,
    )  # fmt: skip
    return cast


# -- heads, whose gradients are rotated back


@jit
def _angles(cos_at, sin_at, token, tokens, HALF: tl.constexpr, TURNED: tl.constexpr):
    if TURNED:
        angle = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
        mask = (token < tokens)[:, None]
        cos, sin = tl.load(cos_at + angle, mask, 0.0), tl.load(sin_at + angle, mask, 0.0)
    else:
        cos = tl.zeros([1, 1], tl.float32)
        sin = cos
    return cos, sin


@jit
def _halves(grad_at, token, tokens, stride, cos, sin, HALF: tl.constexpr, TURNED: tl.constexpr):
    """Return the two halves of a head's gradient, rotated back and rounded to the dtype of the gradient."""
    mask = (token < tokens)[:, None]
    address = grad_at + token.to(tl.int64)[:, None] * stride + tl.arange(0, HALF)[None, :]
    first = tl.load(address, mask, 0.0).to(tl.float32)
    second = tl.load(address + HALF, mask, 0.0).to(tl.float32)
    if TURNED:
        dtype = grad_at.dtype.element_ty
        turned_first, turned_second = first * cos + second * sin, second * cos - first * sin
        first, second = turned_first.to(dtype).to(tl.float32), turned_second.to(dtype).to(tl.float32)
    return first, second


@jit
def _heads_largest(
    grad_at, cos_at, sin_at, largest_at, tokens, token_stride, head_stride,
    HALF: tl.constexpr, TURNED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cos, sin = _angles(cos_at, sin_at, token, tokens, HALF, TURNED)
    top = tl.zeros([TOKENS, HALF], tl.float32)
    for number in range(HEADS):
        head_at = grad_at + (tl.program_id(1) * HEADS + number) * head_stride
        first, second = _halves(head_at, token, tokens, token_stride, cos, sin, HALF, TURNED)
        top = tl.maximum(top, tl.maximum(tl.abs(first), tl.abs(second)))
    update_largest(largest_at, top, tl.program_id(0) + tl.program_id(1), MAXIMA)


@jit
def _heads_cast(
    grad_at, cos_at, sin_at, rows_at, columns_at, largest_at, inverse_at, tokens, token_stride, head_stride, wide,
    limit, tiny,
    HALF: tl.constexpr, TURNED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Cast the gradient of q, k or v to its columns of the fused gradient [tokens, wide], where rows_at begins."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cos, sin = _angles(cos_at, sin_at, token, tokens, HALF, TURNED)
    largest = read_largest(largest_at, tiny, MAXIMA)
    factor = limit / largest
    for number in range(HEADS):
        head = tl.program_id(1) * HEADS + number
        first, second = _halves(grad_at + head * head_stride, token, tokens, token_stride, cos, sin, HALF, TURNED)
        first, second = first * factor, second * factor
        column = head * (2 * HALF) + tl.arange(0, HALF)
        mask = (token < tokens)[:, None] & (column < wide)[None, :]
        _store(first, first, token, column, mask, tokens, wide, rows_at, columns_at)
        _store(second, second, token, column + HALF, mask, tokens, wide, rows_at, columns_at)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_at, largest / limit)


@jit
def _row_factor(top, row, column_block, tall, scales_at, LIMIT: tl.constexpr, TINY: tl.constexpr):
    """Return the factors of the rows of a tile, for their largest magnitudes, and store the inverses."""
    factor, inverse = scales(top, LIMIT, TINY)
    tl.store(scales_at + column_block.to(tl.int64) * tall + row, inverse, row < tall)
    return factor[:, None]


@jit
def _column_factor(top, row_block, column, wide, scales_at, LIMIT: tl.constexpr, TINY: tl.constexpr):
    """Return the factors of the columns of a tile, for their largest magnitudes, and store the inverses. All columns
    must exist."""
    factor, inverse = scales(top, LIMIT, TINY)
    tl.store(scales_at + row_block.to(tl.int64) * wide + column, inverse)
    return factor[None, :]


@jit
def _heads_cast_blocks(
    grad_at, cos_at, sin_at, rows_at, columns_at, row_scales_at, column_scales_at, tokens, token_stride, head_stride,
    wide,
    HALF: tl.constexpr, TURNED: tl.constexpr, TOKENS: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Cast the gradient of q, k or v, whose heads are blocks of the fused gradient [tokens, wide]. Elements and scales
    are stored from where rows_at, columns_at and their scales begin."""
    token_block, head = tl.program_id(0), tl.program_id(1)
    token = token_block * TOKENS + tl.arange(0, TOKENS)
    cos, sin = _angles(cos_at, sin_at, token, tokens, HALF, TURNED)
    first, second = _halves(grad_at + head * head_stride, token, tokens, token_stride, cos, sin, HALF, TURNED)
    top = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    by_rows = _row_factor(top, token, head, tokens, row_scales_at, LIMIT, TINY)
    column = head * (2 * HALF) + tl.arange(0, HALF)
    mask = (token < tokens)[:, None] & (column < wide)[None, :]
    by_columns = _column_factor(tl.max(tl.abs(first), 0), token_block, column, wide, column_scales_at, LIMIT, TINY)
    _store(first * by_rows, first * by_columns, token, column, mask, tokens, wide, rows_at, columns_at)
    column += HALF
    by_columns = _column_factor(tl.max(tl.abs(second), 0), token_block, column, wide, column_scales_at, LIMIT, TINY)
    _store(second * by_rows, second * by_columns, token, column, mask, tokens, wide, rows_at, columns_at)


def heads_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Cast | None:
    """Implement `FusedCasts.heads_gradient` with one scale per tensor."""
    (tokens, _, width), half = q.shape, cos.shape[1]
    if 2 * half != width or half != next_power_of_2(half):
        return None
    wide = width * sum(grad.shape[1] for grad in (q, k, v))
    largest, cast = new_largest(q.device), new_cast(tokens, wide, BACKWARD, q.device)
    rows, columns = cast.by_rows.narrow, cast.by_columns.narrow
    for grad in (q, k, v):
        shared = gcd(grad.shape[1], HEADS)
        launch(
            _heads_largest, (cdiv(tokens, TOKENS), grad.shape[1] // shared),
            grad, cos, sin, largest, tokens, grad.stride(0), grad.stride(1),
            HALF=half, TURNED=grad is not v, TOKENS=TOKENS, HEADS=shared, MAXIMA=MAXIMA, num_warps=HEAD_WARPS,
        )  # fmt: skip
    end = 0
    for grad in (q, k, v):
        shared = gcd(grad.shape[1], HEADS)
        begin, end = end, end + grad.shape[1] * width
        launch(
            _heads_cast, (cdiv(tokens, TOKENS), grad.shape[1] // shared),
            grad, cos, sin, rows[:, begin:end], columns[begin:end], largest, cast.inverse, tokens,
            grad.stride(0), grad.stride(1), wide, LIMITS[BACKWARD], TINY,
            HALF=half, TURNED=grad is not v, TOKENS=TOKENS, HEADS=shared, MAXIMA=MAXIMA, num_warps=HEAD_WARPS,
        )  # fmt: skip
    return cast


def heads_gradient_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> BlockCast | None:
    """Implement `FusedCasts.heads_gradient` with scales of blocks, if a head is as wide as a block."""
    (tokens, _, width), half = q.shape, cos.shape[1]
    if 2 * half != width or width != BLOCK:
        return None
    total = width * sum(grad.shape[1] for grad in (q, k, v))
    rows, columns = new_rows(q, tokens, total), new_rows(q, total, tokens)
    last = 0
    for grad in (q, k, v):
        first, last = last, last + grad.shape[1]
        begin, end = first * width, last * width
        launch(
            _heads_cast_blocks, (cdiv(tokens, BLOCK), grad.shape[1]),
            grad, cos, sin, rows.narrow[:, begin:end], columns.narrow[begin:end],
            rows.inverse[:, first:last], columns.inverse[begin:end],
            tokens, grad.stride(0), grad.stride(1), total,
            HALF=half, TURNED=grad is not v, TOKENS=BLOCK, LIMIT=LIMIT, TINY=TINY, num_warps=BLOCK_WARPS,
        )  # fmt: skip
    return BlockCast(rows, columns)


TENSOR = FusedCasts(heads_gradient, gate_gradient)
"""The casts with one scale per tensor."""
BLOCKS = FusedCasts(heads_gradient_blocks)
"""The casts with scales of blocks. The gradient of a gated activation is cast separately: fused kernels, which compute
tiles of 128 x 128 of two tensors, took as long on an H100 as the two kernels."""
