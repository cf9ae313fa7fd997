"""Parts of an attention, merged by their log-sum-exps, are the whole: outputs and gradients in float64."""

from __future__ import annotations

import math
import random as pyrandom
from dataclasses import replace

import pytest
import torch

from mega.core.ops.attention import plain
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import CAUSAL, AttentionMask
from mega.core.ops.partial_attention import FUSED, PLAIN, PartialAttention, merge
from tests.support.masks import draw_mask
from tests.support.ranks import random

ROWS, LENGTH, WIDTH, HALF = 2, 10, 4, 5
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]])
FRONT, BACK = slice(0, HALF), slice(HALF, LENGTH)
Part = tuple[slice, slice, AttentionMask]


def inputs(heads: int, kv_heads: int, s: int = LENGTH, t: int = LENGTH) -> list[torch.Tensor]:
    return [
        random(ROWS, length, each, WIDTH, seed=seed).requires_grad_()
        for seed, (length, each) in enumerate(((s, heads), (t, kv_heads), (t, kv_heads)))
    ]


def agree(op: PartialAttention, mask: AttentionMask, parts: list[Part], qkv: list[torch.Tensor]) -> None:
    """Output and gradients of the parts are those of the whole."""
    grad = random(*qkv[0].shape, seed=9)
    expected = plain(*qkv, mask)
    wanted = torch.autograd.grad(expected, qkv, grad)

    q, k, v = (x.detach() for x in qkv)
    out = torch.zeros_like(q)
    lse = torch.full((ROWS, q.shape[2], q.shape[1]), -math.inf, dtype=q.dtype)
    for queries, keys, part in parts:
        found, found_lse = op.forward(q[:, queries], k[:, keys], v[:, keys], part)
        merge(out[:, queries], lse[:, :, queries], found, found_lse)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)

    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys, part in parts:
        at_queries = (x[:, queries] for x in (grad, q))
        at_keys = (x[:, keys] for x in (k, v))
        found_grads = op.backward(*at_queries, *at_keys, out[:, queries], lse[:, :, queries], part)
        for total, place, found in zip(grads, (queries, keys, keys), found_grads, strict=True):
            total[:, place] += found
    torch.testing.assert_close(grads, list(wanted), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", [PLAIN, FUSED])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("probability", [0.0, 0.4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_three_parts_are_the_whole(
    op: PartialAttention, documents: torch.Tensor | None, probability: float, heads: int, kv_heads: int
) -> None:
    """Row 1 of the documents hides all keys of the front from the back. The part whose keys precede all queries is
    "full", as ring attention has it."""
    drop = None
    if probability:
        keys = token_keys(5, torch.arange(ROWS), torch.arange(LENGTH))
        drop = AttentionDropout(keys, site_key(0, "attention"), 0, (range(LENGTH),), probability)
    mask = AttentionMask(q_documents=documents, k_documents=documents, dropout=drop)
    parts = [(queries, keys, mask.cut(queries, keys)) for queries, keys in ((FRONT, FRONT), (BACK, BACK))]
    parts.append((BACK, FRONT, replace(mask.cut(BACK, FRONT), kind="full")))
    agree(op, mask, parts, inputs(heads, kv_heads))


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_every_mask(seed: int) -> None:
    """Cut anywhere, in any order; some parts are empty, some queries see no key at all."""
    rng = pyrandom.Random(seed)
    s, t = rng.randint(2, 8), rng.randint(2, 8)
    mask = draw_mask(rng, ROWS, s, t, 4)
    q_cut, k_cut = rng.randint(1, s - 1), rng.randint(1, t - 1)
    pairs = [
        (queries, keys) for queries in (slice(0, q_cut), slice(q_cut, s)) for keys in (slice(0, k_cut), slice(k_cut, t))
    ]
    rng.shuffle(pairs)
    agree(PLAIN, mask, [(*pair, mask.cut(*pair)) for pair in pairs], inputs(4, 2, s, t))


def test_queries_that_see_nothing_bring_nothing() -> None:
    q, k, v = (x.detach() for x in inputs(2, 2))
    ones, twos = torch.ones(ROWS, LENGTH, dtype=torch.int64), torch.full((ROWS, LENGTH), 2)
    apart = AttentionMask("full", q_documents=ones, k_documents=twos)
    out, lse = PLAIN.forward(q, k, v, apart)
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())
    whole, whole_lse = PLAIN.forward(q, k, v, CAUSAL)
    before = whole.clone()
    merge(whole, whole_lse, out, lse)
    assert torch.equal(whole, before)
    grads = PLAIN.backward(torch.ones_like(q), q, k, v, whole, whole_lse, apart)
    assert not any(bool(grad.any()) for grad in grads)
    merge(out, lse, *PLAIN.forward(q, k, v, apart))
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())
