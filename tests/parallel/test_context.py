"""The sequence cut over the context axis: who holds which columns, and attention across the cut in float64.

That whole models train alike is tests/parallel/test_parity.py's; here are the rows that need other batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega.core.batch import DecoderBatch, zigzag
from mega.core.ops.attention import Drop, plain
from mega.core.ops.counter import token_keys
from mega.core.ops.suite import REFERENCE
from mega.core.parallel.context import Way, across, divides
from mega.core.parallel.launch import Pool
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.proof.parity import compare, own_samples, snapshots, synthetic_batch, within
from tests.support.ranks import random
from tests.support.runs import small_run

same = torch.testing.assert_close

WAYS: list[Way] = ["ring", "all-to-all"]


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
    assert across(REFERENCE, axis_of(1, 0), "ring") is REFERENCE


def test_heads_are_dealt_out_where_key_value_heads_divide() -> None:
    assert divides(8, 4, 2) and divides(8, 4, 4) and not divides(8, 2, 4) and not divides(3, 3, 2)


# -- attention across the cut

ROWS, WIDTH, FIRST_HEAD = 2, 4, 3


def side_inputs(kind: str, length: int, heads: int) -> tuple[torch.Tensor | None, Drop | None]:
    """Documents and dropout of whole rows."""
    documents = drop = None
    if "documents" in kind:
        # Row 0: two halves, so that no query of a late chunk sees an early one. Row 1: documents of three tokens.
        halves = torch.arange(length) // (length // 2)
        documents = torch.stack([halves, torch.arange(length) // 3])
    if "dropout" in kind:
        keys = token_keys(7, torch.arange(ROWS), torch.arange(length))
        drop = Drop(keys, torch.arange(FIRST_HEAD, FIRST_HEAD + heads), torch.arange(length), 0.3)
    return documents, drop


def attention(groups: Groups, rank: int, size: int, way: Way, kind: str, heads: int, kv_heads: int) -> None:
    axis = Mesh(rank, cp=size, groups=groups).cp
    length = 6 * size
    own = zigzag(torch.arange(length)[None], axis.index, axis.size)[0]
    documents, drop = side_inputs(kind, length, heads)
    whole = [
        random(ROWS, length, n, WIDTH, seed=n + i).requires_grad_() for i, n in enumerate((heads, kv_heads, kv_heads))
    ]
    grad = random(ROWS, length, heads, WIDTH, seed=99)
    expected = plain(*whole, documents, drop)
    wanted = torch.autograd.grad(expected, whole, grad)

    ours = [x.detach()[:, own].requires_grad_() for x in whole]
    our_drop = None if drop is None else drop._replace(keys=drop.keys[:, own], columns=own)
    found = across(REFERENCE, axis, way).attention(*ours, documents, our_drop)
    same(found, expected[:, own], rtol=1e-12, atol=1e-12)
    same(torch.autograd.grad(found, ours, grad[:, own]), tuple(g[:, own] for g in wanted), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["causal", "documents", "dropout", "documents and dropout"])
def test_attention_across_the_cut(pool: Pool, way: Way, kind: str) -> None:
    pool.run(attention, 2, way, kind, 4, 2, world=2)


@pytest.mark.parametrize(
    ("size", "way", "heads", "kv_heads"), [(3, "ring", 2, 1), (4, "ring", 4, 2), (4, "all-to-all", 8, 4)]
)
def test_attention_across_more_ranks(pool: Pool, size: int, way: Way, heads: int, kv_heads: int) -> None:
    pool.run(attention, size, way, "documents and dropout", heads, kv_heads, world=size)


def chooses(groups: Groups, rank: int, heads: int, kv_heads: int) -> int:
    """How many heads of ours the suite's own attention sees; 0 where it is never asked."""
    from dataclasses import replace

    seen: list[int] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(q.shape[2])
        return plain(q, k, v, *more)

    axis = Mesh(rank, cp=2, groups=groups).cp
    x = [random(1, 4, n, WIDTH, seed=n) for n in (heads, kv_heads, kv_heads)]
    across(replace(REFERENCE, attention=spy), axis, "auto").attention(*x)
    return sum(seen)


def test_auto_swaps_heads_where_they_divide_and_circles_elsewhere(pool: Pool) -> None:
    assert pool.run(chooses, 4, 2, world=2) == [2, 2]
    assert pool.run(chooses, 4, 1, world=2) == [0, 0]


# -- whole models


def agree(pool: Pool, world: int, layout: dict[str, Any], shared: dict[str, Any]) -> None:
    expected = snapshots(pool, small_run("llama", **shared), 1, (1, 2))
    found = snapshots(pool, small_run("llama", world, **shared, **layout), world, (1, 2))
    for difference in compare("fp64", (1, 2), expected, found):
        assert within("fp64", difference), difference


@pytest.mark.parametrize("way", WAYS)
def test_packed_documents(pool: Pool, way: Way) -> None:
    """Their borders fall inside chunks, and hide whole blocks."""
    agree(pool, 4, {"cp": 4, "cp_comm": way}, {"reset_attention": True, "global_batch": 4})


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
