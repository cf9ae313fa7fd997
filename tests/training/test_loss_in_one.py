"""A loss whose gradient is computed along with it: losses and weights are bit for bit those of two passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.model.stack import StackStage
from mega.core.parallel import vocab
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.weight import weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run
from tests.support.triton import needs_kernels

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("gpt", 1, {"dtype": "fp32"}),
    "bf16": ("llama", 1, {"dtype": "bf16"}),
    "a bias, chosen words, another loss, a scale": ("bert", 1, {"dtype": "fp16", "initial_loss_scale": 1024.0}),
    "an encoder": ("t5", 1, {"dtype": "fp32"}),
    "each microbatch's own weight": ("gpt", 1, {"dtype": "fp32", "loss_normalizer": "microbatch"}),
    "stages": ("gpt", 2, {"dtype": "fp32", "pp": 2}),
    "shared gradients": ("bert", 2, {"dtype": "fp32", "zero": 2}),
    "context": ("llama", 2, {"dtype": "fp32", "cp": 2}),
}
AS_BEFORE: dict[str, tuple[int, dict[str, Any]]] = {
    "a cut vocabulary": (2, {"tp": 2}),
    "units that come and go": (2, {"zero": 3}),
}


@contextmanager
def two_passes() -> Iterator[None]:
    """Heads that do not know what their losses will be multiplied by."""
    losses = StackStage._losses

    def unknown(self: StackStage[Any], stream: Any, batch: Any, scales: Any, auxiliary: Any) -> Any:
        return losses(self, stream, batch, None, auxiliary)

    with mock.patch.object(StackStage, "_losses", unknown):
        yield


Made = tuple[list[torch.Tensor], list[torch.Tensor]]


def steps(state: TrainState, count: int) -> Made:
    """Losses, gradient norms and gradients of so many steps; all weights after them."""
    found: list[torch.Tensor] = []
    for step in range(count):
        batches = [synthetic_batch(state.run, rows) for rows in own_samples(state.run, state.mesh, 8 * step)]
        report = train_step(state, batches, 1e-2, 0.1)
        found += [report.loss, report.grad_norm, *report.means.values()]
        found += [bucket.own_grads.clone() for bucket in state.grads.buckets]
    state.grads.wait_param_gather()
    return found, [bucket.own_weights for bucket in state.grads.buckets]


def both(run: RunConfig, mesh: Mesh, used: int, count: int, **ops: Any) -> tuple[Made, Made]:
    """`steps` of losses in one and in two passes. used: how often this rank computes a loss in one."""
    one, other = (build_state(run, mesh, Device.choose("cpu")) for _ in range(2))
    for state in (one, other):
        for stage in state.stages:
            for weight in weights(stage):
                weight.ops = replace(weight.ops, **ops)
    with mock.patch.object(vocab._WithGradient, "apply", wraps=vocab._WithGradient.apply) as applied:
        ours = steps(one, count)
        assert applied.call_count == used
        with two_passes():
            truth = steps(other, count)
        assert applied.call_count == used
    return ours, truth


def on_a_rank(groups: Groups, rank: int, run: RunConfig, world: int, whole: bool) -> None:
    mesh = build_mesh(run, rank, world, groups)
    microbatches = len(list(own_samples(run, mesh, 0)))
    ours, truth = both(run, mesh, 2 * microbatches if whole and mesh.pp.last else 0, 2)
    for a, b in zip(itertools.chain(*ours), itertools.chain(*truth), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_one_pass_is_two(pool: Pool, case: str) -> None:
    model, world, flags = CASES[case]
    pool.run(on_a_rank, small_run(model, world, **flags), world, True, world=world)


@pytest.mark.parametrize("case", AS_BEFORE)
def test_elsewhere_two_passes_remain(pool: Pool, case: str) -> None:
    world, flags = AS_BEFORE[case]
    pool.run(on_a_rank, small_run("gpt", world, dtype="fp32", **flags), world, False, world=world)


@needs_kernels
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_kernels_too(model: str) -> None:
    """They sum up in units of log 2, by a number that may not be the largest: equal up to rounding."""
    from mega.core.ops.kernels import cross_entropy

    run = small_run(model, dtype="fp32", global_batch=2, layers=1)
    ops = {name: getattr(cross_entropy, name) for name in ("softmax_parts", "softmax_gradient", "nll_and_gradient")}
    (ours, _), (truth, _) = both(run, Mesh(0), 2, 1, **ops)
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_a_total_whose_gradient_is_known_has_no_other() -> None:
    """Nothing can multiply it once more, or forget to."""
    run = small_run(dtype="fp32")
    (stage,) = build_state(run, Mesh(0), Device.choose("cpu")).stages
    batch = synthetic_batch(run, next(iter(own_samples(run, Mesh(0), 0))))
    known = stage(batch, scales=torch.ones(1, dtype=torch.float64)).terms["lm"]
    assert not known.total.requires_grad and known.root.requires_grad and not known.root.numel()
    assert stage(batch).terms["lm"].root is None
