"""Attention drawn at random, and what has to hold of an implementation of it: by GPU tests and by tests/battery."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from mega.core.ops.counter import token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PLAIN, PartialAttention
from tests.support.masks import draw_mask

SLACK = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 1e-5}
"""What a result may be off, relative to its norm, besides twice the error of the plain form in the same dtype."""

Results = tuple[torch.Tensor, ...]


def on_device(mask: AttentionMask, device: str) -> AttentionMask:
    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(device)

    drop = mask.dropout
    if drop is not None:
        drop = replace(drop, keys=drop.keys.to(device))
    return replace(mask, q_documents=moved(mask.q_documents), k_documents=moved(mask.k_documents), dropout=drop)


def results(op: PartialAttention, dtype: torch.dtype, inputs: Results, mask: AttentionMask) -> Results:
    """out, d(q), d(k), d(v) and the log-sum-exp."""
    q, k, v, grad = (x.to(dtype) for x in inputs)
    out, lse = op.forward(q, k, v, mask)
    return out, *op.backward(grad, q, k, v, out, lse, mask), lse


def check_values(
    op: PartialAttention, seed: int, longest: int, widths: list[int], dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Lengths that no tile divides, grouped heads, windows, documents, offsets, dropout; some queries see no key.

    Within twice the error of the plain form in the same dtype, both against float64. Gives what was drawn, and the
    largest share of a bound."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    b, s, t = rng.randint(1, 2), rng.randint(1, longest), rng.randint(1, longest)
    t = s if rng.random() < 0.4 else t
    kv_heads, width = rng.randint(1, 2), rng.choice(widths)
    heads = kv_heads * rng.randint(1, 3)
    mask = on_device(draw_mask(rng, b, s, t, heads), device)
    shapes = (s, 2 * heads), (t, kv_heads), (t, kv_heads), (s, heads)
    q, *rest = (torch.randn(b, length, n, width, device=device).to(dtype) for length, n in shapes)
    inputs = q[:, :, :heads], *rest  # query as a part of something, as a fused projection leaves it
    return {
        "shape": [b, s, t, heads, kv_heads, width],
        "dtype": str(dtype).removeprefix("torch."),
        "mask": words(mask),
        "share": round(share_of_bound(op, dtype, inputs, mask), 3),
    }


def share_of_bound(op: PartialAttention, dtype: torch.dtype, inputs: Results, mask: AttentionMask) -> float:
    """The largest error as a share of its bound, which it must not exceed. inputs: q, k, v, d(out)."""
    exact = results(PLAIN, torch.float64, inputs, mask)
    plain, found = results(PLAIN, dtype, inputs, mask), results(op, dtype, inputs, mask)
    slack, worst = SLACK[dtype], 0.0
    assert torch.equal(found[-1].isinf(), exact[-1].isinf())
    seen = ~exact[-1].isinf()
    torch.testing.assert_close(found[-1][seen].double(), exact[-1][seen], rtol=0, atol=5 * slack)
    largest = max(float(truth.norm()) for truth in exact[:-1])
    for truth, one, other in zip(exact[:-1], plain[:-1], found[:-1], strict=True):
        assert other.shape == truth.shape and bool(other.isfinite().all())
        off = float((other.double() - truth).norm())
        norm = float(truth.norm())
        # Where every query sees one key, gradients of queries and keys are 0: rounding of terms that cancel is left.
        left = max(1.0, largest) if norm < 1e-6 * largest else 1.0
        bound = 2 * float((one.double() - truth).norm()) + slack * norm + slack / 2 * left
        assert off <= bound, (off, bound)
        worst = max(worst, off / bound)
    return worst


def check_kept(
    op: PartialAttention, seed: int, longest: int, dtype: torch.dtype, device: str, *, runs: bool = False
) -> dict[str, object]:
    """Which weights are dropped, forward, in d(v) and in d(q): bit for bit those of the plain form on a CPU.

    Of equal scores, values and keys that name themselves, and upstream gradients that name their query.
    runs: key columns in two runs that begin where tiles do, as a ring of ranks has them; more than 128 keys."""
    rng = random.Random(seed)
    b, s, t, heads = rng.randint(1, 2), rng.randint(1, longest), rng.randint(1, longest), rng.randint(1, 3)
    mask = AttentionMask()
    while mask.dropout is None:
        mask = draw_mask(rng, b, s, t, heads)
    drop = mask.dropout
    if runs:
        s, t, at, late = rng.randint(1, 40), rng.randint(129, longest), 16 * rng.randint(0, 3), 16 * rng.randint(12, 20)
        columns = range(at, at + 128), range(late, late + t - 128)
        drop = AttentionDropout(token_keys(seed, torch.arange(b), torch.arange(s)), 1, 0, columns, drop.probability)
        mask = AttentionMask(mask.kind, q_offset=t - s, dropout=drop)
    visible = mask.visible(s, t, torch.device("cpu"))
    visible = torch.ones(s, t, dtype=torch.bool) if visible is None else visible
    kept = (drop.kept(heads) & visible).transpose(1, 2)  # [b, s, heads, t]
    width = max(s, t)

    def names(length: int) -> torch.Tensor:
        one = torch.eye(length, width, device=device, dtype=dtype)
        return one[None, :, None].expand(b, length, heads, width)

    q, there = torch.zeros(b, s, heads, width, device=device, dtype=dtype), on_device(mask, device)
    out, lse = op.forward(q, names(t), names(t), there)
    assert torch.equal(out.cpu()[..., :t] != 0, kept)
    of_v = op.backward(names(s), q, names(t), names(t), out, lse, there)[2]
    assert torch.equal(of_v.cpu()[..., :s] != 0, kept.permute(0, 3, 2, 1))
    of_q = op.backward(torch.ones_like(q), q, names(t), names(t), out, lse, there)[0].cpu().double()[..., :t]
    # d(score) is 1 - the kept share of its row where a weight is kept, minus that share where it is dropped.
    seen = visible.expand(b, heads, s, t).transpose(1, 2)
    count = seen.sum(-1, keepdim=True)
    share = kept.sum(-1, keepdim=True) / count.clamp(min=1)
    assert not of_q[~seen].any()
    assert torch.equal((of_q * drop.keep * math.sqrt(width) * count > 0.5 - share) & seen, kept)
    return {"shape": [b, s, t, heads], "mask": words(mask), "weights": 3 * b * s * t * heads}


def words(mask: AttentionMask) -> str:
    """What is asked of a mask, in short."""
    found = [mask.kind]
    found += [f"window {mask.window}"] if mask.window is not None else []
    found += ["documents"] if mask.q_documents is not None else []
    found += [f"offset {mask.q_offset}"] if mask.q_offset else []
    found += [f"dropout {mask.dropout.probability}"] if mask.dropout is not None else []
    return ", ".join(found)
