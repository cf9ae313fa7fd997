"""A mixture of experts is one model in every layout: gradients, losses, norms and loads are one process's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.config.check import check
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import Snapshot, own_samples, snapshots, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_grads, build_mesh, build_stages, build_state
from tests.support.one_process import enough, named, same_run
from tests.support.ranks import CPU
from tests.support.runs import small_options, small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
SP = {"tp": 2, "sequence_parallel": True}
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
EXCHANGE = {"expert_dispatch": "all-to-all"}

MIXTURES: dict[str, dict[str, Any]] = {
    "gpt": {"experts": 4, "balance_loss": (0.5,), "z_loss": 0.01},
    "quantile": {"experts": 4, "router_choice": "quantile", "router_quantile_ema": 0.25, "expert_ffn": 16},
    "llama": {
        "experts": 8,
        "experts_chosen": 3,
        "expert_ffn": 16,
        "shared_ffn": 24,
        "shared_gate": True,
        "router_score": "sigmoid",
        "router_scale": 2.5,
        "router_groups": 4,
        "router_groups_chosen": 3,
        "router_group_best": 2,
        "balance_bias": True,
        "balance_bias_rate": 0.05,
        "balance_loss": (0.1,),
        "experts_from": 1,
    },
}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt", 1, {**FULL, "micro_batch": 4}),
    ("gpt", 2, {"ep": 2}),
    ("gpt", 2, {"ep": 2, **EXCHANGE}),
    ("gpt", 2, {"ep": 2, "zero": 3, **FULL}),
    ("gpt", 2, SP),
    ("gpt", 2, {"tp": 2, "recompute": "selective"}),
    ("gpt", 2, {"tp": 2, "ep": 2, "etp": 1}),
    ("gpt", 2, {**SP, "ep": 2, "etp": 1, **EXCHANGE}),
    ("gpt", 2, {**SP, "etp": 1, "zero": 1}),
    ("gpt", 2, {"cp": 2, "ep": 2, **EXCHANGE}),
    ("gpt", 2, {"pp": 2, "schedule": "zb-h1"}),
    ("gpt", 4, {"ep": 2, "zero": 1, "micro_batch": 2}),
    ("quantile", 4, {**SP, "ep": 2, **FULL}),
    ("llama", 4, {"ep": 4, "zero": 2, **EXCHANGE}),
    ("llama", 4, {**SP, "ep": 2, "zero": 3}),
    ("llama", 4, {**SP, "ep": 2, "zero": 1, **EXCHANGE}),
    ("llama", 4, {**SP, "ep": 2, "etp": 1, "zero": 2, **EXCHANGE}),
    ("llama", 4, {"tp": 2, "etp": 2, "ep": 2, **EXCHANGE}),
    ("llama", 4, {"etp": 2, "ep": 2, "zero": 1, **EXCHANGE}),
    ("llama", 4, {"pp": 2, "chunks": 2, "ep": 2, **FULL}),
    ("llama", 4, {"cp": 2, "ep": 4, **EXCHANGE}),
]


def run(model: str, world: int = 1, **layout: Any) -> RunConfig:
    values = {**MIXTURES[model], "lr": LR["fp64"], "steps": 10, "mock_data": True, **layout}
    model = "gpt" if model == "quantile" else model
    check(small_options(model, **values), world)
    return small_run(model, world, **values)


_references: dict[tuple[Any, ...], list[Snapshot]] = {}


def reference(pool: Pool, model: str, **values: Any) -> list[Snapshot]:
    """One rank, one sample at a time."""
    key = model, *values.items()
    if key not in _references:
        _references[key] = snapshots(pool, run(model, **values), 1, STEPS)
    return _references[key]


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS, ids=named)
def test_every_layout_is_one_process(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    size = enough(world, layout)
    found = snapshots(pool, run(model, world, **layout, **size), world, STEPS)
    same_run(STEPS, reference(pool, model, **size), found)


def trained_with_filler(groups: Groups, rank: int, config: RunConfig, world: int) -> dict[str, float]:
    """One step on rows of which 1 to 5 tokens at the end only fill them: losses and the gradient's norm."""
    mesh = build_mesh(config, rank, world, groups)
    state = build_state(config, mesh, Device(CPU, "gloo"))
    batches = []
    for rows in own_samples(config, mesh, 0):
        batch = synthetic_batch(config, rows)
        filler = torch.arange(batch.tokens.shape[1]) >= batch.tokens.shape[1] - 1 - batch.samples[:, None] % 5
        weights = batch.loss_weights * ~filler
        batches.append(replace(batch, padding=filler, loss_weights=weights))
    outcome = train_step(state, batches, 1e-3, 0.0)
    return {name: float(value) for name, value in outcome.means.items()} | {"norm": float(outcome.grad_norm)}


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, {"ep": 2}), (2, SP), (2, {"cp": 2}), (4, {**SP, "ep": 2, **EXCHANGE}), (4, {"cp": 2, "ep": 4, **EXCHANGE})],
    ids=named,
)
def test_filler_counts_in_no_layout(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    expected = pool.run(trained_with_filler, run("llama", z_loss=0.01), 1, world=1)[0]
    for figures in pool.run(trained_with_filler, run("llama", world, z_loss=0.01, **layout), world, world=world):
        assert figures == pytest.approx(expected, rel=1e-10)


MUON: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2, **EXCHANGE}),
    (4, {"etp": 2, "ep": 2, "zero": 1, **EXCHANGE}),
    (4, {**SP, "ep": 2, "etp": 1, "zero": 2, **EXCHANGE}),
]


def test_whole_matrices_of_experts(pool: Pool) -> None:
    """Muon puts each expert's matrices together among the ranks that have parts of these alone."""
    for world, layout in MUON:
        values = {"optimizer": "muon", **enough(world, layout)}
        found = snapshots(pool, run("llama", world, **layout, **values), world, STEPS)
        same_run(STEPS, reference(pool, "llama", **values), found)


class Arrives:
    """Weights on their way."""

    waited = False

    def wait(self) -> None:
        self.waited = True


def test_a_unit_waits_for_experts_that_tensor_ranks_alone_share_out() -> None:
    config = run("gpt", 2, **SP, etp=1, zero=1)
    mesh = Mesh.at(0, tp=2, etp=1)
    stages = build_stages(config, mesh, torch.device("meta"))
    grads = build_grads(config, mesh, stages)
    block = stages[0].layers[0]
    shared = [bucket for bucket in grads.buckets_of(block) if bucket.data.axis.size == 2]
    arriving = [Arrives() for _ in shared]
    for bucket, arrives in zip(shared, arriving, strict=True):
        bucket.gathering = arrives
    for hook in block._forward_pre_hooks.values():
        hook(block, ())
    assert arriving and all(arrives.waited for arrives in arriving)
