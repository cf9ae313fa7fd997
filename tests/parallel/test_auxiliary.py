"""Losses of layers: gradients and figures of every layout are one process's, and that one's are plain autograd's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.architecture import architecture
from mega.core.architecture.layer import AuxiliaryLoss
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import (
    Snapshot,
    assemble,
    own_samples,
    snapshots,
    synthetic_batch,
    train_layout,
)
from mega.core.training.step import backward, evaluate_step, means, train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support import toy_losses
from tests.support.one_process import enough_samples, named, same_run
from tests.support.runs import small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
SP = {"tp": 2, "sequence_parallel": True}
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
BLOCK = {"recompute": "full", "recompute_method": "block", "recompute_layers": 1}
SELECTIVE = {"recompute": "selective"}
ZB = {"pp": 2, "schedule": "zb-h1"}

Layout = tuple[int, dict[str, Any]]
LAYOUTS: list[Layout] = [
    # (world, layout)
    (1, FULL),
    (1, BLOCK),
    (1, SELECTIVE),
    (1, {"micro_batch": 4}),
    (2, {"tp": 2}),
    (2, SP),
    (2, {**SP, **SELECTIVE}),
    (2, {"tp": 2, **FULL, "distribute_saved": True}),
    (2, {"cp": 2}),
    (2, {"pp": 2, "micro_batch": 2}),
    (2, {"pp": 2, "chunks": 2, **FULL}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (2, {**ZB, **FULL}),
    (2, {"zero": 1, "micro_batch": 2}),
    (2, {"zero": 2}),
    (2, {"zero": 3}),
    (2, {"zero": 3, **FULL}),
    (4, {**SP, **ZB, **SELECTIVE}),
    (4, {**SP, "zero": 3, **BLOCK}),
    (4, {"cp": 2, "tp": 2, "micro_batch": 2}),
]
BY_MICROBATCH: list[Layout] = [(2, SP), (4, {"cp": 2, "pp": 2}), (2, {"zero": 3, **FULL})]


def known(groups: Groups, rank: int, yes: bool) -> None:
    """Job of one rank: the families are registered in its process, or are no longer."""
    (toy_losses.register if yes else toy_losses.unregister)()


@pytest.fixture(scope="module", autouse=True)
def registered(pool: Pool) -> Iterator[None]:
    toy_losses.register()
    pool.run(known, True)
    yield
    toy_losses.unregister()
    pool.run(known, False)


def run(world: int = 1, family: str = toy_losses.NAME, **layout: Any) -> RunConfig:
    return small_run("gpt", world, family=family, lr=LR["fp64"], **layout)


_references: dict[tuple[Any, ...], list[Snapshot]] = {}


def reference(pool: Pool, **values: Any) -> list[Snapshot]:
    """One rank, one sample at a time."""
    key = tuple(values.items())
    if key not in _references:
        _references[key] = snapshots(pool, run(**values), 1, STEPS)
    return _references[key]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=named)
def test_training_is_one_processs(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    size = {"global_batch": enough_samples(world, layout)}
    same_run(STEPS, reference(pool, **size), snapshots(pool, run(world, **layout, **size), world, STEPS))


@pytest.mark.parametrize("normalizer", ["global", "microbatch"])
def test_means_over_microbatches(pool: Pool, normalizer: str) -> None:
    values = {"family": toy_losses.BY_MICROBATCH, "loss_normalizer": normalizer}
    for world, layout in BY_MICROBATCH:
        own = {**values, "global_batch": enough_samples(world, layout)}
        same_run(STEPS, reference(pool, **own), snapshots(pool, run(world, **own, **layout), world, STEPS))


def trained(
    groups: Groups, rank: int, run: RunConfig, world: int
) -> tuple[dict[str, float], list[float], torch.Tensor, list[float]]:
    """Job of one rank: what one step reports, a validation after it, and the divisors that were known before."""
    mesh, device = build_mesh(run, rank, world, groups), Device.choose("cpu", rank)
    state = build_state(run, mesh, device)
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 0)]
    report = train_step(state, batches, LR["fp64"], 0.0)
    figures = {name: float(value) for name, value in {"loss": report.loss, **report.means}.items()}
    sums = evaluate_step(state, batches)
    found = dict(zip(state.pipeline.names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
    parts = [state.stages[0].weights(batch.split(mesh.cp.index, mesh.cp.size)) for batch in batches]
    known = torch.tensor([sum(float(part[name].sum()) for part in parts) for name in found], dtype=torch.float64)
    all_reduce(known, mesh.tokens)
    return figures, list(found.values()), sums[:, 1], known.tolist()


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, FULL), (2, SP), (2, {"tp": 2, **FULL}), (2, {"cp": 2}), (2, {**ZB, "micro_batch": 2}), (2, {"zero": 3})],
    ids=named,
)
def test_figures_are_one_processs(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    (one,) = pool.run(trained, run(), 1, world=1)
    assert list(one[0]) == ["loss", "lm", "activation", "z_loss", "balance"]
    # two layers have them: a mean is over both, the loss counts each
    terms = {"lm": 1.0, "activation": 2 * 0.3, "z_loss": 2 * 0.2, "balance": 2 * 0.7}
    assert one[0]["loss"] == pytest.approx(sum(terms[name] * one[0][name] for name in terms), rel=1e-12)
    for figures, valid, weights, known in pool.run(trained, run(world, **layout), world, world=world):
        assert figures == pytest.approx(one[0], rel=1e-12)
        assert valid == pytest.approx(one[1], rel=1e-12)
        torch.testing.assert_close(weights, one[2], rtol=1e-12, atol=0)
        assert weights.tolist() == pytest.approx(known, rel=1e-12)


def test_the_gradient_is_that_of_the_loss() -> None:
    """A step along a direction changes the loss that is reported by the gradient's share in it."""
    config = run(hidden_dropout=0.0, attention_dropout=0.0)
    state = build_state(config, build_mesh(config, 0, 1), Device.choose("cpu"))
    batches = [synthetic_batch(config, rows) for rows in own_samples(config, state.mesh, 0)]
    draw = torch.Generator().manual_seed(3)
    directions = [torch.randn(b.weights.shape, generator=draw, dtype=torch.float64) for b in state.grads.buckets]
    size = 1e-6

    def loss(along: float) -> float:
        for bucket, direction in zip(state.grads.buckets, directions, strict=True):
            bucket.weights.add_(direction, alpha=along)
        return float(means(state, backward(state, batches))[0])

    middle = loss(0.0)
    slope = sum(float((b.own_grads * d).sum()) for b, d in zip(state.grads.buckets, directions, strict=True))
    assert (loss(size) - loss(-2 * size)) / (2 * size) == pytest.approx(slope, rel=1e-6) and middle > 0


def test_each_figure_is_its_formula() -> None:
    """From what the layers were given, with plain operations."""
    config = run(hidden_dropout=0.0, attention_dropout=0.0)
    state = build_state(config, build_mesh(config, 0, 1), Device.choose("cpu"))
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for layer in state.stages[0].layers[1::2]:
        mixer = layer.branches[1].mixer
        mixer.register_forward_hook(
            lambda module, given, active: seen.append((given[0].detach(), active.detach(), module.router.detach()))
        )
    batches = [synthetic_batch(config, rows) for rows in own_samples(config, state.mesh, 0)]
    _, found = means(state, backward(state, batches))
    logits = [x @ router.T for x, _, router in seen]
    expected = {
        "activation": torch.stack([active.square().mean() for _, active, _ in seen]).mean(),
        "z_loss": torch.stack([one.logsumexp(1).square().mean() for one in logits]).mean(),
        "balance": torch.stack([one.softmax(1)[:, 0].sum() for one in logits]).mean(),
    }
    assert len(seen) == 2 * len(batches)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


def test_a_loss_scale_scales_them(pool: Pool) -> None:
    """A power of two changes no bit."""
    plain = reference(pool)[0]
    ((loss, norm, pieces), _) = pool.run(train_layout, run(loss_scale=1024.0), 1, STEPS, world=1)[0]
    assert loss == plain.loss and norm == 1024 * plain.grad_norm
    found = assemble(iter(pieces))
    assert all(torch.equal(found[name], 1024 * gradient) for name, gradient in plain.gradients.items())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_dtypes(pool: Pool, dtype: str) -> None:
    """Totals are summed in fp32, of activations that are not."""
    one = snapshots(pool, run(dtype="fp32"), 1, (1,))[0]
    scale = 16.0 if dtype == "fp16" else 1.0
    found = snapshots(pool, run(dtype=dtype, loss_scale=scale), 1, (1,))[0]
    assert found.loss == pytest.approx(one.loss, rel=1e-2)
    assert found.grad_norm / scale == pytest.approx(one.grad_norm, rel=5e-2)
    router = "grads/model.layers.1.mlp.router.weight"
    mine, theirs = one.gradients[router], found.gradients[router].float() / scale
    assert float((theirs - mine).abs().max()) < 5e-2 * float(mine.abs().max())


def test_a_name_stands_for_one_loss() -> None:
    other = AuxiliaryLoss(name="z_loss", coefficient=0.1, mean_over="tokens")
    model = architecture(run().model)
    (stack,) = model.stacks
    layer = toy_losses.with_losses(stack.layers[0], (other,))
    doubled = replace(model, stacks=(replace(stack, layers=(layer, *stack.layers[1:])),))
    with pytest.raises(ValueError, match="layers have different losses of the name z_loss"):
        _ = doubled.auxiliary_losses
