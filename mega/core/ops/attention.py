"""Causal attention of grouped heads: the plain form with every feature, and torch's fused one.

The plain form is the reference; it is also the only one with counter-based dropout (a fused kernel draws its
mask from a stream of its own). It keeps the weights of every query and key for its backward pass, where a fused kernel
keeps query, key, value and a number per query; `again` makes it as frugal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from mega.core.ops.dropout import dropout
from mega.core.ops.norm import accurate

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""torch's kernels, fastest first as measured on H200 (docs/performance.md)."""


class Drop(NamedTuple):
    """Dropout of attention weights: a function of query token, head and key column.

    keys: int64 [b, s], of the queries. heads: int64 [heads], numbers among all heads of the model. columns: int64 [t],
    of the keys.
    """

    keys: torch.Tensor
    heads: torch.Tensor
    columns: torch.Tensor
    probability: float

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, t] -> the same, x / (1 - p) where kept, else 0."""
        elements = self.heads[:, None, None] * (1 << 32) + self.columns
        return dropout(weights, self.keys[:, None, :, None], elements, self.probability)


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None, drop: Drop | None = None
) -> torch.Tensor:
    """`plain` by torch's fused kernels: cuDNN's where it takes the shape, then flash, then what else there is."""
    if drop is not None:
        return plain(q, k, v, documents, drop)
    mask = None if documents is None else _visible(documents, q.shape[1])
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None, drop: Drop | None = None
) -> torch.Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d], causal.

    documents: int64 [b, s]; tokens attend only within their document. Query head i reads key/value head
    i // (heads / kv_heads).
    """
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
        weights = drop(weights)
    return (weights @ v).transpose(1, 2)


def plain_again(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None, drop: Drop | None = None
) -> torch.Tensor:
    """`plain`, bit for bit, that keeps query, key and value only and computes the weights once more in the backward
    pass (selective recompute, Korthikanti et al. 2022, section 5)."""
    # Dropout is a function of what it acts on, so there is no random state to put back.
    return checkpoint(plain, q, k, v, documents, drop, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def fused_again(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None, drop: Drop | None = None
) -> torch.Tensor:
    """`fused`, whose kernels compute the weights again by themselves; `plain_again` where there is no kernel."""
    return fused(q, k, v, documents) if drop is None else plain_again(q, k, v, documents, drop)


def again(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The form of an attention that keeps no weights."""
    return {plain: plain_again, fused: fused_again}[attention]


def _visible(documents: torch.Tensor, length: int) -> torch.Tensor:
    """bool [b, 1, s, s], True where a query may look."""
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
