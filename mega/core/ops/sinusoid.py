"""Sinusoidal position encoding as in fairseq, with sines in the first half and cosines in the second (Vaswani et al.
2017)."""

from __future__ import annotations

import math

import torch


def sinusoid(positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [tokens, width], the sines of position x frequency followed by the cosines. positions: int64 [tokens].

    The width / 2 frequencies form a geometric sequence from 1 to 1 / 10000, including both ends.

    >>> sinusoid(torch.tensor([0, 1]), 4, torch.float64)[0].tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    half = width // 2
    component = torch.arange(half, device=positions.device, dtype=torch.float64)
    angle = positions.to(torch.float64)[:, None] * torch.exp(component * (-math.log(10000.0) / (half - 1)))
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)
