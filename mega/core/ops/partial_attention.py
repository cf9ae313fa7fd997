"""Attention of some queries to some keys, in a form whose parts add up: each part brings its log-sum-exp along.

    out_a, lse_a over some keys        lse = log(exp(lse_a) + exp(lse_b))
    out_b, lse_b over others           out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward pass of a part needs the output and the log-sum-exp of the whole, and no other part (Dao et al. 2022,
appendix B; Liu et al. 2023). It refuses to know why there are parts, and who holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from mega.core.ops.attention import Drop
from mega.core.ops.norm import accurate

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Sight(NamedTuple):
    """What s queries see of t keys.

    causal: they are the same tokens, and a query sees none behind it; otherwise every key is in front of every query.
    documents: int64 [b, s] of the queries and [b, t] of the keys, which see each other only where these are equal.
    """

    causal: bool
    documents: tuple[torch.Tensor, torch.Tensor] | None = None
    drop: Drop | None = None


@dataclass(frozen=True)
class PartialAttention:
    """One implementation: q [b, s, heads, d]; k, v [b, t, kv_heads, d]; d(x) is the gradient with respect to x.

    forward(q, k, v, sight) -> out [b, s, heads, d], lse [b, heads, s]; a query that sees nothing has -inf there.
    backward(d(out), q, k, v, out, lse, sight) -> d(q), d(k), d(v), with out and lse of the whole.
    Results are in the inputs' dtype or wider; lse is in max(fp32, dtype).
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sight], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., Gradients]


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a part to `out` and `lse`, in place. Each query has seen at least one key before."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_by_token((lse - total).exp())).add_(_by_token((part_lse - total).exp()) * part)
    lse.copy_(total)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[b, heads, s] -> [b, s, heads, 1]"""
    return x.transpose(1, 2)[..., None]


# -- plain torch: any device and dtype, every feature


def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, sight)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse.masked_fill(lse == -math.inf, 0.0)).to(q.dtype)
    if sight.drop is not None:
        weights = sight.drop(weights)
    return (weights @ _heads(v, q.shape[2])).transpose(1, 2), lse


def plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sight: Sight,
) -> Gradients:
    heads, kv_heads, wide = q.shape[2], k.shape[2], lse.dtype
    # Sum over keys of weight x d(weight), which softmax's gradient subtracts.
    along = (grad.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    grad = grad.transpose(1, 2)
    weights = _weights(_scores(q, k, sight), lse)
    grad_weights = (grad @ _heads(v, heads).transpose(-1, -2)).to(wide)
    dropped = weights.to(grad.dtype)
    if sight.drop is not None:
        dropped, grad_weights = sight.drop(dropped), sight.drop(grad_weights)
    grad_scores = (weights * (grad_weights - along[..., None]) / math.sqrt(q.shape[-1])).to(q.dtype)
    grad_q = grad_scores @ _heads(k, heads)
    grad_k = grad_scores.transpose(-1, -2) @ q.transpose(1, 2)
    grad_v = dropped.transpose(-1, -2) @ grad
    return grad_q.transpose(1, 2), _shared(grad_k, kv_heads), _shared(grad_v, kv_heads)


def _scores(q: torch.Tensor, k: torch.Tensor, sight: Sight) -> torch.Tensor:
    """[b, heads, s, t] in max(fp32, dtype), -inf where a query does not see."""
    scores = (q.transpose(1, 2) @ _heads(k, q.shape[2]).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores = scores.to(accurate(q.dtype))
    if sight.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if sight.documents is not None:
        ours, theirs = sight.documents
        scores = scores.masked_fill(ours[:, None, :, None] != theirs[:, None, None, :], -math.inf)
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (scores - lse[..., None]).exp()


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, t, kv_heads, d] -> [b, heads, t, d], each key/value head as often as query heads read it."""
    x = x.transpose(1, 2)
    groups = heads // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _shared(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The conjugate of `_heads`: [b, heads, t, d] -> [b, t, kv_heads, d]."""
    return grad.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)


# -- torch's fused kernels: 16-bit dtypes on CUDA; the plain form takes what they do not


def fused_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = _kernel(q, k, v, sight)
    if kernel is None:
        return plain_forward(q, k, v, sight)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, sight.causal)
        lse = lse.squeeze(-1)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, sight.causal)
    return out.transpose(1, 2), lse


def fused_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sight: Sight,
) -> Gradients:
    kernel = _kernel(q, k, v, sight)
    if kernel is None:
        return plain_backward(grad, q, k, v, out, lse, sight)
    whole = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    # The kernels want the random state of a dropout, even of none.
    if kernel == "cudnn":
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        lse = lse[..., None].contiguous()
        grads = cudnn(*whole, lse, state, state, None, None, None, q.shape[1], k.shape[1], 0.0, sight.causal)
    else:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lse = lse.contiguous()
        grads = flash(*whole, lse, None, None, q.shape[1], k.shape[1], 0.0, sight.causal, state, state)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> Literal["cudnn", "flash"] | None:
    """Which of torch's kernels takes this: cuDNN's is twice as fast as flash attention on H200 where it does."""
    if not q.is_cuda or q.element_size() != 2 or sight.documents is not None or sight.drop is not None:
        return None
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, sight.causal, q.shape[1] != k.shape[1])
    if torch.backends.cuda.can_use_cudnn_attention(asked):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(asked) else None


PLAIN = PartialAttention(plain_forward, plain_backward)
FUSED = PartialAttention(fused_forward, fused_backward)
