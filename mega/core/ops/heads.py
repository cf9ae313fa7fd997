"""Splits the fused projection of query, key and value into heads, and applies rotary positions."""

from __future__ import annotations

import torch

from mega.core.ops.rotary import rotate

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [tokens, R / 2]."""


def split_heads(
    fused: torch.Tensor, bias: torch.Tensor | None, heads: int, kv_heads: int, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split fused [tokens, (heads + 2 kv_heads) d] into q [tokens, heads, d], k and v [tokens, kv_heads, d], and rotate
    q and k.

    bias: bias that was already added to `fused`; only its gradient is computed here. The caller must not use `fused`
    afterwards, because a fast implementation rotates `fused` in place.
    """
    if bias is not None:
        fused = fused + (bias - bias.detach())
    q, k, v = fused.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    return q, k, v
