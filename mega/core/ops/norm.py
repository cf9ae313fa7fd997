"""LayerNorm and RMSNorm: statistics in max(fp32, dtype), result in the input's dtype."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, norms, rotary and the loss run."""
    return torch.promote_types(dtype, torch.float32)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., h], weight and bias [h] (Ba et al. 2016)."""
    wide = accurate(x.dtype)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) rounded to x's dtype, times weight [h] (Zhang and Sennrich 2019; rounding as in Llama)."""
    wide = x.to(accurate(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
