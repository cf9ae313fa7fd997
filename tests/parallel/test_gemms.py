"""The GEMMs of a linear layer may be wrapped: an adapter around an adapter, against the dense layer in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mega.core.architecture import Cut, Init, Tensor
from mega.core.architecture.adapters import AdapterSpec
from mega.core.ops.matmuls import Factor
from mega.core.parallel.adapter import AdaptedGemms, Adapter, attach_adapters
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.region import ALONE, Region
from mega.core.processes.pool import Pool
from tests.support.ranks import assert_own_part, fill, maker, random

same = torch.testing.assert_close
RANK, SCALE = 3, 2.0
Q = Tensor("q.weight", (12, 8), (0,), Init(), (Cut(0, "tp", 12),), trainable=False)
K = Tensor("k.weight", (4, 8), (0,), Init(), (Cut(0, "tp", 4),), trainable=False)
OUT = Tensor("out.weight", (8, 12), (0,), Init(), (Cut(1, "tp", 12),), trainable=False)


def spec(base: Tensor, number: int = 0) -> AdapterSpec:
    outs, ins = base.shape
    cut = base.cut()
    assert cut is not None
    down = Tensor(f"{base.name}.A{number}", (RANK, ins), (0,), Init(), base.cuts if cut.dim == 1 else ())
    up = Tensor(f"{base.name}.B{number}", (outs, RANK), (0,), Init(), base.cuts if cut.dim == 0 else ())
    return AdapterSpec(down, up, SCALE, 0.0)


def test_a_wrapped_linear_may_be_wrapped_again() -> None:
    linear = ColumnLinear(maker(), [Q], [], ALONE)
    for number in range(2):
        linear.gemms = AdaptedGemms(linear.gemms, Adapter(maker(), [(slice(0, 12), spec(Q, number))]))
    wholes = {
        weight.segments[0].shard.name: random(*weight.shape, seed=i) for i, weight in enumerate(linear.gemms.weights)
    }
    for weight in linear.gemms.weights:
        fill(weight, wholes)
    leaves = {name: whole.clone().requires_grad_() for name, whole in wholes.items()}
    dense = leaves["q.weight"]
    for number in range(2):
        dense = dense + SCALE * leaves[f"q.weight.B{number}"] @ leaves[f"q.weight.A{number}"]
    x, grad = random(5, 8, seed=50), random(5, 12, seed=51)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    expected, y = F.linear(theirs, dense), linear(ours)
    expected.backward(grad)
    y.backward(grad)
    same((y, ours.grad), (expected, theirs.grad))
    assert linear.weight.grad is None and not linear.gemms.plain
    for weight in linear.gemms.weights[1:]:
        same(weight.grad, leaves[weight.segments[0].shard.name].grad)
    same(linear.gemms.by(Factor(linear.weight.detach()))(x), expected.detach())


def adapted(groups: Groups, rank: int, size: int, sequence: bool) -> None:
    """Two stacked columns, of which one has an adapter, then a row that has one."""
    axis = Mesh(rank, tp=size, groups=groups).tp
    region, factory = Region(axis, sequence), maker(axis.index, axis.size)
    layers = torch.nn.ModuleList([ColumnLinear(factory, [Q, K], [], region), RowLinear(factory, OUT, None, region)])
    specs = {tensor.name: spec(tensor) for tensor in (K, OUT)}
    attach_adapters(layers, specs, factory)
    tensors = [Q, K, OUT, *(one for each in specs.values() for one in (each.down, each.up))]
    wholes = {tensor.name: random(*tensor.shape, seed=number) for number, tensor in enumerate(tensors)}
    weights = [weight for layer in layers for weight in layer.gemms.weights]
    for weight in weights:
        fill(weight, wholes)
    leaves = {name: whole.clone().requires_grad_() for name, whole in wholes.items()}
    k, out = (leaves[t.name] + SCALE * leaves[f"{t.name}.B0"] @ leaves[f"{t.name}.A0"] for t in (K, OUT))
    x, grad = random(12, 8, seed=50), random(12, 8, seed=51)
    q, gate = F.linear(x, leaves["q.weight"]), F.linear(x, k).repeat_interleave(3, 1)
    expected = F.linear(q * gate, out)
    expected.backward(grad)
    ours = torch.tensor_split(x, size)[rank] if sequence else x
    q, gate = layers[0](ours).split([12 // size, 4 // size], 1)
    y = layers[1](q * gate.repeat_interleave(3, 1))
    cut = torch.tensor_split(grad, size)[rank] if sequence else grad
    y.backward(cut)
    same(y, torch.tensor_split(expected, size)[rank] if sequence else expected)
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    for weight in weights:
        if weight.requires_grad:
            assert weight.grad is not None
            if weight.segments[0].shard.tensor.cut() is None:  # a part on every rank
                all_reduce(weight.grad, axis)
            assert_own_part(weight, weight.grad, grads)


@pytest.mark.parametrize(("size", "sequence"), [(1, False), (2, False), (2, True)])
def test_the_exchanges_of_a_wrapped_linear(pool: Pool, size: int, sequence: bool) -> None:
    pool.run(adapted, size, sequence, world=size)
