"""Norms against float64, and where they round."""

from __future__ import annotations

import pytest
import torch

from mega.core.ops.norm import accurate, layer_norm, rms_norm, rms_norm_by
from tests.support.ranks import random

X, WEIGHT, BIAS = random(7, 64, seed=0) * 3 + 1, random(64, seed=1), random(64, seed=2)


def layer_norm_by_hand(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT + BIAS


def rms_norm_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 2e-6), ("bfloat16", 3e-2)])
def test_norms(dtype: str, bound: float) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    x, weight, bias = X.to(kind), WEIGHT.to(kind), BIAS.to(kind)
    for found, by_hand in (
        (layer_norm(x, weight, bias, 1e-5), layer_norm_by_hand),
        (rms_norm(x, weight, 1e-5), rms_norm_by_hand),
    ):
        assert found.dtype == kind
        torch.testing.assert_close(found.double(), by_hand(x.double()), rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_in_few_operations(dtype: torch.dtype, bound: float) -> None:
    x = X.to(dtype)
    found = rms_norm_by(WEIGHT.to(dtype), 1e-5)(x)
    assert torch.equal(x, X.to(dtype))
    torch.testing.assert_close(found.double(), rms_norm_by_hand(X.double()), rtol=bound, atol=bound)


def test_gradients() -> None:
    x, weight, bias = X[:3, :8].clone().requires_grad_(), WEIGHT[:8].clone(), BIAS[:8].clone()
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, w, b, 1e-5), (x, weight.requires_grad_(), bias))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


def test_statistics_of_large_half_precision_values() -> None:
    """300 squared overflows fp16; the mean of squares is taken in fp32."""
    x = torch.full((1, 16), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(16, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_accurate() -> None:
    assert [accurate(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
    ]
