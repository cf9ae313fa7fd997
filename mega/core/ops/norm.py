"""LayerNorm and RMSNorm. Statistics are computed in max(fp32, dtype), and results have the weight's dtype. The residual
may have a wider dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.ops.dropout import Dropout


def accurate(dtype: torch.dtype) -> torch.dtype:
    """Return max(fp32, dtype), in which softmax, norms, rotary positions and the loss are computed."""
    return torch.promote_types(dtype, torch.float32)


class NormForm(NamedTuple):
    """The variant of a norm."""

    offset: bool = False
    """Whether the factor is weight + 1 (Gemma). The addition is in the wide dtype."""
    rounds_last: bool = False
    """Whether RMSNorm rounds after the multiplication by the weight (OLMo 2, and always with `offset`) instead of
    before it (Llama)."""


USUAL = NormForm()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, form: NormForm = USUAL
) -> torch.Tensor:
    """Compute the LayerNorm of x [..., h] with weight and bias [h] (Ba et al. 2016)."""
    compute_dtype, factor = accurate(x.dtype), factor_of(weight, x.dtype, form)
    return F.layer_norm(x.to(compute_dtype), x.shape[-1:], factor.to(compute_dtype), bias.to(compute_dtype), eps).to(
        weight.dtype
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm = USUAL) -> torch.Tensor:
    """Compute x / rms(x) times weight [h], in the weight's dtype (Zhang and Sennrich 2019)."""
    values = x.to(accurate(x.dtype))
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return weighted(values * scale, weight, form)


def weighted(normed: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Multiply a normalised tensor, which is in the wide dtype, by the weight. The result has the weight's dtype."""
    if form == USUAL:
        return normed.to(weight.dtype) * weight
    return (normed * factor_of(weight, normed.dtype, form)).to(weight.dtype)


def factor_of(weight: torch.Tensor, dtype: torch.dtype, form: NormForm) -> torch.Tensor:
    """Return the factor of a norm in `dtype`, or in max(fp32, dtype) if there is an offset."""
    return weight.to(accurate(dtype)) + 1 if form.offset else weight


def rms_norm_by(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes `rms_norm` for inference in few operations. The argument of the returned function
    must have the weight's dtype, with at least 32 bits."""
    root = weight.shape[-1] ** 0.5
    least, scaled = weight.new_tensor(root * eps**0.5), weight * root
    return lambda x: (x * scaled).div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least))


def added(
    x: torch.Tensor | None,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return x + drop(branch + branch_bias), the residual plus the output of a branch. x and branch are [tokens, h],
    and at most one of them is None."""
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
    """Return the sum from `added`, and the norm of this sum: LayerNorm if there is a bias, otherwise RMSNorm.

    >>> x, normed = add_norm(torch.ones(1, 2), torch.ones(1, 2), None, None, torch.ones(2), None, 0.0)
    >>> x.tolist(), normed.tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    x = added(x, branch, branch_bias, drop)
    return x, rms_norm(x, weight, eps, form) if bias is None else layer_norm(x, weight, bias, eps, form)
