"""Products of few rows, with the norm before them and what follows, and the place of keys in the cache.

A program takes a few outputs and their whole rows of the weight, which it asks for before anything else: nothing that
was computed is needed for that, so the norm of x is ready by the time they arrive. All is multiplied and added up in
fp32, each output by one program, in a fixed order whatever the other rows are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mega.core.ops.few_rows import FewRows, NormOf
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

MOST_ROWS, MOST_INS = 1, 1 << 15
"""Rows and inputs at the most: a program keeps x in its registers. From two rows on tensor cores, as cuBLAS and
fp8_weights.py use them, take less time (Llama-2 7B's products on H200: 47 and 73 us for 4 rows)."""
TOGETHER = 8
"""Heads that one program places."""


class RowTile(NamedTuple):
    """outs: weights' rows that a program has in flight. warps. tiles: of a program, one after the other; stages: of
    these in flight."""

    outs: int
    warps: int
    tiles: int = 1
    stages: int = 1


@jit
def _weights(weight_at, out, outs, ins, part):
    there = (out < outs)[None, :, None] & (part < ins)
    at = weight_at + out.to(tl.int64)[None, :, None] * ins + part
    return tl.load(at, there, 0.0, eviction_policy="evict_first")


@jit
def _inputs(
    x_at, norm_at, shift_at, rows, ins, x_row, eps, part, ROWS: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """[ROWS, 1, INS]"""
    row = tl.arange(0, ROWS)[:, None, None]
    there = (row < rows) & (part < ins)
    x = tl.load(x_at + row * x_row + part, there, 0.0).to(tl.float32)
    if NORM:
        if CENTRED:
            x = tl.where(there, x - (tl.sum(x, 2) / ins)[:, :, None], 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 2) / ins + eps)[:, :, None]
        x = x * tl.load(norm_at + part, part < ins, 0.0).to(tl.float32)
        if CENTRED:
            x += tl.load(shift_at + part, part < ins, 0.0).to(tl.float32)
    return x


@jit
def _outputs(weights, x, scale_at, bias_at, out, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """[ROWS, OUTS]"""
    y = tl.sum(weights.to(tl.float32) * x, 2)
    if SCALED:
        y = y * tl.load(scale_at + out, real, 0.0)[None, :]
    if BIAS:
        y += tl.load(bias_at + out, real, 0.0).to(tl.float32)[None, :]
    return y


@jit
def _finish(
    first, second, x, scale_at, bias_at, y_at, out, outs, rows, y_row,
    ROWS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    real = out < outs
    y = _outputs(first, x, scale_at, bias_at, out, real, SCALED, BIAS)
    if GATE:
        y = y * tl.sigmoid(y) * _outputs(second, x, scale_at, bias_at, out + outs, real, SCALED, BIAS)
    elif KIND >= 0:
        y = value(y, KIND)
    row = tl.arange(0, ROWS)
    at = y_at + row[:, None] * y_row + out[None, :]
    there = (row < rows)[:, None] & real[None, :]
    if ADD:
        y += tl.load(at, there, 0.0).to(tl.float32)
    tl.store(at, y.to(y_at.dtype.element_ty), there)


@jit
def _linear(
    x_at, weight_at, scale_at, bias_at, norm_at, shift_at, y_at, rows, outs, ins, x_row, y_row, eps,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """GATE: the weight has the gates' rows, then as many more."""
    part = tl.arange(0, INS)[None, None, :]
    if OVERLAP:
        before_next()
    if TILES == 1:
        out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        first = _weights(weight_at, out, outs, ins, part)
        second = first
        if GATE:
            second = _weights(weight_at + outs.to(tl.int64) * ins, out, outs, ins, part)
        if OVERLAP:
            after_kernel()
        x = _inputs(x_at, norm_at, shift_at, rows, ins, x_row, eps, part, ROWS, NORM, CENTRED)
        _finish(first, second, x, scale_at, bias_at, y_at, out, outs, rows, y_row, ROWS, SCALED, BIAS, KIND, GATE, ADD)
    else:
        if OVERLAP:
            after_kernel()
        x = _inputs(x_at, norm_at, shift_at, rows, ins, x_row, eps, part, ROWS, NORM, CENTRED)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            out = (tl.program_id(0) + tile * tl.num_programs(0)) * OUTS + tl.arange(0, OUTS)
            first = _weights(weight_at, out, outs, ins, part)
            second = first
            if GATE:
                second = _weights(weight_at + outs.to(tl.int64) * ins, out, outs, ins, part)
            _finish(
                first, second, x, scale_at, bias_at, y_at, out, outs, rows, y_row,
                ROWS, SCALED, BIAS, KIND, GATE, ADD
            )  # fmt: skip


def tile_of(ins: int, size: int, gate: bool) -> RowTile:
    """size: bytes of a weight. The fastest of Llama-2 7B's products on H200 (tests/gpu/decoding.py); longer rows of a
    weight leave room for fewer.

    >>> tile_of(4096, 2, False), tile_of(11008, 1, False)
    (RowTile(outs=4, warps=4, tiles=1, stages=1), RowTile(outs=4, warps=16, tiles=4, stages=2))
    """
    wide = next_power_of_2(ins)
    if wide > 4096:
        outs = 2 if wide <= 16384 else 1
        return RowTile(2 * outs, 16, 4, 2) if size == 1 and not gate else RowTile(outs, 16)
    return RowTile((8 if size == 1 else 4) // (1 + gate), 4)


def takes(rows: int, factor: Factor) -> bool:
    return rows <= MOST_ROWS and factor.weight.shape[1] <= MOST_INS and factor.weight.is_contiguous()


def linear(
    x: torch.Tensor,
    factor: Factor,
    norm: NormOf | None = None,
    activation: str | None = None,
    into: torch.Tensor | None = None,
    tile: RowTile | None = None,
) -> torch.Tensor:
    """`FewRows.linear`."""
    weight, bias, scale = factor.weight, factor.bias, factor.scale
    (rows, ins), gate = x.shape, activation == "swiglu"
    outs = len(weight) // 2 if gate else len(weight)
    tile = tile or tile_of(ins, weight.element_size(), gate)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = into
    if y is None:
        dtype = norm.weight.dtype if norm is not None else x.dtype
        y = torch.empty(rows, outs, dtype=dtype if scale is not None else weight.dtype, device=x.device)
    assert y.shape == (rows, outs) and y.stride(1) == 1
    launch(
        _linear, (cdiv(cdiv(outs, tile.outs), tile.tiles),), x, weight, scale, bias,
        None if norm is None else norm.weight, None if norm is None else norm.bias, y, rows, outs, ins, x.stride(0),
        y.stride(0), 0.0 if norm is None else norm.eps, ROWS=next_power_of_2(rows), OUTS=tile.outs,
        INS=next_power_of_2(ins), NORM=norm is not None, CENTRED=norm is not None and norm.bias is not None,
        SCALED=scale is not None, BIAS=bias is not None,
        KIND=-1 if gate or activation is None else KINDS[activation], GATE=gate, ADD=into is not None,
        TILES=tile.tiles, STAGES=tile.stages, num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return y


@jit
def _place(
    fused_at, cos_at, sin_at, lines_at, rows_at, stride,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A thread reads both components of a pair before it writes one, so queries are turned where they lie."""
    in_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    part = tl.arange(0, BLOCK)[None, :]
    kept = (head >= HEADS) & (head < HEADS + 2 * KV)
    source = fused_at + token * stride + head * WIDTH
    target = rows_at + (tl.load(lines_at + token) * (2 * KV) + head - HEADS) * WIDTH
    if HALF > 0:
        real = (head < HEADS + 2 * KV) & (part < HALF)
        cos = tl.load(cos_at + token * HALF + part, part < HALF, 0.0)
        sin = tl.load(sin_at + token * HALF + part, part < HALF, 0.0)
        first = tl.load(source + part, real, 0.0)
        second = tl.load(source + HALF + part, real, 0.0)
        a, b, turned = first.to(tl.float32), second.to(tl.float32), head < HEADS + KV
        first = tl.where(turned, (a * cos - b * sin).to(first.dtype), first)
        second = tl.where(turned, (b * cos + a * sin).to(second.dtype), second)
        tl.store(source + part, first, real & (head < HEADS))
        tl.store(source + HALF + part, second, real & (head < HEADS))
        tl.store(target + part, first, real & kept)
        tl.store(target + HALF + part, second, real & kept)
    if 2 * HALF < WIDTH:
        for begin in tl.static_range(2 * HALF, WIDTH, BLOCK):
            rest = kept & (begin + part < WIDTH)
            tl.store(target + begin + part, tl.load(source + begin + part, rest, 0.0), rest)


def place(
    fused: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor,
    at: torch.Tensor,
    heads: int,
) -> None:
    """`FewRows.place`."""
    tokens, all_heads, width = fused.shape
    assert fused.stride()[1:] == (width, 1) and rows.is_contiguous() and rows.dtype == fused.dtype
    cos, sin = (None, None) if rotary is None else rotary
    half = 0 if cos is None else cos.shape[-1]
    launch(
        _place, (tokens, cdiv(all_heads, TOGETHER)), fused, cos, sin, at, rows, fused.stride(0), HEADS=heads,
        KV=(all_heads - heads) // 2, WIDTH=width, HALF=half, BLOCK=next_power_of_2(half or width), TOGETHER=TOGETHER,
        **overlapping(fused.device),
    )  # fmt: skip


FEW_ROWS = FewRows(takes, linear, place)
