"""LayerNorm and RMSNorm: statistics in max(fp32, dtype), result in the weight's dtype; the residual may be wider."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, norms, rotary and the loss run."""
    return torch.promote_types(dtype, torch.float32)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., h], weight and bias [h] (Ba et al. 2016)."""
    wide = accurate(x.dtype)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) rounded to the weight's dtype, times weight [h] (Zhang and Sennrich 2019; rounding as in Llama)."""
    wide = x.to(accurate(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(weight.dtype) * weight


def added(x: torch.Tensor, branch: torch.Tensor | None, branch_bias: torch.Tensor | None) -> torch.Tensor:
    """The residual x [tokens, h] plus the pending output of its branch, if there is one."""
    if branch is None:
        return x
    return x + (branch if branch_bias is None else branch + branch_bias)


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `added`, and its norm: RMSNorm without a bias.

    >>> x, normed = add_norm(torch.ones(1, 2), torch.ones(1, 2), None, torch.ones(2), None, 0.0)
    >>> x.tolist(), normed.tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    x = added(x, branch, branch_bias)
    return x, rms_norm(x, weight, eps) if bias is None else layer_norm(x, weight, bias, eps)
