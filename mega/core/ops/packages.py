"""Ops of other people's packages, taken only where they are asked for by name: `--ops flash-attn`, `--ops apex`.

Each stands behind its reference like any other op, and hands over to ours what the package does not do. Imported when a
run asks for it: that a package is there is checked before (config/check.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from mega.core.ops.attention import Drop, fused
from mega.core.ops.norm import added


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None = None,
    drop: Drop | None = None,
    *,
    other: Callable[..., torch.Tensor] = fused,
) -> torch.Tensor:
    """`attention.plain` by flash-attn in 16 bits; documents and dropout, which it does otherwise, by `other`."""
    if documents is not None or drop is not None or q.element_size() != 2:
        return other(q, k, v, documents, drop)
    return import_module("flash_attn").flash_attn_func(q, k, v, causal=True)  # type: ignore[no-any-return]


def apex_add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_norm` with the norm by apex; the addition stays torch's."""
    x = added(x, branch, branch_bias)
    apex = import_module("apex.normalization.fused_layer_norm")
    shape = (x.shape[-1],)
    if bias is None:
        return x, apex.fused_rms_norm_affine(x, weight, shape, eps)
    return x, apex.fused_layer_norm_affine(x, weight, bias, shape, eps)


def package(name: str, attention: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The ops of a package, by its name in `--ops`; `attention` is what a run would have without it."""
    if name == "flash-attn":
        return {"attention": partial(flash_attention, other=attention)}
    return {"add_norm": apex_add_norm}
