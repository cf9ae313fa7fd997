"""Attention: the plain form against loops in float64, the fused one against the plain."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from mega.core.ops.attention import Drop, again, fused, plain
from mega.core.ops.counter import keep_mask, token_keys
from tests.support.ranks import random

ROWS, LENGTH, WIDTH = 2, 9, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9])


def inputs(heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((ROWS, LENGTH, count, WIDTH) for count in (heads, kv_heads, kv_heads))
    q, k, v = (random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    return q, k, v


def by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query at a time; `kept` [b, heads, s, s] says which attention weights survive, doubled."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for row in range(ROWS):
        for head in range(q.shape[2]):
            for at in range(LENGTH):
                seen = [
                    other for other in range(at + 1) if documents is None or documents[row, other] == documents[row, at]
                ]
                scores = torch.stack([q[row, at, head] @ k[row, other, head // group] for other in seen])
                weights = (scores / math.sqrt(WIDTH)).softmax(0)
                if kept is not None:
                    weights = weights * kept[row, head, at, seen] * 2
                out[row, at, head] = weights @ v[row, seen, head // group]
    return out


@pytest.mark.parametrize("form", [plain, fused])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention(
    heads: int, kv_heads: int, documents: torch.Tensor | None, form: Callable[..., torch.Tensor]
) -> None:
    """Values and gradients; query head i reads key/value head i // (heads / kv_heads)."""
    qkv = inputs(heads, kv_heads)
    grad = random(ROWS, LENGTH, heads, WIDTH, seed=9)
    expected = by_loops(*qkv, documents)
    wanted = torch.autograd.grad(expected, qkv, grad)
    found = form(*qkv, documents)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, qkv, grad), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", [plain, fused])
def test_dropout_of_weights(form: Callable[..., torch.Tensor]) -> None:
    """A weight's fate depends on its query token, head and key column alone."""
    qkv = inputs(4, 2)
    keys, heads, columns = (
        token_keys(7, torch.arange(ROWS), torch.arange(LENGTH)),
        torch.arange(4),
        torch.arange(LENGTH),
    )
    kept = keep_mask(keys[:, None, :, None], heads[:, None, None] * (1 << 32) + columns, 0.5)
    assert kept.shape == (ROWS, 4, LENGTH, LENGTH)
    found = form(*qkv, None, Drop(keys, heads, columns, 0.5))
    torch.testing.assert_close(found, by_loops(*qkv, kept=kept), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [plain, fused])
def test_other_documents_and_later_tokens_weigh_exactly_nothing(form: Callable[..., torch.Tensor]) -> None:
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
    exact = plain(*qkv).detach()
    narrow = [tensor.detach().float() for tensor in qkv]
    errors = [float((form(*narrow).double() - exact).abs().max()) for form in (fused, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-7


@pytest.mark.parametrize("form", [plain, fused])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_again_keeps_no_weights_and_changes_no_bit(
    documents: torch.Tensor | None, form: Callable[..., torch.Tensor]
) -> None:
    """Nothing of the weights is kept: query, key and value alone, and in torch 2.11 a tensor without elements."""
    qkv = inputs(4, 2)
    drop = Drop(token_keys(1, torch.arange(ROWS), torch.arange(LENGTH)), torch.arange(4), torch.arange(LENGTH), 0.5)
    grad = random(ROWS, LENGTH, 4, WIDTH, seed=9)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = again(form)(*qkv, documents, drop)
    others = [tensor for tensor in kept if not any(tensor is x for x in qkv)]
    assert not any(tensor.is_floating_point() and tensor.numel() for tensor in others)
    expected = form(*qkv, documents, drop)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, qkv, grad), torch.autograd.grad(expected, qkv, grad), strict=True):
        assert torch.equal(one, other)
