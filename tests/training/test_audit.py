"""The replica audit finds every copy that has drifted by one bit, and names its tensor and rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.audit import audit, copies
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state

MODEL: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "vocab": 61,
    "vocab_multiple": 1,
    "seq_length": 8,
    "micro_batch": 1,
    "global_batch": 4,
    "lr": 1e-3,
    "device": "cpu",
}


def drift(groups: Groups, rank: int, run: RunConfig, world: int, seeds: list[int]) -> list[tuple[str, int, str]]:
    """Job: per seed one element of one copy on one rank moves by one ulp; (tensor, rank, what the audit said)."""
    mesh = build_mesh(run, rank, world, groups)
    state, found = build_state(run, mesh, Device.choose("cpu")), []
    train_step(state, [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 0)], 1e-3, 0.01)
    audit(state)  # nothing has drifted
    for seed in seeds:
        dice = random.Random(seed)
        victim = dice.randrange(world)
        held = list(copies(state))
        copy = held[dice.randrange(len(held))] if rank == victim else None
        where = dice.randrange(copy.tensor.numel()) if copy is not None else 0
        if copy is not None:
            kept = copy.tensor[where].clone()
            copy.tensor[where] = torch.nextafter(kept, torch.tensor(9.0, dtype=kept.dtype))
        said = ""
        try:
            audit(state)
        except RuntimeError as error:
            said = str(error)
        if copy is not None:
            copy.tensor[where] = kept
        found.append((copy.name if copy is not None else "", victim, said))
    audit(state)
    return found


@pytest.mark.parametrize(
    ("world", "layout"),
    [(4, {}), (4, {"tp": 2, "sequence_parallel": True}), (4, {"tp": 2, "zero": 1}), (4, {"pp": 2}), (4, {"zero": 1})],
)
def test_ten_drifts_are_all_named(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    run = resolve(updated(Options(), {**MODEL, **layout}), world)
    ranks = pool.run(drift, run, world, list(range(10)), world=world)
    for number in range(10):
        victim = ranks[0][number][1]
        name, _, said = ranks[victim][number]
        assert name in said, (name, said)
        # Four copies outvote one; of two, both are named.
        assert f"rank {victim} differs" in said or f" {victim} " in said.replace("and", " ")
        assert all(rank[number][2] for rank in ranks), "every rank must stop"
