"""Two halves take turns: each one's exchange is under way while the other computes, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.parallel import collectives
from mega.core.parallel.collectives import Leaving
from mega.core.parallel.mesh import Axis
from mega.core.parallel.turns import Turns, alternately


class _Told(torch.autograd.Function):
    """Some computing of a half, which says when it happens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, told: list[str], name: str) -> torch.Tensor:
        ctx.told, ctx.name = told, name
        told.append(f"compute {name}")
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.told.append(f"compute {ctx.name}")
        return grad, None, None


def test_exchanges_run_beside_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Work:
        def __init__(self, name: str):
            self.name = name
            told.append(f"start {name}")

        def wait(self) -> None:
            told.append(f"wait {self.name}")

    def scatter(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
        return x[:1].clone(), Work("a" if float(x[0]) == 1 else "b")

    def gather(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
        return torch.cat([x, x]), Work("a" if float(x[0]) == 10 else "b")

    monkeypatch.setattr(collectives, "start_reduce_scatter", scatter)
    monkeypatch.setattr(collectives, "start_all_gather", gather)
    axis = Axis("tp", (0, 1), 0)
    leaves = {name: torch.full((2,), value, requires_grad=True) for name, value in (("a", 1.0), ("b", 2.0))}

    def half(name: str) -> Turns[torch.Tensor]:
        leaving = Leaving(_Told.apply(leaves[name], told, name), axis, True)  # type: ignore[no-untyped-call]
        yield
        return _Told.apply(leaving.arrived(), told, f"{name}2")  # type: ignore[no-any-return, no-untyped-call]

    first, second = alternately(half(name) for name in "ab")
    assert told == [
        *("compute a", "start a", "compute b", "start b"),
        *("wait a", "compute a2", "wait b", "compute b2"),
    ]
    told.clear()
    (10 * first + 20 * second).sum().backward()
    assert told == [
        *("compute b2", "start b", "compute a2", "start a"),
        *("wait b", "compute b", "wait a", "compute a"),
    ]
    assert [leaf.grad.tolist() for leaf in leaves.values() if leaf.grad is not None] == [[10, 10], [20, 20]]
