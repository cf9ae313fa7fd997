"""Sums of rows that are selected by index, or added to rows that are selected by index, in fp32 or wider."""

from __future__ import annotations

import torch


def sum_rows(rows: torch.Tensor, numbers: torch.Tensor, whole: bool) -> torch.Tensor:
    """Return [t, ...]: for each row of `numbers` (int64 [t, k], indices into `rows`), the sum of the selected rows of
    rows [n, ...], in order.

    whole: if False, indices may also be n, which selects a row of zeros.

    >>> sum_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 2]]), False).flatten()
    tensor([3., 2.])
    """
    sum_dtype = torch.promote_types(rows.dtype, torch.float32)
    if not whole:
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    first = rows.index_select(0, numbers[:, 0])
    if numbers.shape[1] == 1:
        return first
    total = first.to(sum_dtype)
    for choice in range(1, numbers.shape[1]):
        total += rows.index_select(0, numbers[:, choice])
    return total.to(rows.dtype)


def add_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Add each row of rows [n, h] to a row of `table` [m, h], whose index is in `numbers`, int64 [n].

    >>> table = torch.zeros(3, 1)
    >>> add_rows(table, torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]]))
    >>> table.flatten()
    tensor([2., 0., 4.])
    """
    table.index_add_(0, numbers, rows.to(table.dtype))
