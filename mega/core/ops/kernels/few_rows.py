"""GEMMs with one row, fused with the preceding norm and the following operation, and a kernel that stores keys in the
cache.

A program computes a few outputs. It starts to load the weight rows for these outputs before x, because these loads do
not depend on the previous kernel. Short rows are loaded as a whole, and long rows in chunks. All products and sums are
in fp32, and each output is computed by a single program. With 8-bit weights, the speed is limited by instructions as
well as by memory. Converting and multiplying one weight takes two and a half instructions, so the rest of a thread's
work should be shared by many weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mega.core.ops.few_rows import FewRows, NormOf
from mega.core.ops.heads import Rotary
from mega.core.ops.kernels.activation import KINDS, value
from mega.core.ops.kernels.language import (
    after_kernel,
    before_next,
    cdiv,
    in_turn,
    jit,
    launch,
    next_power_of_2,
    overlapping,
    tl,
)
from mega.core.ops.matmuls import Factor

MOST_INS = 1 << 15
"""Maximum number of inputs for a weight with 16 or more bits. The limit exists because a program keeps x in
registers."""
LEAST_REST = 256
"""Minimum number of inputs of a second tile. For fewer inputs, a single padded tile is faster."""
TOGETHER = 8
"""Number of heads that one program stores."""


class RowTile(NamedTuple):
    """The tile of a GEMM that one program computes."""

    outs: int  # number of outputs (rows of the weight)
    warps: int
    chunk: int = 0  # number of inputs per step; 0 loads all weights before x
    stages: int = 1  # number of chunks whose weights are in flight


@jit
def _weights(row_at, part, real, ins, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(row_at + part, eviction_policy="evict_first")
    return tl.load(row_at + part, real[:, None] & (part < ins), 0.0, eviction_policy="evict_first")


@jit
def _vector(x_at, part, ins, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_at + part).to(tl.float32)
    return tl.load(x_at + part, part < ins, 0.0).to(tl.float32)


@jit
def _moments(x_at, ins, eps, CHUNK: tl.constexpr):
    """Return the mean and the inverse standard deviation of x, which is read from memory."""
    part = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, ins, CHUNK):
        total += tl.load(x_at + start + part, start + part < ins, 0.0).to(tl.float32)
    mean = tl.sum(total, 0) / ins
    squares = tl.zeros([CHUNK], tl.float32)
    for start in range(0, ins, CHUNK):
        mask = start + part < ins
        centred = tl.where(mask, tl.load(x_at + start + part, mask, 0.0).to(tl.float32) - mean, 0.0)
        squares += centred * centred
    return mean, tl.rsqrt(tl.sum(squares, 0) / ins + eps)


@jit
def _moments_of(x, far_x, part, far, ins, eps, REST: tl.constexpr, CENTRED: tl.constexpr):
    """Return the mean and the inverse standard deviation of x, which is in registers. For RMSNorm (not CENTRED), the
    mean is 0."""
    mean = 0.0
    if CENTRED:
        total = tl.sum(tl.sum(x, 1), 0)
        if REST:
            total += tl.sum(tl.sum(far_x, 1), 0)
        mean = total / ins
        x = tl.where(part < ins, x - mean, 0.0)
        far_x = tl.where(far < ins, far_x - mean, 0.0)
    squares = tl.sum(tl.sum(x * x, 1), 0)
    if REST:
        squares += tl.sum(tl.sum(far_x * far_x, 1), 0)
    return mean, tl.rsqrt(squares / ins + eps)


@jit
def _scaled(y, scale_at, bias_at, out, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    if SCALED:
        y = y * tl.load(scale_at + out, real, 0.0)
    if BIAS:
        y += tl.load(bias_at + out, real, 0.0).to(tl.float32)
    return y


@jit
def _normed(
    x, scale_at, shift_at, part, ins, mean, rstd, EVEN: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Normalise x. For RMSNorm, the caller multiplies the sum by rstd instead, because rstd is the same for all
    inputs."""
    if CENTRED:
        x = tl.where(part < ins, (x - mean) * rstd, 0.0)
    scale = _vector(scale_at, part, ins, EVEN)
    if OFFSET:
        scale += 1.0
    x = x * scale
    if CENTRED:
        x += _vector(shift_at, part, ins, EVEN)
    return x


@jit
def _at_once(
    x_at, row_at, up_at, norm_at, shift_at, real, ins, eps,
    CHUNK: tl.constexpr, REST: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    OFFSET: tl.constexpr, GATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply with all inputs in registers, as a tile of CHUNK inputs and a tile of REST inputs."""
    # A thread must have the same 8 consecutive inputs of the weights and of x. Otherwise Triton moves weights between
    # threads.
    part = tl.multiple_of(tl.arange(0, CHUNK), 8)[None, :]
    first = _weights(row_at, part, real, ins, EVEN)
    second, far, far_first, far_second = first, part, first, first
    if GATE:
        second = _weights(up_at, part, real, ins, EVEN)
    if REST:
        far = tl.multiple_of(CHUNK + tl.arange(0, REST), 8)[None, :]
        far_first = _weights(row_at, far, real, ins, EVEN)
        if GATE:
            far_second = _weights(up_at, far, real, ins, EVEN)
    if OVERLAP:
        after_kernel()
    x = _vector(x_at, part, ins, EVEN)
    far_x = x
    if REST:
        far_x = _vector(x_at, far, ins, EVEN)
    if NORM:
        mean, rstd = _moments_of(x, far_x, part, far, ins, eps, REST, CENTRED)
        x = _normed(x, norm_at, shift_at, part, ins, mean, rstd, EVEN, CENTRED, OFFSET)
        if REST:
            far_x = _normed(far_x, norm_at, shift_at, far, ins, mean, rstd, EVEN, CENTRED, OFFSET)
    y, up = tl.sum(first.to(tl.float32) * x, 1), tl.sum(second.to(tl.float32) * x, 1)
    if REST:
        y += tl.sum(far_first.to(tl.float32) * far_x, 1)
        if GATE:
            up += tl.sum(far_second.to(tl.float32) * far_x, 1)
    if NORM and not CENTRED:
        y, up = y * rstd, up * rstd
    return y, up


@jit
def _in_chunks(
    x_at, row_at, up_at, norm_at, shift_at, real, ins, eps,
    OUTS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    CENTRED: tl.constexpr, OFFSET: tl.constexpr, GATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply in chunks of inputs. A thread immediately sums the products of its 8 consecutive inputs, which leaves
    registers for more outputs."""
    if OVERLAP:
        after_kernel()
    mean, rstd = 0.0, 1.0
    if CENTRED:
        mean, rstd = _moments(x_at, ins, eps, CHUNK)
    first = tl.zeros([OUTS, CHUNK // 8], tl.float32)
    second = tl.zeros([OUTS, CHUNK // 8], tl.float32)
    squares = tl.zeros([1, CHUNK // 8], tl.float32)
    for start in tl.range(0, ins, CHUNK, num_stages=STAGES):
        part = start + tl.arange(0, CHUNK)[None, :]
        x = _vector(x_at, part, ins, EVEN)
        if NORM:
            if not CENTRED:
                squares += _by_eights(x * x, 1, CHUNK)
            x = _normed(x, norm_at, shift_at, part, ins, mean, rstd, EVEN, CENTRED, OFFSET)
        first += _by_eights(_weights(row_at, part, real, ins, EVEN).to(tl.float32) * x, OUTS, CHUNK)
        if GATE:
            second += _by_eights(_weights(up_at, part, real, ins, EVEN).to(tl.float32) * x, OUTS, CHUNK)
    y, up = tl.sum(first, 1), tl.sum(second, 1)
    if NORM and not CENTRED:
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / ins + eps)
        y, up = y * rstd, up * rstd
    return y, up


@jit
def _by_eights(terms, OUTS: tl.constexpr, CHUNK: tl.constexpr):
    return tl.sum(tl.reshape(terms, (OUTS, CHUNK // 8, 8)), 2)


@jit
def _linear(
    x_at, weight_at, scale_at, bias_at, norm_at, shift_at, y_at, outs, ins, eps,
    OUTS: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTS outputs of a linear layer. GATE: whether the weight contains the rows of a gate, followed by the
    rows of the up projection. EVEN: whether tiles cover the weight exactly."""
    if OVERLAP:
        before_next()
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    mask = out < outs
    row_at = weight_at + out.to(tl.int64)[:, None] * ins
    up_at = weight_at + (out.to(tl.int64) + outs)[:, None] * ins
    if WHOLE:
        y, up = _at_once(
            x_at, row_at, up_at, norm_at, shift_at, mask, ins, eps, CHUNK, REST, EVEN, NORM, CENTRED, OFFSET, GATE,
            OVERLAP,
        )  # fmt: skip
    else:
        y, up = _in_chunks(
            x_at, row_at, up_at, norm_at, shift_at, mask, ins, eps, OUTS, CHUNK, STAGES, EVEN, NORM, CENTRED, OFFSET,
            GATE, OVERLAP,
        )  # fmt: skip
    y = _scaled(y, scale_at, bias_at, out, mask, SCALED, BIAS)
    if GATE:
        y = y * tl.sigmoid(y) * _scaled(up, scale_at, bias_at, out + outs, mask, SCALED, BIAS)
    elif KIND >= 0:
        y = value(y, KIND)
    if ADD:
        y += tl.load(y_at + out, mask, 0.0).to(tl.float32)
    tl.store(y_at + out, y.to(y_at.dtype.element_ty), mask)


def tile_of(outs: int, ins: int, size: int, gate: bool) -> RowTile:
    """Choose the tile of a GEMM. size: number of bytes per weight element. These tiles are the fastest for Llama-2 7B
    on an H200 (tests/gpu/decoding.py).

    >>> tile_of(12288, 4096, 2, False), tile_of(4096, 11008, 1, False)
    (RowTile(outs=4, warps=4, chunk=0, stages=1), RowTile(outs=4, warps=4, chunk=0, stages=1))
    >>> tile_of(8192, 28672, 1, False)
    RowTile(outs=8, warps=4, chunk=2048, stages=3)
    """
    if size == 1:
        if ins > 12288:  # too many inputs for a program's registers
            return RowTile(8, 4, 2048, 3)
        return RowTile(4 if gate or ins > 8192 else 8, 4)
    padded = next_power_of_2(ins)
    if padded > 4096:
        return RowTile(2 if padded <= 16384 else 1, 16)
    return RowTile(2 if gate else 4, 4)


def cut(ins: int) -> tuple[int, int]:
    """Choose tile sizes CHUNK and REST for `ins` inputs: two powers of two, or a power of two and 0, with little
    padding.

    >>> cut(4096), cut(11008), cut(5120), cut(7168)
    ((4096, 0), (8192, 4096), (4096, 1024), (8192, 0))
    """
    padded = next_power_of_2(ins)
    rest = next_power_of_2(ins - padded // 2)
    return (padded // 2, rest) if LEAST_REST <= rest < padded // 2 else (padded, 0)


def takes(rows: int, factor: Factor) -> bool:
    """Whether `linear` supports this case, which must have a single row. For two or more rows, tensor cores (cuBLAS,
    fp8_weights.py) are faster. For example, gate and up of a 7B model in bf16 take 47 us with tensor cores and 73 us
    with FMAs, for 4 rows."""
    fits = factor.weight.element_size() == 1 or factor.weight.shape[1] <= MOST_INS
    return rows == 1 and fits and factor.weight.is_contiguous()


def linear(
    x: torch.Tensor,
    factor: Factor,
    norm: NormOf | None = None,
    activation: str | None = None,
    into: torch.Tensor | None = None,
    tile: RowTile | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Implement `FewRows.linear`. dtype: dtype of the result. None: the dtype documented for `FewRows.linear`."""
    weight, bias, scale = factor.weight, factor.bias, factor.scale
    (rows, ins), gate = x.shape, activation == "swiglu"
    assert rows == 1
    outs = len(weight) // 2 if gate else len(weight)
    tile = tile or tile_of(outs, ins, weight.element_size(), gate)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = into
    if y is None:
        wide = norm.weight.dtype if norm is not None else x.dtype
        dtype = dtype or (wide if scale is not None else weight.dtype)
        y = torch.empty(1, outs, dtype=dtype, device=x.device)
    assert y.shape == (1, outs) and y.stride(1) == 1
    chunk, rest = (tile.chunk, 0) if tile.chunk else cut(ins)
    even = outs % tile.outs == 0 and (ins % chunk == 0 if tile.chunk else chunk + rest == ins)
    launch(
        _linear, (cdiv(outs, tile.outs),), x, weight, scale, bias, None if norm is None else norm.weight,
        None if norm is None else norm.bias, y, outs, ins, 0.0 if norm is None else norm.eps, OUTS=tile.outs,
        CHUNK=chunk, REST=rest, WHOLE=not tile.chunk, STAGES=tile.stages, EVEN=even, NORM=norm is not None,
        CENTRED=norm is not None and norm.bias is not None, SCALED=scale is not None, BIAS=bias is not None,
        KIND=-1 if gate or activation is None else KINDS[activation], GATE=gate, ADD=into is not None,
        OFFSET=norm is not None and norm.form.offset,
        num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return y


@jit
def _place(
    fused_at, cos_at, sin_at, lines_at, rows_at, stride,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotate and store heads. A thread reads both components of a pair before writing either component, so queries can
    be rotated in place."""
    in_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    part = tl.arange(0, BLOCK)[None, :]
    is_cached = (head >= HEADS) & (head < HEADS + 2 * KV)
    source = fused_at + token * stride + head * WIDTH
    target = rows_at + (tl.load(lines_at + token) * (2 * KV) + head - HEADS) * WIDTH
    if HALF > 0:
        mask = (head < HEADS + 2 * KV) & (part < HALF)
        cos = tl.load(cos_at + token * HALF + part, part < HALF, 0.0)
        sin = tl.load(sin_at + token * HALF + part, part < HALF, 0.0)
        first = tl.load(source + part, mask, 0.0)
        second = tl.load(source + HALF + part, mask, 0.0)
        a, b, is_rotated = first.to(tl.float32), second.to(tl.float32), head < HEADS + KV
        first = tl.where(is_rotated, (a * cos - b * sin).to(first.dtype), first)
        second = tl.where(is_rotated, (b * cos + a * sin).to(second.dtype), second)
        tl.store(source + part, first, mask & (head < HEADS))
        tl.store(source + HALF + part, second, mask & (head < HEADS))
        tl.store(target + part, first, mask & is_cached)
        tl.store(target + HALF + part, second, mask & is_cached)
    if 2 * HALF < WIDTH:
        for begin in tl.static_range(2 * HALF, WIDTH, BLOCK):
            rest = is_cached & (begin + part < WIDTH)
            tl.store(target + begin + part, tl.load(source + begin + part, rest, 0.0), rest)


def place(
    fused: torch.Tensor,
    rotary: Rotary | None,
    rows: torch.Tensor,
    at: torch.Tensor,
    heads: int,
) -> None:
    """Implement `FewRows.place`."""
    tokens, all_heads, width = fused.shape
    assert fused.stride()[1:] == (width, 1) and rows.is_contiguous() and rows.dtype == fused.dtype
    cos, sin = (None, None) if rotary is None else rotary
    half = 0 if cos is None else cos.shape[-1]
    launch(
        _place, (tokens, cdiv(all_heads, TOGETHER)), fused, cos, sin, at, rows, fused.stride(0), HEADS=heads,
        KV=(all_heads - heads) // 2, WIDTH=width, HALF=half, BLOCK=next_power_of_2(half or width), TOGETHER=TOGETHER,
        **overlapping(fused.device),
    )  # fmt: skip


@jit
def _norm_heads(
    fused_at, q_at, k_at, stride, q_eps, k_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    in_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    part = tl.arange(0, BLOCK)[None, :]
    is_query, mask = head < HEADS, (head < HEADS + KV) & (part < WIDTH)
    at = fused_at + token * stride + head * WIDTH + part
    x = tl.load(at, mask, 0.0).to(tl.float32)
    q = tl.load(q_at + part, part < WIDTH, 0.0).to(tl.float32)
    k = tl.load(k_at + part, part < WIDTH, 0.0).to(tl.float32)
    factor = tl.where(is_query, q, k)
    if OFFSET:
        factor += 1.0
    eps = tl.where(is_query, q_eps, k_eps)
    rstd = tl.rsqrt(tl.sum(x * x, 1)[:, None] / WIDTH + eps)
    tl.store(at, (x * rstd * factor).to(fused_at.dtype.element_ty), mask)


def norm_heads(fused: torch.Tensor, q: NormOf, k: NormOf, heads: int) -> None:
    """Implement `FewRows.norm_heads`."""
    tokens, all_heads, width = fused.shape
    kv_heads = (all_heads - heads) // 2
    assert fused.stride()[1:] == (width, 1) and q.bias is None and k.bias is None and q.form.offset == k.form.offset
    launch(
        _norm_heads, (tokens, cdiv(heads + kv_heads, TOGETHER)), fused, q.weight, k.weight, fused.stride(0), q.eps,
        k.eps, HEADS=heads, KV=kv_heads, WIDTH=width, BLOCK=next_power_of_2(width), TOGETHER=TOGETHER,
        OFFSET=q.form.offset, **overlapping(fused.device),
    )  # fmt: skip


FEW_ROWS = FewRows(takes, linear, place, norm_heads)
