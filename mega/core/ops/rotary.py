"""Rotary position embedding in the half-rotation convention (Su et al. 2021; GPT-NeoX, Hugging Face)."""

from __future__ import annotations

import math

import torch

from mega.core.architecture.layer import Rope, RopeScaling
from mega.core.ops.norm import accurate


def rotary_table(positions: torch.Tensor, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [tokens, rope.width / 2], in max(fp32, dtype); positions int64 [tokens]."""
    wide, width = accurate(dtype), rope.width
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    frequency = (rope.base**-exponent) / rope.interpolation
    if rope.scaling is not None:
        frequency = scaled(frequency, rope.scaling)
    angle = positions.to(torch.float64)[:, None] * frequency[None, :]
    return angle.cos().to(wide), angle.sin().to(wide)


def scaled(frequency: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's extension to more positions (Dubey et al. 2024, section 3.4.2; factors of the released models).

    Radians a position -> radians a position. The frequency of a component that turns fewer than `low` times within
    `original` positions is divided by `factor`, one that turns more than `high` times is unchanged, and between them
    the unchanged share grows with the turns.

    >>> turns = torch.tensor([0.5, 1.0, 2.5, 4.0, 9.0])
    >>> (scaled(turns * 2 * math.pi / 100, RopeScaling(8.0, 1.0, 4.0, 100)) / (2 * math.pi / 100)).tolist()
    [0.0625, 0.125, 1.40625, 4.0, 9.0]
    """
    turns = frequency * (scaling.original / (2 * math.pi))
    unchanged = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / scaling.factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, d]: component i turns with component i + R/2 over the first R; cos and sin [tokens, R / 2].

    As of `spread`, [tokens, 1, R]: x itself is turned, without a gradient.
    """
    if cos.dim() == 3:
        turned = x if x.shape[-1] == cos.shape[-1] else x[..., : cos.shape[-1]]
        torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin, out=turned)
        return x
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def spread(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n, R / 2] as [n, 1, R], for `rotate` in fewer operations.

    >>> spread(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    (tensor([[[0., 0.]]]), tensor([[[-1.,  1.]]]))
    """
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
