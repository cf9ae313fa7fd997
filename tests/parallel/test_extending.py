"""The change test of families: one that the project does not know is one file, and trains alike in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.architecture import inventory
from mega.core.config.run import RunConfig
from mega.core.data.build import Datasets
from mega.core.data.dataset import MockDataset
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import LOSS_BOUND, Snapshot, own_samples, snapshots, synthetic_batch
from mega.core.training.kinds import pretraining
from mega.core.training.step import evaluate_step, output_step, train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support import toy_encoder
from tests.support.one_process import same_run
from tests.support.runs import small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
SP = {"sequence_parallel": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    # (world, layout)
    (2, {"tp": 2, **SP}),
    (2, {"pp": 2}),
    (2, {"zero": 1}),
    (4, {"tp": 2, "pp": 2, "micro_batch": 2, **SP}),
]


def known(groups: Groups, rank: int, yes: bool) -> None:
    """Job of one rank: the family is registered in its process, or is no longer."""
    (toy_encoder.register if yes else toy_encoder.unregister)()


@pytest.fixture(scope="module", autouse=True)
def registered(pool: Pool) -> Iterator[None]:
    toy_encoder.register()
    pool.run(known, True)
    yield
    toy_encoder.unregister()
    pool.run(known, False)


def run(world: int = 1, **layout: Any) -> RunConfig:
    return small_run("gpt", world, family=toy_encoder.NAME, layers=2, lr=LR["fp64"], **layout)


@pytest.fixture(scope="module")
def reference(pool: Pool) -> list[Snapshot]:
    """One rank, one sample at a time."""
    return snapshots(pool, run(), 1, STEPS)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_training_is_one_ranks(pool: Pool, reference: list[Snapshot], world: int, layout: dict[str, Any]) -> None:
    found = snapshots(pool, run(world, **layout), world, STEPS)
    same_run(STEPS, reference, found)


def test_every_tensor_is_trained(reference: list[Snapshot]) -> None:
    """The comparison is no comparison of zeros: both losses reach every tensor of the table, and dropout drops."""
    first = reference[0]
    names = {f"grads/{tensor.name}" for tensor in inventory(run().model)}
    floor = 1e-6 * first.grad_norm
    still = [name for name, gradient in first.gradients.items() if float(gradient.abs().max()) < floor]
    assert set(first.gradients) == names and not [name for name in still if "k_proj.bias" not in name]


def judged(groups: Groups, rank: int, run: RunConfig, world: int) -> tuple[dict[str, float], torch.Tensor]:
    """Job of one rank: what a step reports of each term and metric, and the sums of an evaluation after it."""
    mesh, device = build_mesh(run, rank, world, groups), Device.choose("cpu", rank)
    state = build_state(run, mesh, device)
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 0)]
    report = train_step(state, batches, LR["fp64"], 0.0)
    means = {name: float(value) for name, value in {"loss": report.loss, **report.means}.items()}
    return means, evaluate_step(state, batches)


def test_both_terms_are_reported_and_evaluated(pool: Pool) -> None:
    ((means, sums),) = pool.run(judged, run(), 1, world=1)
    assert list(means) == ["loss", "mlm", "pair", "pair_accuracy"]
    assert means["loss"] == pytest.approx(means["mlm"] + means["pair"], rel=1e-15)
    # the divisors are those of the global batch, each term's own
    whole = synthetic_batch(run(), torch.arange(8))
    for name, (_, weight) in zip(means, [(0.0, 0.0), *sums.tolist()], strict=True):
        if name in whole.weights:
            assert weight == float(whole.weights[name].sum()) > 0
    for world, layout in LAYOUTS:
        for theirs, their_sums in pool.run(judged, run(world, **layout), world, world=world):
            assert theirs == pytest.approx(means, rel=LOSS_BOUND["fp64"])
            torch.testing.assert_close(their_sums, sums, rtol=LOSS_BOUND["fp64"], atol=0)


def test_it_is_trained_on_token_files() -> None:
    """As `mega pretrain` does: rows of tokens become the family's own batches."""
    flags = {"micro_batch": 2, "global_batch": 4}
    tokens, mesh = MockDataset(samples=16, seq_length=16, vocab=run().model.vocab or 0, seed=1), build_mesh(run(), 0, 1)
    source = pretraining.task(run(**flags), Datasets(train=tokens), None, mesh).train
    assert source is not None
    state = build_state(run(**flags), mesh, Device.choose("cpu"))
    report = train_step(state, source.take(4, 2), LR["fp64"], 0.0)
    assert float(report.means["mlm"]) > 0 == float(report.means["pair"])


def test_weights_that_stay_whole_are_not_shared_out() -> None:
    sharded = run(2, zero=3)
    with pytest.raises(ValueError, match=rf"^--zero 3: --family {toy_encoder.NAME} keeps its weights whole"):
        build_state(sharded, build_mesh(sharded, 0, 2), Device.choose("cpu"))


def test_a_token_sees_what_follows_and_no_padding() -> None:
    state = build_state(run(), build_mesh(run(), 0, 1), Device.choose("cpu"))
    batch = synthetic_batch(run(), torch.arange(1))
    last = int(batch.lengths[0]) - 1
    assert 0 < last < batch.tokens.shape[1] - 1

    def after(column: int) -> torch.Tensor:
        """Logits of the first token where another stands in `column`."""
        tokens = batch.tokens.clone()
        tokens[0, column] += 1
        return output_step(state, [replace(batch, tokens=tokens)])[0][0, 0]

    unchanged = output_step(state, [batch])[0][0, 0]
    assert torch.equal(after(last + 1), unchanged) and not torch.equal(after(last), unchanged)
