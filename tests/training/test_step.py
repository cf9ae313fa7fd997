"""One step, seen from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, updated
from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import evaluate_step, train_step
from mega.core.training.wire import build_state

TINY = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 64, "seq_length": 8, "micro_batch": 1, "global_batch": 2}


@pytest.mark.parametrize("normalizer", ["global", "microbatch"])
def test_a_batch_of_which_no_token_counts_changes_nothing(normalizer: str) -> None:
    run = resolve(updated(Options(), {**TINY, "lr": 1e-3, "loss_normalizer": normalizer}), 1)
    state = build_state(run, Mesh(0), Device.choose("cpu"))
    before = [bucket.own_weights.clone() for bucket in state.grads.buckets]
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)]
    prompts = [replace(batch, loss_weights=torch.zeros_like(batch.loss_weights)) for batch in batches]
    report = train_step(state, prompts, 1e-3, 0.0)
    assert (float(report.loss), float(report.grad_norm), int(report.finite)) == (0.0, 0.0, 1)
    assert all(torch.equal(a, bucket.own_weights) for a, bucket in zip(before, state.grads.buckets, strict=True))


def test_the_reported_loss_is_normalized_as_the_gradient_is() -> None:
    """By microbatch, as in Megatron-LM 23.06, it is the mean of the microbatches' means, in training and validation."""
    reported = {}
    for normalizer in ("global", "microbatch"):
        flags = {**TINY, "seq_length": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0, "lr": 1e-3}
        run = resolve(updated(Options(), {**flags, "loss_normalizer": normalizer}), 1)
        state = build_state(run, Mesh(0), Device.choose("cpu"))
        first, second = (synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0))
        first = replace(first, loss_weights=torch.ones_like(first.loss_weights))
        second = replace(second, loss_weights=torch.ones_like(second.loss_weights) * (torch.arange(8) < 2))
        sums = [evaluate_step(state, [batch])[0] for batch in (first, second)]
        each = [float(total / weight) for total, weight in sums]
        whole = [first, second]
        expected = sum(each) / 2 if normalizer == "microbatch" else (8 * each[0] + 2 * each[1]) / 10
        total, weight = evaluate_step(state, whole)[0]
        assert float(total / weight) == pytest.approx(expected, rel=1e-6)
        reported[normalizer] = float(train_step(state, whole, 0.0, 0.0).loss)
        assert reported[normalizer] == pytest.approx(expected, rel=1e-6)
    assert abs(reported["global"] - reported["microbatch"]) > 1e-3
