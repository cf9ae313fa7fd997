"""Attention: the plain form against loops in float64, the fused one against the plain, under masks of every kind."""

from __future__ import annotations

import math
import random as pyrandom
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mega.core.ops.attention import Attention, fused, plain, recomputing
from mega.core.ops.counter import OLD_RULE, keep_mask, kept_share, key, mix, row_keys, site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import CAUSAL, AttentionMask
from tests.support.masks import draw_mask, sees
from tests.support.ranks import random

ROWS, LENGTH, WIDTH = 2, 9, 4
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9])
DOCUMENTS = AttentionMask(q_documents=NUMBERS, k_documents=NUMBERS)


def inputs(heads: int, kv_heads: int, s: int = LENGTH, t: int = LENGTH, seed: int = 0) -> tuple[torch.Tensor, ...]:
    shapes = ((ROWS, s, heads, WIDTH), (ROWS, t, kv_heads, WIDTH), (ROWS, t, kv_heads, WIDTH))
    return tuple(random(*shape, seed=seed + at).requires_grad_() for at, shape in enumerate(shapes))


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask = CAUSAL) -> torch.Tensor:
    """One query at a time; a query that sees no key gives 0."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for row in range(q.shape[0]):
        for head in range(q.shape[2]):
            for at in range(q.shape[1]):
                seen = [other for other in range(k.shape[1]) if sees(mask, row, at, other)]
                if not seen:
                    continue
                scores = torch.stack([q[row, at, head] @ k[row, other, head // group] for other in seen])
                weights = (scores / math.sqrt(WIDTH)).softmax(0)
                if (drop := mask.dropout) is not None:
                    columns = torch.tensor([column for run in drop.columns for column in run])
                    token = row_keys(drop.keys[row, at], drop.site, drop.first_head + head)
                    weights = weights * keep_mask(token, columns[seen], drop.probability)
                    weights = weights / kept_share(drop.probability)
                out[row, at, head] = weights @ v[row, seen, head // group]
    return out


def agree(form: Attention, mask: AttentionMask, qkv: tuple[torch.Tensor, ...]) -> None:
    """Values and gradients are those of the loops."""
    grad = random(*qkv[0].shape, seed=9)
    expected, found = by_loops(*qkv, mask), form(*qkv, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = [torch.zeros_like(x) for x in qkv]
    if expected.requires_grad:
        wanted = list(torch.autograd.grad(expected, qkv, grad))
    torch.testing.assert_close(list(torch.autograd.grad(found, qkv, grad)), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", [plain, fused])
@pytest.mark.parametrize("mask", [CAUSAL, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention(heads: int, kv_heads: int, mask: AttentionMask, form: Attention) -> None:
    """Query head i reads key/value head i // (heads / kv_heads)."""
    agree(form, mask, inputs(heads, kv_heads))


@pytest.mark.parametrize("form", [plain, fused])
@pytest.mark.parametrize("seed", range(20))
def test_every_mask(seed: int, form: Attention) -> None:
    """Kind, window, documents, offset, dropout and lengths drawn at random; some queries see no key."""
    rng = pyrandom.Random(seed)
    s, t = rng.randint(1, 6), rng.randint(1, 6)
    t = s if rng.random() < 0.3 else t
    kv_heads = rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    agree(form, draw_mask(rng, ROWS, s, t, heads), inputs(heads, kv_heads, s, t, seed))


@pytest.mark.parametrize("form", [plain, fused, recomputing(plain), recomputing(fused)])
def test_queries_that_see_no_key(form: Attention) -> None:
    """They give 0, and neither take nor leave a gradient."""
    q, k, v = inputs(2, 1, 4, 3)
    ones, twos = torch.ones(ROWS, 4, dtype=torch.int64), torch.full((ROWS, 3), 2)
    ones[1, 2] = 2
    for mask in (
        AttentionMask("full", q_documents=ones, k_documents=twos),
        AttentionMask("full", window=1, q_offset=2),
        AttentionMask(q_offset=-2),
    ):
        agree(form, mask, (q, k, v))
        assert not form(q, k, v, mask)[0, 1].any()


@pytest.mark.parametrize("form", [plain, fused])
def test_one_token_at_a_time_is_the_whole_row(form: Attention) -> None:
    """Each query of a cached row on its own, at its offset."""
    q, k, v = inputs(4, 2)
    for window in (None, 3):
        whole = form(q, k, v, AttentionMask(window=window))
        parts = [
            form(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], AttentionMask(window=window, q_offset=i))
            for i in range(LENGTH)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [plain, fused])
def test_dropout_of_weights(form: Attention) -> None:
    """A weight's fate depends on its query token, head and key column alone."""
    qkv = inputs(4, 2)
    keys = token_keys(7, torch.arange(ROWS), torch.arange(LENGTH))
    drop = AttentionDropout(keys, site_key(3, "attention"), 0, (range(LENGTH),), 0.5)
    agree(form, AttentionMask(dropout=drop), qkv)
    kept = drop.kept(4)
    assert kept.shape == (ROWS, 4, LENGTH, LENGTH)
    assert torch.equal(replace(drop, first_head=2).kept(2), kept[:, 2:])
    for number in range(4):
        assert not torch.equal(kept[:, number], kept[:, number - 1])


def test_the_old_rule_of_dropout_is_kept_for_runs_that_began_under_it() -> None:
    """A hash of 64 bits for each weight, of query token, head and key column, and 1 - p as the scale."""
    keys = token_keys(7, torch.arange(ROWS), torch.arange(LENGTH))
    site, heads = site_key(3, "attention", OLD_RULE), torch.arange(2, 6)
    drop = AttentionDropout(keys, site, 2, (range(1, LENGTH + 1),), 0.1, OLD_RULE)
    elements = heads[:, None, None] * (1 << 32) + torch.arange(1, LENGTH + 1)
    bits = mix(mix(keys + key(3, "attention"))[:, None, :, None] + elements * (0x94D049BB133111EB - (1 << 64)))
    expected = (bits >> 32 & 0xFFFFFFFF) >= int(0.1 * 2**32)
    assert torch.equal(drop.kept(4), expected) and drop.keep == 0.9
    assert not torch.equal(replace(drop, rule=2).kept(4), expected)


@pytest.mark.parametrize("form", [plain, fused])
def test_other_documents_and_later_tokens_weigh_exactly_nothing(form: Attention) -> None:
    q, k, v = (tensor.detach() for tensor in inputs(4, 2))
    before = form(q, k, v, DOCUMENTS)
    for tensor in (q, k, v):
        tensor[0, 3:5] += 1.0  # document 1 of row 0
        tensor[1, 8] += 1.0  # the last token of row 1
    after = form(q, k, v, DOCUMENTS)
    others = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    others[0, 3:5] = others[1, 8] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before, after)


def test_fused_is_as_accurate_as_plain_in_fp32() -> None:
    """Against float64, within twice the plain form's error."""
    qkv = inputs(4, 2)
    for mask in (CAUSAL, AttentionMask("full"), AttentionMask(window=4), DOCUMENTS):
        exact = plain(*qkv, mask).detach()
        narrow = [tensor.detach().float() for tensor in qkv]
        errors = [float((form(*narrow, mask).double() - exact).abs().max()) for form in (fused, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-7


@pytest.mark.parametrize("form", [plain, fused])
@pytest.mark.parametrize("documents", [None, NUMBERS], ids=["whole", "documents"])
def test_recomputing_saves_no_weights_and_changes_no_bit(
    documents: torch.Tensor | None, form: Callable[..., torch.Tensor]
) -> None:
    """Nothing of the weights is saved: query, key and value alone, and in torch 2.11 a tensor without elements."""
    qkv = inputs(4, 2)
    keys = token_keys(1, torch.arange(ROWS), torch.arange(LENGTH))
    drop = AttentionDropout(keys, site_key(3, "attention"), 0, (range(LENGTH),), 0.5)
    mask = AttentionMask(q_documents=documents, k_documents=documents, dropout=drop)
    grad = random(ROWS, LENGTH, 4, WIDTH, seed=9)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = recomputing(form)(*qkv, mask)
    others = [tensor for tensor in kept if not any(tensor is x for x in qkv)]
    assert not any(tensor.is_floating_point() and tensor.numel() for tensor in others)
    expected = form(*qkv, mask)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, qkv, grad), torch.autograd.grad(expected, qkv, grad), strict=True):
        assert torch.equal(one, other)
