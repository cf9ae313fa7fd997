"""Sums of selected rows, and sums into selected rows, in Triton. A program handles a block of columns, of the rows
selected for one token, or of several consecutive rows that are added to a table.
"""

from __future__ import annotations

import torch

from mega.core.ops import rows as reference
from mega.core.ops.kernels.language import cdiv, jit, launch, next_power_of_2, tl

BLOCK = 1024
ADDED, ADDED_BLOCK = 32, 512
"""Number of rows and columns per program of `add_rows`."""


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


@jit
def _add_rows(table_at, numbers_at, rows_at, count, width, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    first = tl.program_id(0) * ADDED
    current = tl.load(numbers_at + first)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(first, tl.minimum(first + ADDED, count)):
        number = tl.load(numbers_at + row)
        # Consecutive rows with the same index are summed first, because all programs wait for each other if they add to
        # the few rows of a small table, such as that of token types.
        if number != current:
            tl.atomic_add(table_at + current * width + column, total, mask, sem="relaxed")
            total = tl.zeros([BLOCK], tl.float32)
            current = number
        total += tl.load(rows_at + tl.cast(row, tl.int64) * width + column, mask, 0.0).to(tl.float32)
    tl.atomic_add(table_at + current * width + column, total, mask, sem="relaxed")


def add_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Implement `ops.rows.add_rows`. Rows are added to an fp32 table in no fixed order, unless deterministic algorithms
    are required."""
    if table.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled() or not rows.numel():
        return reference.add_rows(table, numbers, rows)
    assert table.is_contiguous()
    count, width = rows.shape
    launch(
        _add_rows, (cdiv(count, ADDED), cdiv(width, ADDED_BLOCK)),
        table, numbers.contiguous(), rows.contiguous(), count, width, ADDED=ADDED, BLOCK=ADDED_BLOCK,
    )  # fmt: skip
