"""The attention kernels against the plain form in float64, under masks drawn at random, and their dropout bit by bit.

On a CUDA device; without one, a few small cases where Triton is installed and TRITON_INTERPRET=1 lets it run on a CPU
(whose interpreter, as of Triton 3.6, needs NumPy before 2.4).
"""

from __future__ import annotations

import importlib.util
import os
import random
from dataclasses import replace

import pytest
import torch

from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PLAIN, PartialAttention
from tests.support.masks import draw_mask

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
        reason="needs a CUDA device and triton (or triton with TRITON_INTERPRET=1)",
    ),
]
DEVICE = "cuda" if CUDA else "cpu"
LONGEST, WIDTHS = (500, [32, 64, 80, 96, 128, 256]) if CUDA else (100, [16, 20, 32])
CASES = int(os.environ.get("MEGA_CASES", "60" if CUDA else "4"))


def on_device(mask: AttentionMask) -> AttentionMask:
    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(DEVICE)

    drop = mask.dropout
    if drop is not None:
        drop = replace(drop, keys=drop.keys.to(DEVICE))
    return replace(mask, q_documents=moved(mask.q_documents), k_documents=moved(mask.k_documents), dropout=drop)


def results(
    op: PartialAttention, dtype: torch.dtype, inputs: tuple[torch.Tensor, ...], mask: AttentionMask
) -> tuple[torch.Tensor, ...]:
    """out, d(q), d(k), d(v) and the log-sum-exp."""
    q, k, v, grad = (x.to(dtype) for x in inputs)
    out, lse = op.forward(q, k, v, mask)
    return out, *op.backward(grad, q, k, v, out, lse, mask), lse


@pytest.mark.parametrize("seed", range(CASES))
def test_every_mask(seed: int) -> None:
    """Lengths that no tile divides, grouped heads, windows, documents, offsets, dropout; some queries see no key.

    Within twice the error of the plain form in the same dtype, both against float64."""
    from mega.core.ops.kernels import attention as kernels

    ours = PartialAttention(kernels.forward, kernels.backward)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    b, s, t = rng.randint(1, 2), rng.randint(1, LONGEST), rng.randint(1, LONGEST)
    t = s if rng.random() < 0.4 else t
    kv_heads, width = rng.randint(1, 2), rng.choice(WIDTHS)
    heads = kv_heads * rng.randint(1, 3)
    dtype = torch.float16 if seed % 2 or not CUDA else torch.bfloat16
    mask = on_device(draw_mask(rng, b, s, t, heads))
    shapes = (s, 2 * heads), (t, kv_heads), (t, kv_heads), (s, heads)
    q, *rest = (torch.randn(b, length, n, width, device=DEVICE).to(dtype) for length, n in shapes)
    inputs = q[:, :, :heads], *rest  # query as a part of something, as a fused projection leaves it
    exact = results(PLAIN, torch.float64, inputs, mask)
    plain, found = results(PLAIN, dtype, inputs, mask), results(ours, dtype, inputs, mask)
    assert torch.equal(found[-1].isinf(), exact[-1].isinf())
    seen = ~exact[-1].isinf()
    torch.testing.assert_close(found[-1][seen].double(), exact[-1][seen], rtol=0, atol=1e-2)
    for truth, one, other in zip(exact[:-1], plain[:-1], found[:-1], strict=True):
        assert other.shape == truth.shape and bool(other.isfinite().all())
        off, bound = (other.double() - truth).norm(), 2 * (one.double() - truth).norm() + 2e-3 * truth.norm()
        assert off <= bound + 1e-3


@pytest.mark.parametrize("columns", [(range(64),), (range(5, 69),), (range(16, 48), range(80, 112))])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_is_that_of_a_cpu_bit_by_bit(columns: tuple[range, ...], probability: float) -> None:
    """Equal scores and values that name their key show which weights were dropped."""
    from mega.core.ops.kernels import attention as kernels

    b, s, heads, t = 2, 70, 3, 64
    drop = AttentionDropout(token_keys(9, torch.arange(b), torch.arange(s)), site_key(4, "x"), 7, columns, probability)
    dtype = torch.bfloat16 if CUDA else torch.float16
    q, k = (torch.zeros(b, length, heads, t, device=DEVICE, dtype=dtype) for length in (s, t))
    v = torch.eye(t, device=DEVICE, dtype=dtype)[None, :, None].expand(b, t, heads, t)
    mask = on_device(AttentionMask("full", dropout=drop))
    out, lse = kernels.forward(q, k, v, mask)
    kept = drop.kept(heads).transpose(1, 2)
    assert torch.equal(out.cpu() != 0, kept)
    grad = torch.randn(b, s, heads, t, device=DEVICE).to(dtype)
    _, _, of_v = kernels.backward(grad, q, k, v, out, lse, mask)
    exact = torch.einsum("bsht,bshd->bthd", kept.double(), grad.cpu().double()) / drop.keep / t
    assert float((of_v.cpu().double() - exact).norm() / exact.norm()) < 1e-2
