"""Casts that are fused with the op before them, against that op and a cast of its own: the same bits.

On a CUDA device as they are; without one where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.architecture import Cut, Init, Tensor
from mega.core.architecture.adapters import AdapterSpec
from mega.core.architecture.layer import Rope
from mega.core.ops import fp8, fp8_blocks
from mega.core.ops.autograd import with_recipe
from mega.core.ops.fused_casts import accepting, largest_of, prepared, stand_in, with_largest
from mega.core.ops.rotary import rotary_table
from mega.core.ops.suite import Ops, choose
from mega.core.parallel.adapter import attach_adapters
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory
from tests.gpu.test_kernels import DTYPE, flat, kernels, random, some_dropout
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
SCALINGS = "tensor", "block"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ops_of(scaling: str) -> Ops:
    """The kernels, with plain GEMMs, which the interpreter can run."""
    ops = choose(torch.device("cuda"), DTYPE, fp8=scaling, shapes=True)  # type: ignore[arg-type]
    plain = fp8.multiply if scaling == "tensor" else fp8_blocks.multiply
    return replace(ops, matmuls=replace(ops.matmuls, multiply=plain, accumulate=None))  # type: ignore[type-var]


def assert_same(ours: Any, other: Any) -> None:
    for one, two in zip(flat(ours), flat(other), strict=True):
        assert one.stride() == two.stride() and torch.equal(one.float(), two.float())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh"])
@pytest.mark.parametrize("tokens, width", [(130, 128), (1, 256), (257, 40)])
def test_gradient_of_a_gate(scaling: str, kind: str, tokens: int, width: int) -> None:
    """A linear layer that accepts it gets what it would have cast. In blocks it is cast after, as it was."""
    ops, x, grad = ops_of(scaling), random(tokens, 2 * width), random(tokens, width)
    found = []
    for casts in (ops.matmuls.fused, None):
        leaf = x.clone().requires_grad_()
        y = kernels()["activate"](accepting(leaf, casts), None, kind)
        assert y.grad_fn is not None
        (of_x,) = torch.autograd.grad(y, leaf, grad)
        fused = casts is not None and scaling == "tensor"
        assert of_x.shape == x.shape and (prepared(of_x) is not None) is fused
        assert of_x.isnan().all() if fused else not of_x.isnan().any()
        found.append(ops.matmuls.prepare(of_x))
    assert_same(*found)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 4, 128), (3, 1, 128), (8, 4, 32)])
def test_gradient_of_heads(scaling: str, heads: int, kv_heads: int, width: int) -> None:
    tokens, ops = 130, ops_of(scaling)
    rotary = rotary_table(torch.arange(tokens, device=DEVICE), Rope(base=10000.0, width=width), DTYPE)
    parts = [heads, kv_heads, kv_heads]
    fused, wide = random(tokens, sum(parts) * width), random(tokens, sum(parts) + 1, width)
    grads = wide[:, 1:].split(parts, 1)
    found = []
    for casts in (ops.matmuls.fused, None):
        leaf = fused.clone().requires_grad_()
        x = accepting(leaf * 1, casts)  # rotated in place
        outs = kernels()["split_heads"](x, None, heads, kv_heads, rotary)
        (of_x,) = torch.autograd.grad(outs, x, grads)
        assert (prepared(of_x) is not None) is (casts is not None and (scaling == "tensor" or width == 128))
        found.append(ops.matmuls.prepare(of_x))
    assert_same(*found)


def test_other_heads_are_not_cast() -> None:
    """With a bias, whose gradient is their sum; and with positions that do not turn whole heads."""
    tokens, columns = 5, 3 * 64
    for bias, turned in ((random(columns).requires_grad_(), 64), (None, 32), (None, 0)):
        rope = Rope(base=10000.0, width=turned)
        rotary = rotary_table(torch.arange(tokens, device=DEVICE), rope, DTYPE) if turned else None
        x = accepting(random(tokens, columns).requires_grad_() * 1, ops_of("tensor").matmuls.fused)
        outs = kernels()["split_heads"](x, bias, 1, 1, rotary)
        (of_x,) = torch.autograd.grad(outs, x, [torch.ones_like(out) for out in outs])
        assert prepared(of_x) is None and not of_x.isnan().any()


@pytest.mark.parametrize("dropped, width", [(False, 96), (True, 96), (False, 1024)])
def test_norms_measure(dropped: bool, width: int) -> None:
    """The norm, and the gradient of the branch that is added before it; also without a gradient."""
    tokens, add_norm = 9, ops_of("tensor").add_norm
    drop = some_dropout(tokens) if dropped else None
    x, branch, weight = random(tokens, width), random(tokens, width).requires_grad_(), random(width)
    total, normed = add_norm(x, branch, None, drop, weight, None, 1e-5)
    (of_branch,) = torch.autograd.grad((total, normed), branch, (random(tokens, width), random(tokens, width)))
    with torch.no_grad():
        alone = add_norm(x, None, None, None, weight, None, 1e-5)[1]
    for measured in (normed, of_branch, alone):
        largest = largest_of(measured)
        assert largest is not None and torch.equal(largest.max(), measured.abs().max().float())
    assert largest_of(kernels()["add_norm"](x, branch, None, drop, weight, None, 1e-5)[1]) is None


def test_a_gated_activation_measures() -> None:
    active = ops_of("tensor").activate(random(5, 2 * 1500).requires_grad_(), None, "swiglu")
    largest = largest_of(active)
    assert largest is not None and torch.equal(largest.max(), active.abs().max().float())
    cast, plain = (ops_of("tensor").matmuls.operands(x) for x in (active, active.clone()))
    assert_same(cast, plain)


def test_a_magnitude_is_forgotten_with_its_tensor() -> None:
    """autograd may add gradients in place, which the largest magnitude of one of them does not survive."""
    x = with_largest(random(3, 16), torch.tensor([3.0, 7.0], device=DEVICE))
    assert largest_of(x) is not None and largest_of(x.clone()) is None
    x += 1
    assert largest_of(x) is None
    with torch.inference_mode():
        assert largest_of(with_largest(random(3, 16), torch.ones(1, device=DEVICE))) is None


def test_a_stand_in_takes_no_memory_and_is_not_a_number() -> None:
    x = stand_in((1000, 1000), random(1), "its form")
    assert x.untyped_storage().nbytes() == DTYPE.itemsize and prepared(x) == "its form" and prepared(x * 1) is None
    assert x.isnan().all() and prepared(with_recipe(random(2), lambda: x)) is None


@pytest.mark.skipif(not CUDA, reason="the interpreter knows no NaN of fp8")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite(scaling: str) -> None:
    ops, x, grad = ops_of(scaling), random(128, 256), random(128, 128)
    for wrong in (float("nan"), float("inf")):
        grad[3, 5] = wrong
        leaf = x.clone().requires_grad_()
        y = kernels()["activate"](accepting(leaf, ops.matmuls.fused), None, "swiglu")
        (of_x,) = torch.autograd.grad(y, leaf, grad)
        assert all(each.float()[3, 5].isnan() for each in flat(ops.matmuls.prepare(of_x)) if each.shape == x.shape)


HIDDEN, HEADS, FFN, ROWS = 128, 2, 144, 130


def tensor(name: str, out: int, into: int, *, trainable: bool = True) -> Tensor:
    return Tensor(name, (out, into), (0,), Init(), (Cut(0, "tp", out),), trainable=trainable)


def gradients(ops: Ops, adapters: bool, width: int = 128) -> tuple[list[torch.Tensor], list[bool]]:
    """A branch with heads and one with a gate: the gradients of the input and of all weights, and which linear layers
    got the gradients of their outputs in fp8."""
    torch.manual_seed(0)
    factory = ParameterFactory({}, DTYPE, torch.device(DEVICE), ops)
    trained = not adapters
    qkv = ColumnLinear(factory, [tensor("q.weight", 3 * HEADS * width, HIDDEN, trainable=trained)], [], ALONE)
    up = ColumnLinear(factory, [tensor("up.weight", 2 * FFN, HIDDEN, trainable=trained)], [], ALONE)
    out, down = (
        RowLinear(factory, tensor(name, HIDDEN, wide, trainable=trained), None, ALONE)
        for name, wide in (("o.weight", HEADS * width), ("down.weight", FFN))
    )
    if adapters:
        specs: dict[str, AdapterSpec] = {}
        for name, outs in (("q", 3 * HEADS * width), ("up", 2 * FFN)):
            down_, up_ = (
                Tensor(f"{name}.{part}", shape, (0,), Init()) for part, shape in (("A", (4, HIDDEN)), ("B", (outs, 4)))
            )
            specs[f"{name}.weight"] = AdapterSpec(down_, up_, 1.0, 0.0)
        attach_adapters(torch.nn.ModuleList([qkv, up, out, down]), specs, factory)
    layers = torch.nn.ModuleList([qkv, out, up, down])
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    rotary = rotary_table(torch.arange(ROWS, device=DEVICE), Rope(base=10000.0, width=width), DTYPE)
    x, weight = random(ROWS, HIDDEN).requires_grad_(), random(HIDDEN)
    seen: list[bool] = []

    def watch(y: torch.Tensor) -> torch.Tensor:
        y.register_hook(lambda grad: seen.append(prepared(grad) is not None))
        return y

    stream, normed = ops.add_norm(x, None, None, None, weight, None, 1e-5)
    q, k, v = ops.split_heads(watch(qkv.biased(normed)), None, HEADS, HEADS, rotary)
    stream, normed = ops.add_norm(stream, out.matmul((q * k + v).flatten(1)), None, None, weight, None, 1e-5)
    branch = down.matmul(ops.activate(watch(up.matmul(normed)), None, "swiglu"))
    _, normed = ops.add_norm(stream, branch, None, None, weight, None, 1e-5)
    normed.backward(random(ROWS, HIDDEN))
    grads = [each.grad for each in (x, *layers.parameters()) if each.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    return [grad for grad in grads if grad is not None], seen[::-1]


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_layers_change_no_bit(scaling: str, adapters: bool) -> None:
    """With fused casts and measured magnitudes, and without any; adapters need the gradient itself."""
    ops, table = ops_of(scaling), kernels()
    apart = replace(
        ops,
        add_norm=table["add_norm"],
        activate=table["activate"],
        matmuls=replace(ops.matmuls, fused=None),  # type: ignore[type-var]
    )
    (fused, seen), (plain, none) = (gradients(each, adapters) for each in (ops, apart))
    assert none == [False, False] and seen == [not adapters, not adapters and scaling == "tensor"]
    assert len(fused) == len(plain) and all(map(torch.equal, fused, plain))
