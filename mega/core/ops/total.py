"""The sum of a few blocks, in fp32 at least, and accumulation into a tensor of another dtype."""

from __future__ import annotations

import torch


def total(blocks: torch.Tensor) -> torch.Tensor:
    """The sum of blocks [n, ...] -> [...], in order.

    >>> total(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """
    return blocks.sum(0)


def accumulate(main: torch.Tensor, x: torch.Tensor) -> None:
    """main += x. The shapes are equal; the dtypes may differ."""
    main.add_(x)
