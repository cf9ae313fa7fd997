"""The sequence cut over the context axis: who holds which columns, and attention across the cut in float64.

That whole models train alike is tests/proof/test_parity.py's; here are the rows that need other batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega.core.batch import DecoderBatch, zigzag
from mega.core.ops.attention import plain
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import CAUSAL, AttentionMask
from mega.core.ops.suite import REFERENCE
from mega.core.parallel.context import ContextComm, divides, with_context_parallel
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.proof.parity import compare, own_samples, snapshots, synthetic_batch, within
from tests.support.ranks import random
from tests.support.runs import small_run

same = torch.testing.assert_close

COMMS: list[ContextComm] = ["ring", "all-to-all"]


def axis_of(size: int, index: int) -> Axis:
    return Axis("cp", tuple(range(size)), index)


# -- who holds which columns


@given(size=st.integers(1, 9), chunk=st.integers(1, 5))
def test_every_column_has_one_holder_and_all_have_equal_work(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    held = [zigzag(torch.arange(length)[None], index, size)[0] for index in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    assert all(bool((one.diff() > 0).all()) for one in held)
    # A query in column c sees c + 1 keys.
    assert len({int((one + 1).sum()) for one in held}) == 1


def batch(rows: int, length: int) -> DecoderBatch:
    tokens = torch.arange(rows * length).view(rows, length)
    documents = tokens // 3
    return DecoderBatch(tokens, tokens + 1, tokens.float(), tokens % length, torch.arange(rows), documents)


def test_a_batch_is_cut_by_columns_and_keeps_its_documents() -> None:
    whole = batch(2, 12)
    for index, expected in enumerate([[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]):
        ours = whole.split(index, 3)
        assert ours.columns is not None and ours.columns.tolist() == expected
        for name in ("tokens", "labels", "loss_weights", "positions"):
            assert torch.equal(getattr(ours, name), getattr(whole, name)[:, expected]), name
        assert ours.documents is whole.documents and ours.samples is whole.samples


def test_one_rank_cuts_nothing() -> None:
    whole = batch(1, 7)
    assert whole.split(0, 1) is whole
    assert with_context_parallel(REFERENCE, axis_of(1, 0), "ring") is REFERENCE


def test_heads_are_shared_out_where_key_value_heads_divide() -> None:
    assert divides(8, 4, 2) and divides(8, 4, 4) and not divides(8, 2, 4) and not divides(3, 3, 2)


# -- attention across the cut

ROWS, WIDTH, FIRST_HEAD = 2, 4, 3


def mask_of(features: str, s: int, t: int, heads: int) -> AttentionMask:
    """The mask of whole rows that has the features named, such as "full window dropout"."""
    queries = keys = dropout = None
    if "documents" in features:
        # Row 0: two halves, so that no query of a late chunk sees an early one. Row 1: documents of three tokens.
        queries, keys = (torch.stack([torch.arange(n) // (n // 2), torch.arange(n) // 3]) for n in (s, t))
    if "dropout" in features:
        token = token_keys(7, torch.arange(ROWS), torch.arange(s))
        dropout = AttentionDropout(token, site_key(2, "attention"), FIRST_HEAD, (range(t),), 0.3)
    return AttentionMask(
        kind="full" if "full" in features else "causal",
        window=t // 3 if "window" in features else None,
        q_documents=queries,
        k_documents=queries if s == t else keys,
        q_offset=(t - s or -4) if "offset" in features else 0,
        dropout=dropout,
    )


def attention(
    groups: Groups, rank: int, size: int, comm: ContextComm, features: str, heads: int, kv_heads: int
) -> None:
    """Each of the masks named, which are parted by commas; of cross attention queries and keys differ in number."""
    axis = Mesh(rank, cp=size, groups=groups).cp
    for each in features.split(","):
        s, t = 6 * size, (10 if "cross" in each else 6) * size
        mask = mask_of(each, s, t, heads)
        whole = [
            random(ROWS, length, n, WIDTH, seed=n + i).requires_grad_()
            for i, (length, n) in enumerate(((s, heads), (t, kv_heads), (t, kv_heads)))
        ]
        grad = random(ROWS, s, heads, WIDTH, seed=99)
        expected = plain(*whole, mask)
        wanted = torch.autograd.grad(expected, whole, grad)

        own = [zigzag(torch.arange(n)[None], rank, size)[0] for n in (s, t, t)]
        ours = [x.detach()[:, held].requires_grad_() for x, held in zip(whole, own, strict=True)]
        found = with_context_parallel(REFERENCE, axis, comm).attention(*ours, mask)
        same(found, expected[:, own[0]], rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(found, ours, grad[:, own[0]])
        same(grads, tuple(g[:, held] for g, held in zip(wanted, own, strict=True)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("kind", ["causal", "documents", "dropout", "documents and dropout"])
def test_attention_across_the_cut(pool: Pool, comm: ContextComm, kind: str) -> None:
    pool.run(attention, 2, comm, kind, 4, 2, world=2)


EVERY = "full,full documents dropout,window,window documents dropout,full window dropout,offset"
CROSS = "full cross documents dropout,cross offset,cross offset window dropout,cross full window documents,cross"


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_mask_across_the_cut(pool: Pool, size: int, comm: ContextComm) -> None:
    """`cross` alone: queries stand at the first keys, and no query sees the last keys. `offset` alone: the first
    queries precede all keys and see none."""
    pool.run(attention, size, comm, f"{EVERY},{CROSS}", 6, 6 if size == 3 else 2, world=size)


@pytest.mark.parametrize(
    ("size", "comm", "heads", "kv_heads"), [(3, "ring", 2, 1), (4, "ring", 4, 2), (4, "all-to-all", 8, 4)]
)
def test_attention_across_more_ranks(pool: Pool, size: int, comm: ContextComm, heads: int, kv_heads: int) -> None:
    pool.run(attention, size, comm, "documents and dropout", heads, kv_heads, world=size)


def chooses(groups: Groups, rank: int, heads: int, kv_heads: int) -> int:
    """How many heads of ours the suite's own attention sees; 0 where it is never asked."""
    from dataclasses import replace

    seen: list[int] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        seen.append(q.shape[2])
        return plain(q, k, v, mask)

    axis = Mesh(rank, cp=2, groups=groups).cp
    x = [random(1, 4, n, WIDTH, seed=n) for n in (heads, kv_heads, kv_heads)]
    with_context_parallel(replace(REFERENCE, attention=spy), axis, "auto").attention(*x, CAUSAL)
    return sum(seen)


def test_auto_exchanges_heads_where_they_divide_and_is_a_ring_elsewhere(pool: Pool) -> None:
    assert pool.run(chooses, 4, 2, world=2) == [2, 2]
    assert pool.run(chooses, 4, 1, world=2) == [0, 0]


# -- whole models


def agree(pool: Pool, world: int, layout: dict[str, Any], shared: dict[str, Any]) -> None:
    expected = snapshots(pool, small_run("llama", **shared), 1, (1, 2))
    found = snapshots(pool, small_run("llama", world, **shared, **layout), world, (1, 2))
    for difference in compare("fp64", (1, 2), expected, found):
        assert within("fp64", difference), difference


@pytest.mark.parametrize("comm", COMMS)
def test_packed_documents(pool: Pool, comm: ContextComm) -> None:
    """Their borders fall inside chunks, and hide whole blocks."""
    agree(pool, 4, {"cp": 4, "cp_comm": comm}, {"reset_attention": True, "global_batch": 4})


def test_the_mean_of_each_microbatch(pool: Pool) -> None:
    """Ranks of one row share one mean."""
    agree(pool, 4, {"cp": 4}, {"loss_normalizer": "microbatch", "global_batch": 4})


def test_some_rank_of_the_rows_above_has_nothing_to_learn() -> None:
    """Ragged loss weights leave a shard wholly masked, while its neighbours' keys and values still need it."""
    run = small_run("llama", 4, cp=4, global_batch=4)
    rows = torch.cat(list(own_samples(run, Mesh.at(0, cp=4), 0)))
    shards = [synthetic_batch(run, rows).split(index, 4).weights["lm"].sum(1) for index in range(4)]
    sums = torch.stack(shards)
    assert bool((sums == 0).any()) and bool((sums.sum(0) > 0).all())
