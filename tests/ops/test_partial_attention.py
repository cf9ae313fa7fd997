"""Parts of an attention, merged by their log-sum-exps, are the whole: outputs and gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.ops.attention import Drop, plain
from mega.core.ops.counter import token_keys
from mega.core.ops.partial_attention import FUSED, PLAIN, PartialAttention, Sight, merge
from tests.support.ranks import random

ROWS, LENGTH, WIDTH, HALF = 2, 10, 4, 5
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]])
FRONT, BACK = slice(0, HALF), slice(HALF, LENGTH)


def inputs(heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [
        random(ROWS, LENGTH, each, WIDTH, seed=seed).requires_grad_()
        for seed, each in enumerate((heads, kv_heads, kv_heads))
    ]


def sights(documents: torch.Tensor | None, drop: Drop | None) -> list[tuple[slice, slice, Sight]]:
    """A causal row in three parts: (queries, keys, what these see of those)."""
    found = []
    for queries, keys in ((FRONT, FRONT), (BACK, BACK), (BACK, FRONT)):
        numbers = None if documents is None else (documents[:, queries], documents[:, keys])
        part = None if drop is None else drop._replace(keys=drop.keys[:, queries], columns=drop.columns[keys])
        found.append((queries, keys, Sight(queries is keys, numbers, part)))
    return found


@pytest.mark.parametrize("op", [PLAIN, FUSED])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("probability", [0.0, 0.4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_three_parts_are_the_whole(
    op: PartialAttention, documents: torch.Tensor | None, probability: float, heads: int, kv_heads: int
) -> None:
    """Row 1 of the documents hides all keys of the front from the back."""
    qkv, grad = inputs(heads, kv_heads), random(ROWS, LENGTH, heads, WIDTH, seed=9)
    drop = None
    if probability:
        keys = token_keys(5, torch.arange(ROWS), torch.arange(LENGTH))
        drop = Drop(keys, torch.arange(heads), torch.arange(LENGTH), probability)
    expected = plain(*qkv, documents, drop)
    wanted = torch.autograd.grad(expected, qkv, grad)

    q, k, v = (x.detach() for x in qkv)
    out = torch.zeros_like(q)
    lse = torch.full((ROWS, heads, LENGTH), -math.inf, dtype=q.dtype)
    parts = sights(documents, drop)
    for queries, keys, sight in parts:
        found, found_lse = op.forward(q[:, queries], k[:, keys], v[:, keys], sight)
        merge(out[:, queries], lse[:, :, queries], found, found_lse)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)

    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys, sight in parts:
        at_queries = (x[:, queries] for x in (grad, q))
        at_keys = (x[:, keys] for x in (k, v))
        found_grads = op.backward(*at_queries, *at_keys, out[:, queries], lse[:, :, queries], sight)
        for total, place, part in zip(grads, (queries, keys, keys), found_grads, strict=True):
            total[:, place] += part
    torch.testing.assert_close(grads, list(wanted), rtol=1e-11, atol=1e-12)


def test_queries_that_see_nothing_bring_nothing() -> None:
    q, k, v = (x.detach() for x in inputs(2, 2))
    ones, twos = torch.ones(ROWS, LENGTH, dtype=torch.int64), torch.full((ROWS, LENGTH), 2)
    out, lse = PLAIN.forward(q, k, v, Sight(False, (ones, twos)))
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())
    whole, whole_lse = PLAIN.forward(q, k, v, Sight(True))
    before = whole.clone()
    merge(whole, whole_lse, out, lse)
    assert torch.equal(whole, before)
    grads = PLAIN.backward(torch.ones_like(q), q, k, v, whole, whole_lse, Sight(False, (ones, twos)))
    assert not any(bool(grad.any()) for grad in grads)
