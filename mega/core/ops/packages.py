"""Ops of third-party packages, which are used only with `--ops flash-attn` or `--ops apex`.

Each op is tested against its reference like any other op. For cases that a package does not support, mega's op is used.
A package is imported when it is first used; config/check.py checks in advance that it is installed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from mega.core.ops.attention import Attention, fused
from mega.core.ops.dropout import Dropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.norm import USUAL, NormForm, added


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, *, other: Attention = fused
) -> torch.Tensor:
    """Compute `attention.plain` with flash-attn, in 16 bits. `other` is used for masks that are neither plain causal
    nor full."""
    kind = mask.simple_kind(q.shape[1], k.shape[1])
    if kind is None or q.element_size() != 2:
        return other(q, k, v, mask)
    return import_module("flash_attn").flash_attn_func(q, k, v, causal=kind == "causal")  # type: ignore[no-any-return]


def apex_add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    form: NormForm = USUAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `norm.add_norm` with torch's addition and apex's norm."""
    x = added(x, branch, branch_bias, drop)
    apex = import_module("apex.normalization.fused_layer_norm")
    shape, weight = (x.shape[-1],), weight + 1 if form.offset else weight
    if bias is None:
        return x, apex.fused_rms_norm_affine(x, weight, shape, eps)
    return x, apex.fused_layer_norm_affine(x, weight, bias, shape, eps)


def package(name: str, attention: Attention) -> dict[str, Any]:
    """Return the ops of the package that is called `name` in `--ops`. attention: the implementation that is used
    without the package."""
    if name == "flash-attn":
        return {"attention": partial(flash_attention, other=attention)}
    return {"add_norm": apex_add_norm}
