"""The sum of a few equal blocks, in fp32 where they have fewer bits; and of what is added to an fp32 tensor."""

from __future__ import annotations

import torch


def total(blocks: torch.Tensor) -> torch.Tensor:
    """blocks [n, ...] -> [...], added up in their order.

    >>> total(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """
    return blocks.sum(0)


def accumulate(main: torch.Tensor, x: torch.Tensor) -> None:
    """main += x, of equal shapes and maybe other dtypes."""
    main.add_(x)
