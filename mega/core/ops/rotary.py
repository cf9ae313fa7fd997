"""Rotary position embedding in the half-rotation convention (Su et al. 2021; GPT-NeoX, Hugging Face)."""

from __future__ import annotations

import torch

from mega.core.ops.norm import accurate


def rotary_table(
    positions: torch.Tensor, width: int, base: float, interpolation: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [tokens, width / 2], in max(fp32, dtype); positions int64 [tokens]."""
    wide = accurate(dtype)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    frequency = (base**-exponent) / interpolation
    angle = positions.to(torch.float64)[:, None] * frequency[None, :]
    return angle.cos().to(wide), angle.sin().to(wide)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, d]: component i turns with component i + R/2 over the first R = 2 cos.shape[1] components."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
