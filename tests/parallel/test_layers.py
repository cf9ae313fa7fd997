"""Collectives and cut layers against the same mathematics on one process, in float64 on random inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mega.core.architecture import Cut, Init, Tensor
from mega.core.parallel.collectives import (
    all_gather,
    all_reduce,
    local_shard,
    reduce_from_region,
    reduce_scatter,
)
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import SINGLE, Axis, Groups, Mesh
from mega.core.parallel.peers import peers
from mega.core.parallel.region import ALONE, Region
from mega.core.parallel.vocab import VocabEmbedding, cross_entropy, logits
from mega.core.processes.pool import Pool
from tests.support.ranks import assert_own_part, fill, maker, random

same = torch.testing.assert_close


def tensor_axis(groups: Groups, rank: int, size: int) -> Axis:
    return Mesh(rank, tp=size, groups=groups).tp


# -- collectives


def collectives(groups: Groups, rank: int, size: int) -> None:
    axis = tensor_axis(groups, rank, size)
    parts = [random(2 * size, 3, seed=number) for number in range(size)]
    mine, total = parts[rank], torch.stack(parts).sum(0)

    summed, largest, least = mine.clone(), mine.clone(), mine.clone()
    all_reduce(summed, axis)
    all_reduce(largest, axis, "max")
    work = all_reduce(least, axis, "min", wait=False)
    work.wait()
    same(summed, total)
    same(largest, torch.stack(parts).amax(0), rtol=0, atol=0)
    same(least, torch.stack(parts).amin(0), rtol=0, atol=0)
    same(all_gather(mine, axis), torch.cat(parts), rtol=0, atol=0)
    same(reduce_scatter(mine, axis), local_shard(total, axis))
    same(reduce_scatter(mine.t().contiguous().t(), axis), local_shard(total, axis))  # not contiguous


def regions(groups: Groups, rank: int, size: int) -> None:
    """Forward and backward of leaving a region, with and without tokens shared out."""
    axis = tensor_axis(groups, rank, size)
    parts = [random(2 * size, 3, seed=number) for number in range(size)]
    total, grad = torch.stack(parts).sum(0), random(2 * size, 3, seed=100)
    for sequence, ours in ((False, lambda x: x), (True, lambda x: local_shard(x, axis))):
        leaf = parts[rank].clone().requires_grad_()
        out = reduce_from_region(leaf, axis, sequence)
        out.backward(ours(grad))
        same((out, leaf.grad), (ours(total), grad))


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(pool: Pool, size: int) -> None:
    pool.run(collectives, size, world=size)
    pool.run(regions, size, world=size)


def test_an_axis_of_one_rank_copies_nothing() -> None:
    x = random(4, 3, seed=0)
    all_reduce(x, SINGLE)
    for once in (all_gather(x, SINGLE), reduce_scatter(x, SINGLE), local_shard(x, SINGLE)):
        assert once is x
    assert reduce_from_region(x, SINGLE, True) is x


# -- linears

WIDE = (Cut(0, "tp", 12),)
GATE, UP = Tensor("gate", (12, 8), (0,), Init(), WIDE), Tensor("up", (12, 8), (0,), Init(), WIDE)
GATE_BIAS, UP_BIAS = Tensor("gate_bias", (12,), (0,), Init(), WIDE), Tensor("up_bias", (12,), (0,), Init(), WIDE)
DOWN = Tensor("down", (8, 12), (0,), Init(), (Cut(1, "tp", 12),))
DOWN_BIAS = Tensor("down_bias", (8,), (0,), Init(), partial=("sequence",))
TOKENS = 12


def linears(groups: Groups, rank: int, size: int, sequence: bool, overlap: bool) -> None:
    """A gated feed-forward: two stacked columns, then a row."""
    tensors = (GATE, UP, GATE_BIAS, UP_BIAS, DOWN, DOWN_BIAS)
    wholes = {t.name: random(*t.shape, seed=seed).requires_grad_() for seed, t in enumerate(tensors)}
    x, grad = random(TOKENS, 8, seed=50), random(TOKENS, 8, seed=51)
    whole_x = x.clone().requires_grad_()
    gate = F.linear(whole_x, wholes["gate"], wholes["gate_bias"])
    up = F.linear(whole_x, wholes["up"], wholes["up_bias"])
    expected = F.linear(gate.sigmoid() * up, wholes["down"], wholes["down_bias"])
    expected.backward(grad)

    axis = tensor_axis(groups, rank, size)
    region = Region(axis, sequence, peers(axis, torch.device("cpu")) if overlap else None)
    factory = maker(axis.index, axis.size)
    column = ColumnLinear(factory, [GATE, UP], [GATE_BIAS, UP_BIAS], region)
    row = RowLinear(factory, DOWN, DOWN_BIAS, region)
    for weight in (column.weight, column.bias, row.weight, row.bias):
        assert weight is not None
        fill(weight, {name: whole.detach() for name, whole in wholes.items()})
    ours = local_shard(x, axis).clone() if sequence else x.clone()
    ours.requires_grad_()
    gate, up = column(ours).chunk(2, dim=-1)
    y = row(gate.sigmoid() * up)
    y.backward(local_shard(grad, axis) if sequence else grad)

    cut = (lambda whole: local_shard(whole, axis)) if sequence else (lambda whole: whole)
    same(y, cut(expected))
    assert whole_x.grad is not None
    same(ours.grad, cut(whole_x.grad))
    grads = {name: whole.grad for name, whole in wholes.items()}
    assert row.bias is not None and row.bias.grad is not None
    if sequence:  # each rank saw its own tokens
        all_reduce(row.bias.grad, axis)
    for weight in (column.weight, column.bias, row.weight, row.bias):
        assert weight is not None
        assert_own_part(weight, weight.grad, grads)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_linears(pool: Pool, size: int, sequence: bool) -> None:
    pool.run(linears, size, sequence and size > 1, False, world=size)


@pytest.mark.parametrize("size", [2, 4])
def test_linears_overlap_exchanges_with_matmuls(pool: Pool, size: int) -> None:
    pool.run(linears, size, True, True, world=size)


def test_gradients_accumulate_in_the_sink() -> None:
    column = ColumnLinear(maker(), [GATE], [], ALONE)
    fill(column.weight, {"gate": random(12, 8, seed=0)})
    arrivals: list[str] = []
    column.weight.main_grad = torch.zeros(12, 8, dtype=torch.float64)
    column.weight.on_grad_ready = lambda weight: arrivals.append(weight.segments[0].shard.name)
    x, grad = random(5, 8, seed=1), random(5, 12, seed=2)
    for _ in range(2):
        column(x).backward(grad)
    same(column.weight.main_grad, 2 * grad.t() @ x)
    assert column.weight.grad is None and arrivals == ["gate", "gate"]


# -- vocabulary


def vocabulary(groups: Groups, rank: int, size: int, sequence: bool) -> None:
    """Ten tokens over `size` ranks, look-up and logits by one tied weight, then the loss."""
    table = Tensor("table", (10, 8), ("embedding", "head"), Init(), (Cut(0, "tp", 10, multiple=4),))
    ids = torch.tensor([0, 9, 5, 5, 3, 7, 2, 9, 1, 8, 4, 6])
    labels = ids.roll(1)
    scale = random(12, seed=3).abs()
    whole = random(10, 8, seed=1).requires_grad_()
    expected = F.cross_entropy(F.linear(F.embedding(ids, whole).tanh(), whole) * 50, labels, reduction="none")
    (expected * scale).sum().backward()

    axis = tensor_axis(groups, rank, size)
    region = Region(axis, sequence)
    embedding = VocabEmbedding(maker(axis.index, axis.size), table, region)
    fill(embedding.weight, {"table": whole.detach()})
    with torch.no_grad():
        embedding.weight.nan_to_num_(1e3)  # padding must not count, any values
    x = embedding(ids).tanh()
    assert x.shape[0] == (12 // size if sequence else 12)
    nll = cross_entropy(x * 50, labels, embedding.weight, region)
    (nll * scale).sum().backward()
    same(nll, expected, rtol=1e-12, atol=1e-12)
    assert_own_part(embedding.weight, embedding.weight.grad, {"table": whole.grad})
    scores = all_gather(logits(x * 50, embedding.weight, region).detach().t(), axis).t()
    same(torch.logsumexp(scores, 1) - scores.gather(1, labels[:, None])[:, 0], expected, rtol=1e-12, atol=1e-12)
    real = embedding.weight.segments[0].shard.size[0]
    assert embedding.weight.grad is not None and not embedding.weight.grad[real:].any(), "padding has a gradient"


@pytest.mark.parametrize(("size", "sequence"), [(1, False), (2, False), (2, True), (4, True), (4, False)])
def test_vocabulary(pool: Pool, size: int, sequence: bool) -> None:
    """Over 4 ranks the padded vocabulary is 16: the third rank holds 2 tokens, the last one none."""
    pool.run(vocabulary, size, sequence, world=size)
