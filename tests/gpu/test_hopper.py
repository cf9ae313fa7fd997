"""The attention of hopper.cu: which calls it takes, against float64, in recorded graphs, and bit by bit again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega.core.device import is_hopper
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PartialAttention
from tests.support.attention_cases import share_of_bound
from tests.support.triton import CUDA, DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA or not is_hopper(torch.device("cuda")), reason="hopper.cu needs a Hopper GPU"),
]
DTYPES = torch.bfloat16, torch.float16
KINDS = "causal", "full"
WIDTHS = 64, 128
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def mask_of(kind: str, b: int, s: int, *, documents: bool, drop: bool) -> AttentionMask:
    numbers = keys = None
    if documents:
        lengths = torch.randint(1, 200, (b, s))
        numbers = (torch.arange(s) >= lengths.cumsum(1)[..., None]).sum(1).to(DEVICE)
    if drop:
        keys = token_keys(3, torch.arange(b, device=DEVICE), torch.arange(s, device=DEVICE))
    dropout = None if keys is None else AttentionDropout(keys, site_key(1, "attention"), 2, (range(s),), 0.1)
    return AttentionMask(kind, q_documents=numbers, k_documents=numbers, dropout=dropout)  # type: ignore[arg-type]


def inputs_of(b: int, s: int, heads: int, dtype: torch.dtype, width: int = 64) -> Inputs:
    torch.manual_seed(s)
    q, k, v = torch.randn(b, s, 3 * heads, width, device=DEVICE).to(dtype).split(heads, 2)
    return q, k, v, torch.randn(b, s, heads, width, device=DEVICE).to(dtype)


def kernels() -> PartialAttention:
    from mega.core.ops.kernels import attention

    return PartialAttention(attention.forward, attention.backward)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", [256, 384])
@pytest.mark.parametrize("width", WIDTHS)
def test_against_float64(width: int, s: int, kind: str, drop: bool, documents: bool) -> None:
    """A length of 384 has forward tiles of 128 rows instead of 256."""
    from mega.core.ops.kernels import hopper

    for dtype in DTYPES:
        b, heads = 9, 8
        mask, inputs = mask_of(kind, b, s, documents=documents, drop=drop), inputs_of(b, s, heads, dtype, width)
        q, k, v, grad = inputs
        assert hopper.applies(q, k, v, mask) and hopper.loads(grad)
        share_of_bound(kernels(), dtype, inputs, mask)


def test_dropout_over_two_runs_of_columns() -> None:
    from mega.core.ops.kernels import hopper

    mask, inputs = mask_of("full", 9, 256, documents=False, drop=True), inputs_of(9, 256, 8, torch.bfloat16)
    assert mask.dropout is not None
    mask = replace(mask, dropout=replace(mask.dropout, columns=(range(16, 144), range(320, 448))))
    assert hopper.applies(inputs[0], inputs[1], inputs[2], mask)
    share_of_bound(kernels(), torch.bfloat16, inputs, mask)


def computed(inputs: Inputs, mask: AttentionMask) -> list[torch.Tensor]:
    q, k, v, grad = inputs
    out, lse = kernels().forward(q, k, v, mask)
    return [out, lse, *kernels().backward(grad, q, k, v, out, lse, mask)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_again_and_in_a_graph_of_other_values(kind: str, width: int) -> None:
    mask, inputs = mask_of(kind, 16, 512, documents=True, drop=True), inputs_of(16, 512, 12, torch.bfloat16, width)
    once = computed(inputs, mask)
    assert all(map(torch.equal, once, computed(inputs, mask)))
    q, k, v, grad = map(torch.zeros_like, inputs)
    held = q, k, v, grad
    computed(held, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = computed(held, mask)
    for to, x in zip(held, inputs, strict=True):
        to.copy_(x)
    graph.replay()
    assert all(map(torch.equal, once, recorded))


def test_a_row_does_not_depend_on_the_batch() -> None:
    """So a sample has the same gradients in any microbatch that is large enough."""
    mask, inputs = mask_of("causal", 32, 512, documents=False, drop=True), inputs_of(32, 512, 8, torch.bfloat16)
    assert mask.dropout is not None
    half = replace(mask, dropout=replace(mask.dropout, keys=mask.dropout.keys[16:]))
    q, k, v, grad = (x[16:] for x in inputs)
    for whole, part in zip(computed(inputs, mask), computed((q, k, v, grad), half), strict=True):
        assert torch.equal(whole[16:], part)


def test_what_it_refuses() -> None:
    from mega.core.ops.kernels import hopper

    mask, (q, k, v, grad) = mask_of("causal", 8, 256, documents=True, drop=True), inputs_of(8, 256, 9, torch.bfloat16)
    assert hopper.applies(q, k, v, mask)
    assert mask.dropout is not None and mask.k_documents is not None
    others = (
        replace(mask, window=16),
        replace(mask, softcap=30.0),
        replace(mask, q_offset=1),
        replace(mask, k_documents=mask.k_documents.clone()),
        replace(mask, dropout=replace(mask.dropout, columns=(range(1, 257),))),
        replace(mask, dropout=replace(mask.dropout, rule=1)),
    )
    assert not any(hopper.applies(q, k, v, other) for other in others)
    plain = AttentionMask()
    assert not hopper.applies(q[:, :200], k[:, :200], v[:, :200], plain)  # not whole tiles
    assert not hopper.applies(q[:1], k[:1], v[:1], plain)  # too little for the device
    assert not hopper.applies(q, k[:, :, :3], v[:, :, :3], plain)  # grouped heads
    assert not hopper.applies(q[..., :32], k[..., :32], v[..., :32], plain)
    assert not hopper.loads(grad[..., 1:])
