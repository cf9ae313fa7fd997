"""The attention kernels against the plain form in float64, under masks drawn at random, and their dropout bit by bit.

On a CUDA device; without one, a few small cases where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from mega.core.architecture.layer import Rope
from mega.core.model.forward import padding_documents
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PartialAttention
from mega.core.ops.rotary import rotary_table
from tests.support.attention_cases import check_kept, check_values, on_device, share_of_bound
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [
    pytest.mark.gpu,
    needs_kernels,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # the interpreter's, of a row without a key
]
LONGEST, WIDTHS = (500, [32, 64, 80, 96, 128, 256]) if CUDA else (100, [16, 20, 32])
CASES = int(os.environ.get("MEGA_CASES", "60" if CUDA else "2"))
# The interpreter truncates to bf16; in fp32 it shows what rounding to 16 bits would hide.
DTYPES = (torch.bfloat16, torch.float16) if CUDA else (torch.float16, torch.float32)


def kernels() -> PartialAttention:
    from mega.core.ops.kernels import attention

    return PartialAttention(attention.forward, attention.backward)


@pytest.mark.parametrize("seed", range(CASES))
def test_every_mask(seed: int) -> None:
    check_values(kernels(), seed, LONGEST, WIDTHS, DTYPES[seed % 2], DEVICE)


@pytest.mark.parametrize("seed", range(CASES))
def test_dropout_is_that_of_a_cpu_bit_by_bit(seed: int) -> None:
    check_kept(kernels(), seed, 256 if CUDA else 80, DTYPES[seed % 2], DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_some_columns_in_any_order(dtype: torch.dtype) -> None:
    """As in the last layer of BERT: the documents and dropout keys of queries are those of their columns."""
    b, t, s, heads, width = (4, 500, 140, 3, 64) if CUDA else (2, 90, 70, 2, 16)
    torch.manual_seed(0)
    columns = torch.stack([torch.randperm(t)[:s] for _ in range(b)])
    documents = padding_documents(torch.tensor([t, t - 20, t // 2, 7][:b]), t)
    keys = token_keys(3, torch.arange(b), torch.arange(t)).gather(1, columns)
    drop = AttentionDropout(keys, site_key(1, "attention"), 0, (range(t),), 0.1)
    mask = AttentionMask("full", None, documents.gather(1, columns), documents, dropout=drop, covered=True)
    shapes = (s, heads), (t, heads), (t, heads), (s, heads)
    q, k, v, grad = (torch.randn(b, length, n, width, device=DEVICE).to(dtype) for length, n in shapes)
    share_of_bound(kernels(), dtype, (q, k, v, grad), on_device(mask, DEVICE))


def test_dropout_over_two_runs_of_columns() -> None:
    check_kept(kernels(), 0, 256 if CUDA else 140, DTYPES[0], DEVICE, runs=True)


# -- the gradients of a fused projection

DTYPE = torch.bfloat16 if CUDA else torch.float16
BATCH, LENGTH, WIDTH = (2, 300, 64) if CUDA else (2, 35, 16)
SIZES = [(2, 2), (4, 2), (3, 1)] if CUDA else [(4, 2)]
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def bidirectional() -> AttentionMask:
    """BERT's mask: rows that end with padding, and dropout."""
    keys = token_keys(1, torch.arange(BATCH, device=DEVICE), torch.arange(LENGTH, device=DEVICE))
    documents = (torch.arange(LENGTH, device=DEVICE) < torch.tensor([[LENGTH - 5], [LENGTH]], device=DEVICE)).long()
    drop = AttentionDropout(keys, site_key(3, "attention"), 0, (range(LENGTH),), 0.1)
    return AttentionMask("full", q_documents=documents, k_documents=documents, dropout=drop)


def split_rows(whole: torch.Tensor, heads_: int, kv_heads: int) -> Split:
    """q, k, v as views of [b s, (heads + 2 kv_heads) d]."""
    q, k, v = whole.view(BATCH, LENGTH, -1, WIDTH).split([heads_, kv_heads, kv_heads], 2)
    return q, k, v


def used_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Split, torch.Tensor | None]:
    return (q, k, v), None


def query_used_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Split, torch.Tensor | None]:
    return (q, k, v), q


def key_copied(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Split, torch.Tensor | None]:
    return (q, k * 1, v), None


@pytest.mark.parametrize(
    ("heads_", "kv_heads", "rotary", "use"),
    [
        *((*sizes, rotary, used_once) for sizes in SIZES for rotary in (False, True)),
        (4, 2, False, query_used_twice),
        (4, 2, True, query_used_twice),
        (4, 2, False, key_copied),
    ],
)
def test_gradients_of_a_fused_projection(
    heads_: int,
    kv_heads: int,
    rotary: bool,
    use: Callable[..., tuple[Split, torch.Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention writes them to one tensor, which is then the projection's gradient, with the bits of three tensors that
    are concatenated. They are also concatenated if one of them is another tensor, or if they have to be rotated."""
    from mega.core.ops.kernels import attention, heads

    torch.manual_seed(0)
    columns, mask = (heads_ + 2 * kv_heads) * WIDTH, bidirectional()
    fused, bias = drawn(BATCH * LENGTH, columns), drawn(columns).requires_grad_()
    grad, more = drawn(BATCH, LENGTH, heads_, WIDTH), drawn(BATCH, LENGTH, heads_, WIDTH)
    positions = torch.arange(LENGTH, device=DEVICE).repeat(BATCH)
    table = rotary_table(positions, Rope(base=10000.0, width=WIDTH), DTYPE) if rotary else None
    launched: list[str] = []

    def launch(kernel: object, *args: object, **options: object) -> None:
        launched.append(getattr(kernel, "__name__", ""))
        run(kernel, *args, **options)  # type: ignore[arg-type]

    def results() -> tuple[torch.Tensor, ...]:
        x = fused.clone().requires_grad_() * 1  # rotated in place
        split = heads.split_heads(x, bias, heads_, kv_heads, table)
        q, k, v = (each.view(BATCH, LENGTH, -1, WIDTH) for each in split)
        (q, k, v), other = use(q, k, v)
        outs = [attention.attention(q, k, v, mask), *([] if other is None else [other])]
        launched.clear()
        return torch.autograd.grad(outs, (x, bias), [grad, more][: len(outs)])

    run = heads.launch
    monkeypatch.setattr(heads, "launch", launch)
    found, of_bias = results()
    assert ("_gather" in launched) is (rotary or use is not used_once)
    monkeypatch.setattr(attention, "joined", lambda *_: None)
    expected, expected_bias = results()
    assert "_gather" in launched
    assert torch.equal(found, expected) and bool(found.any())
    torch.testing.assert_close(of_bias, expected_bias)


@pytest.mark.parametrize("rotary", [False, True])
def test_gradients_that_others_read_stay_as_they_are(rotary: bool) -> None:
    """A hook and the caller get the gradients of query and key as attention wrote them, in two backward passes."""
    from mega.core.ops.kernels import attention, heads

    torch.manual_seed(0)
    mask, table = bidirectional(), None
    if rotary:
        positions = torch.arange(LENGTH, device=DEVICE).repeat(BATCH)
        table = rotary_table(positions, Rope(base=10000.0, width=WIDTH), DTYPE)
    x, grad = drawn(BATCH * LENGTH, 3 * 2 * WIDTH).requires_grad_() * 1, drawn(BATCH, LENGTH, 2, WIDTH)
    q, k, v = (each.view(BATCH, LENGTH, 2, WIDTH) for each in heads.split_heads(x, None, 2, 2, table))
    seen: list[torch.Tensor] = []
    q.register_hook(seen.append)
    out = attention.attention(q, k, v, mask)
    first = torch.autograd.grad(out, (x, q, k), grad, retain_graph=True)
    before = [each.clone() for each in first]
    second = torch.autograd.grad(out, (x, q, k), grad)
    assert all(map(torch.equal, first, before)) and all(map(torch.equal, first, second))
    query, key, value = (each.detach().clone().requires_grad_() for each in (q, k, v))
    expected = torch.autograd.grad(attention.attention(query, key, value, mask), (query, key), grad)
    assert all(map(torch.equal, first[1:], expected))
    assert len(seen) == 2 and all(torch.equal(each, expected[0]) for each in seen)


@pytest.mark.parametrize(("heads_", "kv_heads"), SIZES)
def test_gradients_of_a_block_of_keys(heads_: int, kv_heads: int) -> None:
    """The backward pass over a block: from views of one tensor, which the gradients then are too, and from copies."""
    from mega.core.ops.kernels.attention import PARTIAL
    from mega.core.ops.kernels.heads import joined

    torch.manual_seed(0)
    mask, grad = bidirectional(), drawn(BATCH, LENGTH, heads_, WIDTH)
    views = split_rows(drawn(BATCH * LENGTH, (heads_ + 2 * kv_heads) * WIDTH), heads_, kv_heads)
    copies = [each.clone() for each in views]
    out, lse = PARTIAL.forward(*views, mask)
    found, expected = (PARTIAL.backward(grad, *each, out, lse, mask) for each in (views, copies))
    assert joined(*found) is not None and joined(*expected) is None
    assert all(map(torch.equal, found, expected))
    q, k, v, grad = (each[:, :20] for each in (*views, grad))
    mask = AttentionMask(q_documents=mask.q_documents[:, :20], k_documents=mask.k_documents[:, :20])  # type: ignore[index]
    out, lse = PARTIAL.forward(q, k, v, mask)
    found, expected = (
        PARTIAL.backward(grad, *each, out, lse, mask) for each in ((q, k, v), (q.clone(), k.clone(), v.clone()))
    )
    assert joined(*found) is None and all(map(torch.equal, found, expected))


def test_adjacent_heads_on_the_meta_device() -> None:
    """Every address is 0 there."""
    from mega.core.ops.kernels import attention
    from mega.core.ops.kernels.heads import joined

    whole, mask = torch.empty(BATCH * LENGTH, 6 * WIDTH, device="meta", dtype=DTYPE), bidirectional()
    q, k, v = split_rows(whole, 4, 1)
    parts = joined(q, k, v)
    assert parts is not None and parts.shape == (BATCH, LENGTH, 6, WIDTH)
    assert joined(q, split_rows(torch.empty_like(whole), 4, 1)[1], v) is None
    assert joined(q, v, k) is None and joined(k, q, v) is None
    out, lse = attention.forward(q, k, v, mask)
    assert joined(*attention.backward(out, q, k, v, out, lse, mask)) is not None
    assert joined(*attention.backward(out, q, k.clone(), v, out, lse, mask)) is None
