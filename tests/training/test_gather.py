"""Updated weights that travel while the next step begins: the same bytes, and none is read before it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.guards.audit import audit
from mega.core.training.state import TrainState
from mega.core.training.step import evaluate_step, train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run

RECOMPUTED = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}


def begin(groups: Groups, rank: int, run: RunConfig, world: int) -> TrainState:
    mesh = build_mesh(run, rank, world, groups)
    return build_state(run, mesh, Device.choose("cpu"))


def play(state: TrainState, step: int) -> float:
    run = state.run
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 8 * step)]
    return float(train_step(state, batches, run.optimizer.lr or 0.0, 0.01).loss)


def trained(groups: Groups, rank: int, run: RunConfig, world: int) -> tuple[list[float], float, dict[Any, bytes]]:
    """Job: three steps; losses, an evaluation, and every byte, read while the last weights may be on their way."""
    state = begin(groups, rank, run, world)
    losses = [play(state, step) for step in range(3)]
    pieces = [*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)]
    found = {
        (piece.key, piece.start): bytes(piece.tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        for piece in pieces
    }
    audit(state)
    play(state, 3)
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)]
    sums = evaluate_step(state, batches)
    state.grads.wait_param_gather()
    return losses, float(sums[0, 0]), found


@pytest.mark.parametrize(
    ("model", "world", "layout"),
    [
        ("gpt", 2, {"zero": 1}),
        ("gpt", 4, {"zero": 2, "dtype": "bf16"}),
        ("llama", 4, {"zero": 1, "tp": 2, "sequence_parallel": True, "global_batch": 4}),
        ("gpt", 4, {"zero": 1, "pp": 2, "chunks": 2}),
        ("llama", 4, {"zero": 1, "cp": 2, "global_batch": 4, **RECOMPUTED}),
    ],
)
def test_overlap_changes_no_byte(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    ranks = [
        pool.run(trained, small_run(model, world, overlap_param_gather=overlap, **layout), world, world=world)
        for overlap in (True, False)
    ]
    assert ranks[0] == ranks[1]


def waits(groups: Groups, rank: int, run: RunConfig, world: int) -> list[int]:
    """Job: buckets still in flight after a step, then in front of each further unit of the model."""
    state = begin(groups, rank, run, world)
    play(state, 0)
    (stage,) = state.stages
    seen: list[int] = []

    def count(*_: Any) -> None:
        seen.append(sum(bucket.gathering is not None for bucket in state.grads.buckets))

    count()
    for unit in (stage.embedding, *stage.layers, stage.head):
        assert unit is not None
        unit.register_forward_pre_hook(count)
    with torch.no_grad():
        stage(synthetic_batch(run, torch.arange(1)))
    return seen


def test_each_unit_waits_for_its_own(pool: Pool) -> None:
    run = small_run("llama", 2, zero=1, bucket_size=1000)
    for seen in pool.run(waits, run, 2, world=2):
        buckets, after_embedding, *rest = seen
        assert buckets > after_embedding > rest[0] > rest[-1] == 0
        assert rest == sorted(rest, reverse=True)


def test_without_overlap_all_are_here_after_the_step(pool: Pool) -> None:
    run = small_run("llama", 2, zero=1, bucket_size=1000, overlap_param_gather=False)
    assert all(set(seen) == {0} for seen in pool.run(waits, run, 2, world=2))
