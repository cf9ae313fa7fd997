"""Sums of a few blocks, in fp32 or wider, and accumulation into a tensor of another dtype."""

from __future__ import annotations

import torch


def total(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sum of blocks [n, ...] over the first dim, in order.

    >>> total(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """
    return blocks.sum(0)


def accumulate(main: torch.Tensor, x: torch.Tensor) -> None:
    """Add x to `main` in place. Shapes must be equal, but dtypes may differ."""
    main.add_(x)
