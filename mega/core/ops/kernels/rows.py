"""Sums of selected rows in Triton. A program sums a block of columns over the rows selected for one token."""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, next_power_of_2, tl

BLOCK = 1024


@jit
def _sum_rows(rows_at, numbers_at, out_at, count, width, K: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(numbers_at + token * K + choice)
        total += tl.load(rows_at + row * width + column, (column < width) & (row < count), 0.0).to(tl.float32)
    tl.store(out_at + token * width + column, total.to(out_at.dtype.element_ty), column < width)


def sum_rows(rows: torch.Tensor, numbers: torch.Tensor, whole: bool) -> torch.Tensor:
    """Implement `ops.rows.sum_rows`."""
    tokens, k = numbers.shape
    rows, out = rows.contiguous(), rows.new_empty(tokens, *rows.shape[1:])
    width = out[0].numel() if tokens else 0
    block = min(BLOCK, next_power_of_2(max(width, 1)))
    if out.numel():
        grid = (cdiv(width, block) * tokens,)
        launch(_sum_rows, grid, rows, numbers.contiguous(), out, len(rows), width, K=k, BLOCK=block)
    return out
