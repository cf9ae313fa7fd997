"""Attention with grouped heads and any mask, in a plain implementation of all features and in one with torch's fused
kernels.

The plain implementation is the reference. In torch's kernels, dropout is drawn from a random stream instead of by
counter, so `fused` passes masks with dropout to the plain implementation; kernels/attention.py implements dropout by
counter. The plain implementation saves the attention weights for the backward pass. A fused kernel saves only query,
key, value and one number per query, and `plain_recomputing` saves only query, key and value.

All functions take q [b, s, heads, d], k and v [b, t, kv_heads, d], and return [b, s, heads, d]. Query head i uses
key/value head i // (heads / kv_heads). The output of a query without visible keys is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mega.core.ops.mask import AttentionMask
from mega.core.ops.norm import accurate
from mega.core.ops.recompute import recompute

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], torch.Tensor]

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""torch's kernels, the fastest first, as measured on an H200 (docs/performance.md)."""


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(d)) v step by step."""
    s, t = q.shape[1], k.shape[1]
    visible = mask.visible(s, t, q.device)
    masked_scores = scores(q, k, visible, mask.softcap)
    weights = masked_scores.softmax(-1).to(q.dtype)
    if visible is not None and mask.may_hide_all(s, t):
        weights = weights.masked_fill(~visible, 0.0)  # softmax returns NaN for a query without visible keys
    if mask.dropout is not None:
        weights = mask.dropout(weights)
    return (weights @ expand_heads(v, q.shape[2])).transpose(1, 2)


def scores(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    """Compute q k' / sqrt(d), with the soft cap: [b, heads, s, t] in max(fp32, dtype), and -inf for invisible keys."""
    values = (q.transpose(1, 2) @ expand_heads(k, q.shape[2]).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    values = values.to(accurate(q.dtype))
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    return values if visible is None else values.masked_fill(~visible, -math.inf)


def expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each key/value head for every query head that uses this head: [b, t, kv_heads, d] -> [b, heads, t, d]."""
    x = x.transpose(1, 2)
    groups = heads // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, *, dropping: Attention = plain
) -> torch.Tensor:
    """Compute `plain` with torch's fused kernels: cuDNN if it supports the shape, otherwise flash attention, otherwise
    torch's other kernels.

    dropping: the implementation for masks with features other than documents and a window, such as dropout."""
    if not set(mask.features) <= {"documents", "a window"}:
        return dropping(q, k, v, mask)
    s, t = q.shape[1], k.shape[1]
    kind, visible, blind = mask.simple_kind(s, t), None, None
    if kind is None:
        visible = mask.visible(s, t, q.device)
        if visible is not None and mask.may_hide_all(s, t):
            # Kernels return different results for a query without visible keys. Make all keys visible to such a query,
            # and set its result to 0 afterwards.
            blind = ~visible.any(-1, keepdim=True)
            visible = visible | blind
    if q.is_meta:
        return _fused_shapes(q, k, v, visible, causal=kind == "causal")
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible,
            is_causal=kind == "causal",
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


def _fused_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    """Run torch's fused kernels on the meta device, with the same outputs and saved tensors as on CUDA. On the meta
    device, torch itself would use its unfused implementation.

    The kernels add the mask to the scores, so the mask is passed as floating-point numbers.
    """
    bias = None if visible is None else visible.to(q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal)[0].transpose(1, 2)


def plain_recomputing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Compute `plain` with bitwise identical results, but save only query, key and value. The backward pass recomputes
    the attention weights (selective recomputation, Korthikanti et al. 2022, section 5)."""
    # Dropout is a function of element positions, so no random state has to be restored.
    return recompute(plain, q, k, v, mask)


def fused_recomputing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Compute `fused`, but use `plain_recomputing` for masks that torch's kernels do not support, so that attention
    weights are never saved."""
    return fused(q, k, v, mask, dropping=plain_recomputing)


def recomputing(attention: Attention) -> Attention:
    """Return the variant of an attention implementation that does not save attention weights. Kernels never save
    them."""
    forms: dict[Attention, Attention] = {plain: plain_recomputing, fused: fused_recomputing}
    return forms.get(attention, attention)
