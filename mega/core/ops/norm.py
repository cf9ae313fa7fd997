"""LayerNorm and RMSNorm: statistics in max(fp32, dtype), result in the weight's dtype; the residual may be wider."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.ops.dropout import Dropout


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, norms, rotary and the loss run."""
    return torch.promote_types(dtype, torch.float32)


class NormForm(NamedTuple):
    """Where norms differ. offset: the weight counts from one, which is added in the wide dtype (Gemma). rounds_last:
    RMSNorm rounds after the weight (OLMo 2), not before it (Llama); so does one with an offset."""

    offset: bool = False
    rounds_last: bool = False


USUAL = NormForm()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, form: NormForm = USUAL
) -> torch.Tensor:
    """x [..., h], weight and bias [h] (Ba et al. 2016)."""
    wide, factor = accurate(x.dtype), factor_of(weight, x.dtype, form)
    return F.layer_norm(x.to(wide), x.shape[-1:], factor.to(wide), bias.to(wide), eps).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm = USUAL) -> torch.Tensor:
    """x / rms(x), times weight [h] (Zhang and Sennrich 2019), in the weight's dtype."""
    wide = x.to(accurate(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weighted(wide * scale, weight, form)


def weighted(normed: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """A norm in the wide dtype, times its weight, in the weight's dtype."""
    if form == USUAL:
        return normed.to(weight.dtype) * weight
    return (normed * factor_of(weight, normed.dtype, form)).to(weight.dtype)


def factor_of(weight: torch.Tensor, dtype: torch.dtype, form: NormForm) -> torch.Tensor:
    """What a norm of `dtype` is multiplied by, in max(fp32, dtype) where the weight counts from one."""
    return weight.to(accurate(dtype)) + 1 if form.offset else weight


def rms_norm_by(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """`rms_norm` of x in the weight's dtype of at least 32 bits, without a gradient, in few operations."""
    root = weight.shape[-1] ** 0.5
    least, scaled = weight.new_tensor(root * eps**0.5), weight * root
    return lambda x: (x * scaled).div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least))


def added(
    x: torch.Tensor | None,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
) -> torch.Tensor:
    """The residual x [tokens, h], if there is one, plus the pending output of its branch, if there is one.

    drop: of the branch with its bias.
    """
    if branch is None:
        assert x is not None
        return x
    if branch_bias is not None:
        branch = branch + branch_bias
    if drop is not None:
        branch = drop(branch)
    return branch if x is None else x + branch


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    form: NormForm = USUAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `added`, and its norm: RMSNorm without a bias.

    >>> x, normed = add_norm(torch.ones(1, 2), torch.ones(1, 2), None, None, torch.ones(2), None, 0.0)
    >>> x.tolist(), normed.tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    x = added(x, branch, branch_bias, drop)
    return x, rms_norm(x, weight, eps, form) if bias is None else layer_norm(x, weight, bias, eps, form)
