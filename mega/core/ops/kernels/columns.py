"""Sums over the rows of a matrix, as bias gradients need them: partial sums of runs of rows, then the sum of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 256
"""Rows of one partial sum."""
TALL, WIDE = 16, 256
"""One tile."""


@triton.jit
def _partial(x_at, sums_at, rows, width, ROWS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    first = tl.program_id(1) * ROWS
    total = tl.zeros([WIDE], tl.float32)
    for step in range(0, ROWS, TALL):
        row = first + step + tl.arange(0, TALL)
        real = (row < rows)[:, None] & (columns < width)[None, :]
        x = tl.load(x_at + row.to(tl.int64)[:, None] * width + columns[None, :], real, 0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(sums_at + tl.program_id(1) * width + columns, total, columns < width)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """`suite.column_sums`: x [n, f] -> fp32 [f]."""
    x = x.contiguous()
    rows, width = x.shape
    parts = triton.cdiv(rows, ROWS)
    sums = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    _partial[(triton.cdiv(width, WIDE), parts)](x, sums, rows, width, ROWS=ROWS, TALL=TALL, WIDE=WIDE)
    return sums.sum(0)
