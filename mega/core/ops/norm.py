"""LayerNorm and RMSNorm: statistics in max(fp32, dtype), result in the weight's dtype. The residual may have a wider
dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.ops.dropout import Dropout


def accurate(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, norms, rotary positions and the loss are computed: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class NormForm(NamedTuple):
    """Variants of norms."""

    offset: bool = False
    """The factor is weight + 1, added in the wide dtype (Gemma)."""
    rounds_last: bool = False
    """RMSNorm rounds after multiplication by the weight (OLMo 2; always with `offset`), not before it (Llama)."""


USUAL = NormForm()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, form: NormForm = USUAL
) -> torch.Tensor:
    """x [..., h], weight and bias [h] (Ba et al. 2016)."""
    compute_dtype, factor = accurate(x.dtype), factor_of(weight, x.dtype, form)
    return F.layer_norm(x.to(compute_dtype), x.shape[-1:], factor.to(compute_dtype), bias.to(compute_dtype), eps).to(
        weight.dtype
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm = USUAL) -> torch.Tensor:
    """x / rms(x), times weight [h] (Zhang and Sennrich 2019), in the weight's dtype."""
    values = x.to(accurate(x.dtype))
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return weighted(values * scale, weight, form)


def weighted(normed: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Multiply a normalized tensor in the wide dtype by the weight; the result has the weight's dtype."""
    if form == USUAL:
        return normed.to(weight.dtype) * weight
    return (normed * factor_of(weight, normed.dtype, form)).to(weight.dtype)


def factor_of(weight: torch.Tensor, dtype: torch.dtype, form: NormForm) -> torch.Tensor:
    """The factor of a norm in `dtype`; if there is an offset, in max(fp32, dtype)."""
    return weight.to(accurate(dtype)) + 1 if form.offset else weight


def rms_norm_by(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """`rms_norm` for inference, in few operations. x has the weight's dtype, of at least 32 bits."""
    root = weight.shape[-1] ** 0.5
    least, scaled = weight.new_tensor(root * eps**0.5), weight * root
    return lambda x: (x * scaled).div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least))


def added(
    x: torch.Tensor | None,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
) -> torch.Tensor:
    """x + drop(branch + branch_bias), each [tokens, h]: the residual plus the output of a branch. Each may be None."""
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
    """The sum from `added`, and its norm: LayerNorm with a bias, RMSNorm without.

    >>> x, normed = add_norm(torch.ones(1, 2), torch.ones(1, 2), None, None, torch.ones(2), None, 0.0)
    >>> x.tolist(), normed.tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    x = added(x, branch, branch_bias, drop)
    return x, rms_norm(x, weight, eps, form) if bias is None else layer_norm(x, weight, bias, eps, form)
