"""A window by cuDNN's graph API against the plain form in float64, by itself, under recompute and in a recorded graph.

Needs a CUDA device and the package nvidia-cudnn-frontend.
"""

from __future__ import annotations

import logging
import os
import random

import pytest
import torch

from mega.core.device import Recording
from mega.core.ops import cudnn
from mega.core.ops.attention import Attention
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PLAIN
from mega.core.ops.recompute import recompute
from tests.support.attention_cases import SLACK
from tests.support.triton import CUDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CUDA or cudnn.version() is None,
        reason="needs a CUDA device and nvidia-cudnn-frontend (pip install '.[cudnn]' in a clone)",
    ),
]
CASES = int(os.environ.get("MEGA_CASES", "40"))
DTYPES = torch.bfloat16, torch.float16

Parts = list[torch.Tensor]


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    assert cudnn.applies(q, k, mask)
    mixed = cudnn.attention(q, k, v, mask)
    assert mixed is not None
    return mixed


def recomputed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    return recompute(windowed, q, k, v, mask)


def drawn(seed: int) -> tuple[Parts, AttentionMask]:
    """q, k, v as parts of one tensor, as a fused projection leaves them, and d(out)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    b, s, kv_heads, width = rng.randint(1, 2), rng.randint(16, 700), rng.randint(1, 3), rng.choice([64, 96, 128])
    s = rng.choice([s, s // 128 * 128 + 128])
    heads, dtype = kv_heads * rng.choice([1, 1, 2, 4]), DTYPES[seed % 2]
    parts = (
        torch.randn(b, s, heads + 2 * kv_heads, width, device="cuda").to(dtype).split([heads, kv_heads, kv_heads], 2)
    )
    grad = torch.randn(b, s, heads, width, device="cuda").to(dtype)
    return [*(one.detach().requires_grad_() for one in parts), grad], AttentionMask(window=rng.randint(1, s - 1))


def results(run: Attention, parts: Parts, mask: AttentionMask) -> Parts:
    q, k, v, grad = parts
    mixed = run(q, k, v, mask)
    return [mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)]


def reference(parts: Parts, mask: AttentionMask, dtype: torch.dtype) -> Parts:
    q, k, v, grad = (x.detach().to(dtype) for x in parts)
    out, lse = PLAIN.forward(q, k, v, mask)
    return [out, *PLAIN.backward(grad, q, k, v, out, lse, mask)]


def check(found: Parts, parts: Parts, mask: AttentionMask) -> None:
    dtype = parts[0].dtype
    exact, plain = reference(parts, mask, torch.float64), reference(parts, mask, dtype)
    for truth, one, other in zip(exact, plain, found, strict=True):
        assert other.shape == truth.shape and other.dtype == dtype
        off, scale = float((other.double() - truth).norm()), float(truth.norm())
        assert off <= 2 * float((one.double() - truth).norm()) + SLACK[dtype] * (scale + 0.5), (off, scale)


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_PLANS", {})


@pytest.mark.parametrize("seed", range(CASES))
def test_any_window(seed: int) -> None:
    parts, mask = drawn(seed)
    check(results(windowed, parts, mask), parts, mask)


def test_the_trial_is_passed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert all(cudnn.trusted(torch.device("cuda", 0), dtype) for dtype in DTYPES)
    assert not caplog.text


@pytest.mark.parametrize("seed", range(4))
def test_under_recompute(seed: int) -> None:
    parts, mask = drawn(100 + seed)
    check(results(recomputed, parts, mask), parts, mask)


@pytest.mark.parametrize("seed", range(4))
def test_in_a_recorded_graph_of_other_values(seed: int) -> None:
    """What is played reads the values of now, and its gradients are those of them."""
    parts, mask = drawn(200 + seed)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(windowed, parts, mask)
    side.synchronize()
    kept: Parts = []
    recording = Recording(lambda: kept.extend(results(windowed, parts, mask)))
    with torch.no_grad():
        for one in parts:
            one.copy_(torch.randn_like(one))
    for _ in range(2):
        recording.play()
    torch.cuda.synchronize()
    check(kept, parts, mask)
