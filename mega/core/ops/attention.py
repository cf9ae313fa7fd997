"""Causal attention of grouped heads: the plain form with every feature, and torch's fused one.

The plain form is the reference; it is also the only one with counter-based dropout (a fused kernel draws its
mask from a stream of its own).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from mega.core.ops.dropout import dropout
from mega.core.ops.norm import accurate


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    documents: torch.Tensor | None = None,
    drop: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    plain: bool = False,
) -> torch.Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d], causal.

    documents: int64 [b, s]; tokens attend only within their document. drop: (keys [b, 1, s, 1],
    elements [heads, 1, s], probability) of the attention weights' dropout. Query head i reads key/value head
    i // (heads / kv_heads).
    """
    if plain or drop is not None:
        return _plain(q, k, v, documents, drop)
    mask = None if documents is None else _visible(documents, q.shape[1])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _visible(documents: torch.Tensor, length: int) -> torch.Tensor:
    """bool [b, 1, s, s], True where a query may look."""
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    drop: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    visible = seen if documents is None else _visible(documents, length)
    scores = scores.to(accurate(q.dtype)).masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).to(q.dtype)
    if drop is not None:
        weights = dropout(weights, *drop)
    return (weights @ v).transpose(1, 2)
