"""An activation that the product before computes, and whose slope the next product applies: the same training as with
both computed by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.ops.activation import activate, bias_gradient, defer_slope
from mega.core.ops.autograd import slope_of
from mega.core.ops.matmuls import Matmuls
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof import parity
from mega.core.proof.parity import Snapshot, assemble, compare, train_layout, within
from tests.support.runs import small_run

STEPS = (2,)


@contextmanager
def deferring(calls: list[str]) -> Iterator[None]:
    """Every linear layer applies the slope of the activation before it, and computes the activation after it if it may;
    `calls` gets "slope" and "activation"."""
    applies, dgrad, activated = Matmuls.applies_slope, Matmuls.slope_dgrad, Matmuls.activated

    def counted(self: Matmuls, grad: Any, weight: torch.Tensor, before: torch.Tensor, kind: str) -> torch.Tensor:
        calls.append("slope")
        return dgrad(self, grad, weight, before, kind)

    def computed(self: Matmuls, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: str) -> Any:
        calls.append("activation")
        before = self.forward(x, weight, bias)
        return before, activate(before, None, kind)

    Matmuls.applies_slope = lambda *_: True  # type: ignore[method-assign]
    Matmuls.slope_dgrad, Matmuls.activated = counted, computed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Matmuls.applies_slope, Matmuls.slope_dgrad, Matmuls.activated = applies, dgrad, activated  # type: ignore[method-assign]


def train_deferring(groups: Groups, rank: int, run: RunConfig, world: int, steps: tuple[int, ...]) -> Any:
    calls: list[str] = []
    with deferring(calls):
        return train_layout(groups, rank, run, world, steps), calls


def snapshots(pool: Pool, run: RunConfig, world: int) -> tuple[list[Snapshot], list[str]]:
    """Of a run in which slopes are deferred, and what the products of rank 0 applied."""
    ranks = pool.run(train_deferring, run, world, STEPS, world=world)
    found = [
        Snapshot(at_step[0][0], at_step[0][1], assemble(piece for _, _, pieces in at_step for piece in pieces))
        for at_step in zip(*(rank[0] for rank in ranks), strict=True)
    ]
    return found, ranks[0][1]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"activation": "relu2", "bias": False},
    {"tp": 2, "sequence_parallel": True},
    {"zero": 3},
    {"recompute": "selective"},
    {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1},
    {"model": "t5"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(map(str, layout.values())) or "gpt")
def test_gradients_are_those_of_a_separate_slope(pool: Pool, layout: dict[str, Any]) -> None:
    values = {"model": "gpt", **layout}
    world = 2 if {"tp", "pp", "zero"} & set(layout) else 1
    run = small_run(values.pop("model"), world, global_batch=4, **values)
    found, applied = snapshots(pool, run, world)
    assert "slope" in applied
    # What is recomputed would be rounded otherwise, and a product without a bias has no such kernel.
    alone = layout.get("recompute") == "selective" or not layout.get("bias", True)
    assert ("activation" in applied) is not alone
    for difference in compare("fp64", STEPS, parity.snapshots(pool, run, world, STEPS), found):
        assert within("fp64", difference), difference


@pytest.mark.parametrize(
    "values", [{"lora_rank": 2, "lora_targets": ("up_proj",)}, {"activation": "swiglu"}], ids=["adapter", "gated"]
)
def test_other_layers_apply_their_slopes_themselves(pool: Pool, values: dict[str, Any]) -> None:
    run = small_run(global_batch=4, **values)
    found, applied = snapshots(pool, run, 1)
    assert not applied
    for difference in compare("fp64", STEPS, parity.snapshots(pool, run, 1, STEPS), found):
        assert within("fp64", difference), difference


def test_a_slope_that_nobody_applies_is_an_error() -> None:
    before = torch.randn(3, 4, requires_grad=True)
    active = defer_slope(before, None, torch.relu(before.detach()), "relu", bias_gradient)
    slope = slope_of(active)
    assert slope is not None and slope.before is not None
    with pytest.raises(AssertionError, match="slope"):
        active.sum().backward()
