"""fp16: overflows are skipped, the loss scale follows them, and nothing of a skipped step stays."""

from __future__ import annotations

import pytest
import torch

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, updated
from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import StepReport, train_step
from mega.core.training.wire import build_state

OPTIONS = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "vocab": 101,
    "vocab_multiple": 1,
    "seq_length": 16,
    "micro_batch": 2,
    "global_batch": 4,
    "lr": 1e-3,
    "dtype": "fp16",
    "initial_loss_scale": 2.0**10,
    "loss_scale_window": 3,
}


def train(
    options: dict[str, object], steps: int, overflow: frozenset[int] = frozenset()
) -> tuple[TrainState, list[StepReport]]:
    """Steps 1 ... `steps`; those in `overflow` find an infinity among their gradients."""
    run = resolve(updated(Options(), options), 1)
    mesh = Mesh(0)
    state, reports = build_state(run, mesh, Device.choose("cpu")), []
    finish = state.grads.finish
    for step in range(1, steps + 1):

        def poisoned(step: int = step) -> None:
            finish()
            if step in overflow:
                state.grads.buckets[0].own_grads[0] = torch.inf

        state.grads.finish = poisoned  # type: ignore[method-assign]
        batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 4 * step)]
        reports.append(train_step(state, batches, 1e-3, 0.01))
    return state, reports


def test_scale_and_skips_follow_the_golden_sequence() -> None:
    """Appendix A.9's sequence: overflow x 3, then three clean steps; from 2^10 instead of 2^32."""
    state, reports = train(OPTIONS, 7, frozenset({1, 2, 3}))
    assert [int(report.finite) for report in reports] == [0, 0, 0, 1, 1, 1, 1]
    assert [float(report.scale) for report in reports if report.scale is not None] == [
        1024,
        1024,
        512,
        256,
        256,
        256,
        512,
    ]
    assert state.optimizer.updates == 4


def test_a_skipped_step_changes_no_weight_and_no_moment() -> None:
    state, _ = train(OPTIONS, 1)
    before = (
        [owned.master.clone() for owned in state.optimizer.shards],
        [o.moments["moment1"].values.clone() for o in state.optimizer.shards],
    )
    again, _ = train(OPTIONS, 2, frozenset({2}))
    for owned, master, moment in zip(again.optimizer.shards, *before, strict=True):
        assert torch.equal(owned.master, master) and torch.equal(owned.moments["moment1"].values, moment)


def test_the_scale_cancels() -> None:
    """Gradient norm and loss are those of fp32, at any scale."""
    _, exact = train({**OPTIONS, "dtype": "fp32"}, 1)
    for scale in (1.0, 2.0**8, 2.0**12):
        _, scaled = train({**OPTIONS, "loss_scale": scale}, 1)
        assert float(scaled[0].loss) == pytest.approx(float(exact[0].loss), rel=1e-3)
        assert float(scaled[0].grad_norm) == pytest.approx(float(exact[0].grad_norm), rel=2e-2)


def test_a_real_overflow_is_found() -> None:
    """At 2^32 fp16 gradients overflow by themselves."""
    _, reports = train({**OPTIONS, "initial_loss_scale": 2.0**32}, 1)
    assert not bool(reports[0].finite)
