"""Recompute held against torch.utils.checkpoint: the same gradients bit for bit, and nothing kept but the inputs."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mega.core.ops.recompute import recompute

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Cube(torch.autograd.Function):
    """x^3 y and x^2, of which it keeps an input, an output and neither."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        square = Twice.apply(x) * x / 2
        ctx.save_for_backward(x, square, square * x, y)
        return square * x * y, square

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, square, cube, y = ctx.saved_tensors
        return 3 * square * y * grad + 2 * x * grad_square, cube * grad


class Twice(torch.autograd.Function):
    """2 x, by a graph of its own in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (own,) = torch.autograd.grad((again + again).sum(), again)
        return own * grad


OPS: tuple[Run, ...] = (
    lambda x, y: x * y,
    lambda x, y: x + y.sin(),
    lambda x, y: torch.exp(-x * x) * y,
    lambda x, y: x @ y.t() @ y / 10,
    lambda x, y: x.softmax(-1),
    lambda x, y: torch.nn.functional.layer_norm(x, x.shape[-1:], y[0]),
    lambda x, y: Cube.apply(x, y)[0],
    lambda x, y: Cube.apply(x, y)[1],
    lambda x, y: Twice.apply(y).relu(),
    lambda x, y: recompute(lambda x, y: x.tanh() * y, x, y),
)


def program(seed: int, ops: tuple[Run, ...] = OPS) -> Run:
    """Ten ops on results of each other; some reach the last, others are in nobody's gradient."""
    chosen = random.Random(seed)
    steps = [(chosen.choice(ops), chosen.random(), chosen.random()) for _ in range(10)]

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = [x, y]
        for op, first, second in steps:
            values.append(op(values[int(first * len(values))], values[int(second * len(values))]))
        return values[-1] * values[-2]

    return run


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)


@pytest.mark.parametrize("seed", range(40))
def test_gradients_are_those_of_torch_and_of_no_recompute(seed: int) -> None:
    found = []
    for way in (lambda run, *x: run(*x), recompute, lambda run, *x: checkpoint(run, *x, use_reentrant=False)):
        x, y = inputs()
        out = way(program(seed), x, y)
        out.square().sum().backward()
        found.append([out, x.grad, y.grad])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert (one is None and two is None) or torch.equal(one, two)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_one_input_alone(seed: int) -> None:
    """Ops that are left out of a backward pass ask for nothing."""
    (x, y), (u, v) = inputs(), inputs()
    (plain,) = torch.autograd.grad(program(seed)(x, y).sum(), x, allow_unused=True)
    (again,) = torch.autograd.grad(recompute(program(seed), u, v).sum(), u, allow_unused=True)
    assert (plain is None and again is None) or torch.equal(plain, again)  # type: ignore[arg-type]


class Live(TorchDispatchMode):
    """Storages that ops made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes and all(
                storage._cdata != one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)
            ):
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        return out


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_kept_but_the_inputs(seed: int) -> None:
    """After the forward pass there is the result alone, and after the backward pass the gradients."""
    plain, run = 0, program(seed, OPS[:-1])  # a recompute inside keeps its own inputs
    for way in (lambda run, *x: run(*x), recompute):
        x, y = inputs()
        with Live() as live:
            out = way(run, x, y)
            kept = sum(live.sizes.values()) - out.nbytes
            out.backward(torch.ones_like(out))
            del out
            grads = [one.grad for one in (x, y) if one.grad is not None]
            assert sum(live.sizes.values()) == sum(grad.untyped_storage().nbytes() for grad in grads)
        if way is recompute:
            assert kept == 0 < plain
        plain = kept


def test_only_what_is_needed_is_computed_again() -> None:
    calls: list[str] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append("begin")
        square = x * x
        calls.append("kept all")
        return square + 1

    x = torch.ones(3, requires_grad=True)
    recompute(run, x).sum().backward()
    assert calls == ["begin", "kept all", "begin"]
    with torch.no_grad():
        assert not recompute(run, x).requires_grad


def test_a_second_backward_pass_and_another_function_are_told() -> None:
    x = torch.ones(3, requires_grad=True)
    out = recompute(lambda x: x.sin() * x, x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="ran twice"):
        out.backward()
    shorter = iter([lambda x: x.sin().sin(), lambda x: x + 1])
    with pytest.raises(AssertionError, match="something else each time"):
        recompute(lambda x: next(shorter)(x), x).sum().backward()
