"""Mixture-of-experts layers in decoding steps with few tokens, fused into few kernels.

    x [t, h] -> norm -> logits [t, E] -> k experts and factors of each token -> y [t, h], the sum of their outputs

`Ops.few_experts` is an implementation or None; the implementation for CUDA is in kernels/few_experts.py. The reference
is `plain_experts`. A rank may hold some of the experts, or a shard of each expert; the result is then a partial sum.
This module does not depend on layers, sequences or ranks.

Logits and factors are fp32 here. Training, prefill and decoding without these kernels (model/router.py) round logits
and factors to the dtype of x, unless the router has the dtype fp32. If the router's dtype is not set, the logits of the
last chosen expert and the next expert may round to equal or neighbouring numbers. This module may then choose the other
of these two experts. Rounding logits here would not remove the difference, because the kernels for one token do not
round the norm before the router either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mega.core.architecture.layer import Router
from mega.core.ops.activation import activate
from mega.core.ops.few_rows import NormOf
from mega.core.ops.norm import add_norm
from mega.core.ops.routing import accurate, route
from mega.core.ops.trial import Agree, alone, error_of, passes


class ExpertWeights(NamedTuple):
    """The weights of a router, and of the experts of one rank."""

    router: torch.Tensor  # [E, h]
    up: torch.Tensor  # [local experts x f, h], or [local experts x 2 f, h] if gated: gate first
    down: torch.Tensor  # [local experts x h, f]
    experts: range  # indices of the experts of this rank


class ExpertRule(NamedTuple):
    """The rule by which experts are chosen, and the activation of the experts."""

    router: Router
    chosen: int  # number of experts for each token
    activation: str  # name of an activation, as in ops/activation.py


@dataclass(frozen=True)
class FewExperts:
    """An implementation of mixture-of-experts layers for few tokens."""

    takes: Callable[[int, ExpertWeights, ExpertRule], bool]
    """takes(tokens, weights, rule) -> whether `run` supports this case."""
    run: Callable[[torch.Tensor, ExpertWeights, ExpertRule, NormOf | None, torch.Tensor | None], torch.Tensor]
    """run(x, weights, rule, norm, into) -> [t, h] in the dtype of the weights. If `into` ([t, h] in any dtype) is
    given, the result is added to `into`, which is returned. `into` may be x."""


def simple(router: Router) -> bool:
    """Return whether the choice of experts depends only on a softmax of the token's logits, and not on biases or
    groups."""
    reads_logits = router.choice == "largest" and router.groups is None and not (router.bias or router.counts)
    return reads_logits and router.score == "softmax" and router.dtype != "fp64"


def plain_experts(
    x: torch.Tensor, weights: ExpertWeights, rule: ExpertRule, norm: NormOf | None, into: torch.Tensor | None
) -> torch.Tensor:
    """Implement `FewExperts.run` in plain torch, with a loop over experts."""
    if norm is not None:
        x = add_norm(x, None, None, None, *norm)[1]
    x = x.to(weights.up.dtype)
    logits = accurate(x) @ accurate(weights.router).t()
    chosen, factors = route(logits, rule.router, rule.chosen)
    y = torch.zeros_like(logits[:, :1].expand(-1, x.shape[1]))
    ups, downs = (matrix.unflatten(0, (len(weights.experts), -1)) for matrix in weights[1:3])
    for expert, up, down in zip(weights.experts, ups, downs, strict=True):
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        hidden = activate(x[tokens] @ up.t(), None, rule.activation) * factors[tokens, choices, None].to(x.dtype)
        y.index_add_(0, tokens, (hidden @ down.t()).to(y.dtype))
    return y.to(x.dtype) if into is None else into.add_(y)


def trusted(
    few: FewExperts | None, dtype: torch.dtype, device: torch.device, width: int, agree: Agree = alone
) -> FewExperts | None:
    """Return `few` if, on all ranks that call `agree`, its results equal those of `plain_experts`; otherwise return
    None. A rank whose results differ logs a warning."""
    if few is None or dtype.itemsize != 2:
        return None
    kernels, instead = few, "steps of few tokens take grouped GEMMs: ours"
    return few if passes(lambda: _trial_error(kernels, dtype, device, width), dtype, instead, agree) else None


def _trial_error(few: FewExperts, dtype: torch.dtype, device: torch.device, width: int) -> float:
    """Return the largest relative error for 1, 3 and 128 tokens, which use different kernels and tiles."""
    width -= width % 8

    def some(*shape: int) -> torch.Tensor:
        """Return values between 0 and 1, so that sums have no cancellation and relative errors stay small."""
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=device, dtype=torch.float32) * 0.618).frac().view(shape).to(dtype)

    router = Router(
        score="softmax", normalize=True, scale=1.0, choice="largest", groups=None, bias=False, balance_rate=None,
        quantile_ema=0.0, dtype=None, jitter=0.0, losses=(),
    )  # fmt: skip
    weights = ExpertWeights(some(8, width) / 8, some(8 * 32, width) / width, some(8 * width, 16) / 16, range(8))
    rule, norm, results = ExpertRule(router, 2, "swiglu"), NormOf(some(width), None, 1e-5), []
    for run in (few.run, plain_experts):
        outputs = [
            run(some(tokens, width), weights, rule, each, None) for tokens in (1, 3, 128) for each in (norm, None)
        ]
        results.append([*outputs, run(some(1, width), weights, rule, norm, some(1, width))])
    return error_of(*results)
