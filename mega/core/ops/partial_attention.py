"""Attention in blocks of keys. Each block produces an output and its log-sum-exp, and the results of blocks can be
merged.

    out_a, lse_a over some keys        lse = log(exp(lse_a) + exp(lse_b))
    out_b, lse_b over other keys       out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward pass of a block needs the output and the log-sum-exp over all keys, but no data of other blocks (Dao et al.
2022, appendix B; Liu et al. 2023). This module does not depend on ranks, or on how callers choose the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from mega.core.ops.attention import expand_heads, scores
from mega.core.ops.mask import AttentionMask

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PartialAttention:
    """An implementation for q [b, s, heads, d] and k, v [b, t, kv_heads, d]. d(x) is the gradient with respect to x.

    forward(q, k, v, mask) -> out [b, s, heads, d], lse [b, heads, s]; without visible keys, out is 0 and lse is -inf.
    backward(d(out), q, k, v, out, lse, mask) -> d(q), d(k), d(v), with out and lse over all keys.

    Results have the inputs' dtype or a wider one; lse is in max(fp32, dtype).
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., Gradients]


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge the result of a block into `out` and `lse`, in place. Before the first block, out must be 0 and lse
    -inf."""
    total = torch.logaddexp(lse, part_lse)
    finite = _finite(total)
    out.mul_(_by_token((lse - finite).exp())).add_(_by_token((part_lse - finite).exp()) * part)
    lse.copy_(total)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Rearrange [b, heads, s] to [b, s, heads, 1]."""
    return x.transpose(1, 2)[..., None]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace -inf in lse (of queries without visible keys) with 0, so that exp(-inf - lse) is 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


# -- plain torch, for any device and dtype and with all features


def plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    masked_scores = scores(q, k, mask.visible(q.shape[1], k.shape[1], q.device), mask.softcap)
    lse = masked_scores.logsumexp(-1)
    weights = _weights(masked_scores, lse).to(q.dtype)
    if mask.dropout is not None:
        weights = mask.dropout(weights)
    return (weights @ expand_heads(v, q.shape[2])).transpose(1, 2), lse


def plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
) -> Gradients:
    heads, kv_heads, sum_dtype = q.shape[2], k.shape[2], lse.dtype
    # The gradient of softmax subtracts the sum over keys of weight x d(weight), which equals the sum of grad x out.
    along = (grad.to(sum_dtype) * out.to(sum_dtype)).sum(-1).transpose(1, 2)
    grad = grad.transpose(1, 2)
    masked_scores = scores(q, k, mask.visible(q.shape[1], k.shape[1], q.device), mask.softcap)
    weights = _weights(masked_scores, lse)
    grad_weights = (grad @ expand_heads(v, heads).transpose(-1, -2)).to(sum_dtype)
    dropped = weights.to(grad.dtype)
    if mask.dropout is not None:
        dropped, grad_weights = mask.dropout(dropped), mask.dropout(grad_weights)
    grad_masked = weights * (grad_weights - along[..., None])
    if mask.softcap is not None:  # d tanh(x) = 1 - tanh(x)^2; the weight of an invisible key is 0
        grad_masked = grad_masked * (1 - (masked_scores / mask.softcap).clamp(min=-1).square())
    grad_scores = (grad_masked / math.sqrt(q.shape[-1])).to(q.dtype)
    grad_q = grad_scores @ expand_heads(k, heads)
    grad_k = grad_scores.transpose(-1, -2) @ q.transpose(1, 2)
    grad_v = dropped.transpose(-1, -2) @ grad
    return grad_q.transpose(1, 2), _reduce_heads(grad_k, kv_heads), _reduce_heads(grad_v, kv_heads)


def _weights(found: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (found - _finite(lse)[..., None]).exp()


def _reduce_heads(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum gradients over the query heads that share a key/value head (the backward pass of `expand_heads`): [b, heads,
    t, d] -> [b, t, kv_heads, d]."""
    return grad.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)


# -- torch's fused kernels, for 16-bit dtypes on CUDA; other cases use the plain implementation


def fused_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel, causal = _kernel(q, k, v, mask), _is_causal(q, k, mask)
    if kernel is None:
        return plain_forward(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        lse = lse.squeeze(-1)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse


def fused_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
) -> Gradients:
    kernel, causal = _kernel(q, k, v, mask), _is_causal(q, k, mask)
    if kernel is None:
        return plain_backward(grad, q, k, v, out, lse, mask)
    whole = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    # The kernels require a random state for dropout even without dropout.
    if kernel == "cudnn":
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        lse = lse[..., None].contiguous()
        grads = cudnn(*whole, lse, state, state, None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    else:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lse = lse.contiguous()
        grads = flash(*whole, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, state)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def _is_causal(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> bool:
    return mask.simple_kind(q.shape[1], k.shape[1]) == "causal"


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> Literal["cudnn", "flash"] | None:
    """Choose the torch kernel for this attention. cuDNN is preferred because it is twice as fast as flash attention on
    an H200."""
    on_device = q.is_cuda or q.is_meta
    if not on_device or q.element_size() != 2 or mask.simple_kind(q.shape[1], k.shape[1]) is None:
        return None
    if q.is_meta:
        return "cudnn"
    grouped, causal = q.shape[2] != k.shape[2], _is_causal(q, k, mask)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(params) else None


PLAIN = PartialAttention(plain_forward, plain_backward)
FUSED = PartialAttention(fused_forward, fused_backward)
