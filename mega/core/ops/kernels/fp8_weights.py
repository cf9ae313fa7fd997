"""GEMMs with fp8 weights in Triton. Each weight is read only once, converted in registers, and multiplied by tensor
cores.

For a single row, few_rows.py is used instead. A program computes a tile of outputs and rows. If there are too few tiles
to fill the device, each program handles only a share of the inputs, and a second kernel sums the results of shares in a
fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mega.core.ops import fp8_weights
from mega.core.ops.kernels import few_rows
from mega.core.ops.kernels.language import cdiv, jit, launch, next_power_of_2, tl
from mega.core.ops.matmuls import Factor

WARPS, MOST_SHARES = 8 * 132, 8
"""WARPS: number of warps that fill a device. MOST_SHARES: maximum number of shares into which inputs are divided."""
BLOCK = 1024
"""Number of elements per program in the kernel that sums shares."""


class GemmTile(NamedTuple):
    """The tile that a program computes."""

    rows: int
    outs: int
    ins: int  # number of inputs per step
    warps: int
    stages: int


@jit
def _multiply(
    x_at, narrow_at, scale_at, y_at, rows, outs, ins, x_row, share,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y [shares, rows, outs]. share: number of inputs per share. Tiles of the same outputs run
    consecutively, so that their weights stay in the L2 cache."""
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) // tall * OUTS + tl.arange(0, OUTS)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, ins)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    x_from = x_at + row.to(tl.int64)[:, None] * x_row
    weights_from = narrow_at + out.to(tl.int64)[:, None] * ins
    for start in range(first, end, INS):
        part = start + tl.arange(0, INS)[None, :]
        weights = tl.load(weights_from + part, (out < outs)[:, None] & (part < end), 0.0)
        x = tl.load(x_from + part, (row < rows)[:, None] & (part < end), 0.0)
        # Weights are the left operand, because they are converted in registers, and tensor cores can read only the left
        # operand from registers.
        total = tl.dot(weights.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    if SCALED:
        total = total * tl.load(scale_at + out, out < outs, 0.0)[:, None]
    offset = y_at + (tl.program_id(1).to(tl.int64) * rows + row)[None, :] * outs + out[:, None]
    tl.store(offset, total.to(y_at.dtype.element_ty), (row < rows)[None, :] & (out < outs)[:, None])


@jit
def _add_up(part_at, scale_at, y_at, size, outs, shares, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for share in range(shares):
        total += tl.load(part_at + share * size + offset, offset < size, 0.0)
    total = total * tl.load(scale_at + offset % outs, offset < size, 0.0)
    tl.store(y_at + offset, total.to(y_at.dtype.element_ty), offset < size)


def tile_of(rows: int) -> GemmTile:
    if rows <= 64:
        return GemmTile(max(16, next_power_of_2(rows)), 64, 128, 4, 4)
    return GemmTile(128, 128, 64, 8, 3)


def shares_of(tiles: int, ins: int, tile: GemmTile) -> int:
    """Choose the number of shares into which inputs are divided.

    >>> shares_of(64, 11008, GemmTile(16, 64, 128, 4, 4)), shares_of(192, 4096, GemmTile(16, 64, 128, 4, 4))
    (5, 2)
    """
    return max(1, min(cdiv(WARPS, tiles * tile.warps), MOST_SHARES, ins // (4 * tile.ins)))


def tiled(
    x: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor, tile: GemmTile | None = None, shares: int | None = None
) -> torch.Tensor:
    """Compute `multiply` with tensor cores."""
    (rows, ins), outs = x.shape, len(narrow)
    tile = tile or tile_of(rows)
    tiles = cdiv(outs, tile.outs) * cdiv(rows, tile.rows)
    shares = shares or shares_of(tiles, ins, tile)
    share = cdiv(cdiv(ins, tile.ins), shares) * tile.ins
    y = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    part = y if shares == 1 else torch.empty(shares, rows, outs, dtype=torch.float32, device=x.device)
    launch(
        _multiply, (tiles, shares), x, narrow, scale, part, rows, outs, ins, x.stride(0), share, ROWS=tile.rows,
        OUTS=tile.outs, INS=tile.ins, SCALED=shares == 1, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if shares > 1:
        launch(_add_up, (cdiv(y.numel(), BLOCK),), part, scale, y, y.numel(), outs, shares, BLOCK=BLOCK)
    return y


def multiply(x: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Implement `ops.fp8_weights.multiply`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    factor = Factor(narrow, None, scale)
    if few_rows.takes(len(x), factor):
        return few_rows.linear(x, factor)
    if x.element_size() > 2:  # tensor cores would round x
        return fp8_weights.multiply(x, narrow, scale)
    return tiled(x, narrow, scale)
