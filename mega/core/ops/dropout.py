"""Dropout by counter: the mask is a function of the tokens' keys, never of a random stream."""

from __future__ import annotations

import torch

from mega.core.ops.counter import keep_mask


def dropout(x: torch.Tensor, keys: torch.Tensor, elements: torch.Tensor, probability: float) -> torch.Tensor:
    """x / (1 - p) where kept, else 0.

    keys: int64, one per token, shaped to broadcast against `elements` (numbers of the logical elements) and x.
    """
    kept = keep_mask(keys, elements, probability)
    return torch.where(kept, x * (1.0 / (1.0 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))
