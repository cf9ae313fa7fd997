"""From the fused projection of query, key and value to heads, with rotary positions applied."""

from __future__ import annotations

import torch

from mega.core.ops.rotary import rotate

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [tokens, R / 2]."""


def split_heads(
    fused: torch.Tensor, bias: torch.Tensor | None, heads: int, kv_heads: int, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fused [tokens, (heads + 2 kv_heads) d] -> q [tokens, heads, d], k and v [tokens, kv_heads, d]; q and k rotated.

    bias: already added to `fused`; only its gradient is computed here. `fused` belongs to this op from here on: a fast
    implementation rotates it in place.
    """
    if bias is not None:
        fused = fused + (bias - bias.detach())
    q, k, v = fused.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    return q, k, v


def split_heads_once(
    fused: torch.Tensor, bias: torch.Tensor | None, heads: int, kv_heads: int, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_heads` without a gradient: queries and keys are rotated together, in as few operations as can be."""
    x = fused.view(len(fused), heads + 2 * kv_heads, -1)
    if rotary is None:
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        return q, k, v
    cos, sin = rotary[0][:, None, None], rotary[1][:, None]
    half = sin.shape[-1]
    if 2 * half != x.shape[-1] or sin.dtype != x.dtype:
        return split_heads(fused, None, heads, kv_heads, rotary)
    first, second = x[:, : heads + kv_heads, :half], x[:, : heads + kv_heads, half:]
    turned = x[:, : heads + kv_heads].unflatten(-1, (2, half)) * cos
    turned[:, :, 0].addcmul_(second, sin, value=-1)
    turned[:, :, 1].addcmul_(first, sin)
    turned = turned.flatten(2)
    return turned[:, :heads], turned[:, heads:], x[:, heads + kv_heads :]
