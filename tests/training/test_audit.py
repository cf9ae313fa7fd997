"""The replica audit finds every copy that has drifted by one bit, and names its tensor and rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.device import Device
from mega.core.parallel.bucket_sums import tied_buckets
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.guards.audit import audit, copies
from mega.core.training.guards.finite import check_tied
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
        except FloatingPointError as error:
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


def damage_tied(groups: Groups, rank: int, run: RunConfig, world: int) -> list[tuple[bool, str]]:
    """Job: per value that one element of the last stage's copy of the embedding's gradient becomes, on one rank, after
    copies were summed up: whether the step was applied, and what was said. First, of none."""
    mesh = build_mesh(run, rank, world, groups)
    state, found = build_state(run, mesh, Device.choose("cpu")), []
    finish, batches = state.grads.finish, [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 0)]
    for value in (None, float("nan"), 1e-3):

        def damaged(value: float | None = value) -> None:
            finish()
            if value is not None and rank == world - 1:
                tied_buckets(state.grads)[0].own_grads[3] += value

        state.grads.finish = damaged  # type: ignore[method-assign]
        numbers = train_step(state, batches, 1e-3, 0.01).start_reading().numbers()
        said = ""
        try:
            if not numbers["finite"]:
                check_tied(state, 7, int(numbers.get("tied", 0)), int(numbers.get("tied_hash", 0)))
        except FloatingPointError as error:
            said = str(error)
        found.append((bool(numbers["finite"]), said))
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_a_damaged_gradient_of_a_tied_copy_is_named_before_the_update(pool: Pool, zero: int) -> None:
    """The norm counts the first stage's copy alone."""
    run = resolve(updated(Options(), {**MODEL, "pp": 2, "zero": zero}), 4)
    for good, *damaged in pool.run(damage_tied, run, 4, world=4):
        assert good == (True, "")
        for applied, said in damaged:
            who = "ranks 1 and 3 differ (two" if zero else "rank 3 differs from 3 others"
            assert not applied and "the gradient of model.embed_tokens.weight are no longer equal" in said
            assert f"reduced: {who}" in said, said
