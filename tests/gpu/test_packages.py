"""`--ops flash-attn` and `--ops apex` by the packages themselves: within twice the error of the plain form in bf16.

Needs a CUDA device, and flash-attn or NVIDIA's apex built for it. tests/ops/test_packages.py has the seam without them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from mega.core.ops import norm
from mega.core.ops.attention import plain
from mega.core.ops.mask import CAUSAL, AttentionMask
from mega.core.ops.packages import apex_add_norm, flash_attention
from tests.gpu.test_kernels import compare, random
from tests.support.triton import CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn")
@pytest.mark.parametrize("mask", [CAUSAL, AttentionMask(kind="full")], ids=["causal", "full"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads, kv_heads, length", [(3, 3, 200), (4, 2, 256), (2, 1, 1000)])
def test_flash_attn(width: int, heads: int, kv_heads: int, length: int, mask: AttentionMask) -> None:
    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, k, v, mask)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plain(q, k, v, mask)

    inputs = [random(2, length, n, width) for n in (heads, kv_heads, kv_heads)]
    compare(ours, theirs, inputs)


@pytest.mark.skipif(find_spec("fused_layer_norm_cuda") is None, reason="needs NVIDIA's apex, built with its CUDA norms")
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [96, 1024, 4096])
def test_norms_of_apex(width: int, centred: bool) -> None:
    def by(add_norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, branch, weight, bias: add_norm(x, branch, None, None, weight, bias, 1e-5)

    bias = random(width) if centred else None
    compare(by(apex_add_norm), by(norm.add_norm), [random(300, width), random(300, width), random(width), bias])
