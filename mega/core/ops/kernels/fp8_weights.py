"""Few rows by weights in fp8, which are read once and widened on the way; more rows by cuBLAS."""

from __future__ import annotations

import torch

from mega.core.ops import fp8_weights
from mega.core.ops.kernels.language import cdiv, jit, launch, tl

ROWS = 16
"""Rows of x at the most, and of a tile."""
OUTS, INS = 16, 256
"""Weights of a tile."""


@jit
def _multiply(
    x_at, narrow_at, scale_at, y_at, rows, outs, ins, x_row,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    row, out = tl.arange(0, ROWS), tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, ins, INS):
        part = start + tl.arange(0, INS)
        real = (part < ins)[None, :]
        x = tl.load(x_at + row[:, None] * x_row + part[None, :], (row < rows)[:, None] & real, 0.0)
        at = narrow_at + out.to(tl.int64)[:, None] * ins + part[None, :]
        weights = tl.load(at, (out < outs)[:, None] & real, 0.0).to(x.dtype)
        total = tl.dot(x, tl.trans(weights), total, input_precision="ieee")
    total = total * tl.load(scale_at + out, out < outs, 0.0)[None, :]
    there = (row < rows)[:, None] & (out < outs)[None, :]
    tl.store(y_at + row[:, None] * outs + out[None, :], total.to(y_at.dtype.element_ty), there)


def multiply(x: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`ops.fp8_weights.multiply`."""
    (rows, ins), outs = x.shape, len(narrow)
    if rows > ROWS:
        return fp8_weights.multiply(x, narrow, scale)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    launch(
        _multiply, (cdiv(outs, OUTS),), x, narrow, scale, y, rows, outs, ins, x.stride(0), ROWS=ROWS, OUTS=OUTS, INS=INS
    )  # fmt: skip
    return y
