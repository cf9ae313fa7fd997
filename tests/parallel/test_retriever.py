"""A model that reads neighbours is one model in every layout: gradients, losses and norms are one process's."""

from __future__ import annotations

from typing import Any

import pytest

from mega.core.architecture import inventory
from mega.core.config.check import check
from mega.core.config.run import RunConfig
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import Snapshot, snapshots
from tests.support.one_process import enough_samples, named, same_run
from tests.support.runs import small_options, small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
SP = {"tp": 2, "sequence_parallel": True}
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
RETRIEVER = {"retriever": True, "retro_layers": (1, 2), "retro_chunk_length": 4}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt", 1, {**FULL, "micro_batch": 4}),
    ("gpt", 2, {"zero": 3, **FULL}),
    ("gpt", 4, {**SP, "pp": 2, "zero": 1}),
    ("llama", 2, {"tp": 2, "recompute": "selective"}),
    ("llama", 4, {"pp": 4, "schedule": "zb-h1", "micro_batch": 2}),
    ("llama", 4, {**SP, "zero": 3}),
]


def run(model: str, world: int = 1, **layout: Any) -> RunConfig:
    values = {**RETRIEVER, "lr": LR["fp64"], "steps": 10, "mock_data": True, **layout}
    check(small_options(model, **values), world)
    return small_run(model, world, **values)


_references: dict[tuple[str, int], list[Snapshot]] = {}


def reference(pool: Pool, model: str, samples: int) -> list[Snapshot]:
    """One rank, one sample at a time."""
    if (model, samples) not in _references:
        _references[model, samples] = snapshots(pool, run(model, global_batch=samples), 1, STEPS)
    return _references[model, samples]


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS, ids=named)
def test_every_layout_is_one_process(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    samples = enough_samples(world, layout)
    found = snapshots(pool, run(model, world, **layout, global_batch=samples), world, STEPS)
    same_run(STEPS, reference(pool, model, samples), found)


def test_every_tensor_is_trained(pool: Pool) -> None:
    first = reference(pool, "gpt", 8)[0]
    assert set(first.gradients) == {f"grads/{tensor.name}" for tensor in inventory(run("gpt").model)}
    still = [name for name, one in first.gradients.items() if float(one.abs().max()) < 1e-9 * first.grad_norm]
    assert not [name for name in still if "k_proj.bias" not in name]
