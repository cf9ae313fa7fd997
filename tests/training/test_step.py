"""One step, seen from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig, updated
from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_state

TINY = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 64, "seq_length": 8, "micro_batch": 1, "global_batch": 2}


@pytest.mark.parametrize("normalizer", ["global", "microbatch"])
def test_a_batch_of_which_no_token_counts_changes_nothing(normalizer: str) -> None:
    run = resolve(updated(RunConfig(), {**TINY, "lr": 1e-3, "loss_normalizer": normalizer}), 1)
    state = build_state(run, Mesh(0), Device.choose("cpu"))
    before = [bucket.own_weights.clone() for bucket in state.grads.buckets]
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)]
    prompts = [replace(batch, loss_weights=torch.zeros_like(batch.loss_weights)) for batch in batches]
    report = train_step(state, prompts, 1e-3, 0.0)
    assert (float(report.loss), float(report.grad_norm), int(report.finite)) == (0.0, 0.0, 1)
    assert all(torch.equal(a, bucket.own_weights) for a, bucket in zip(before, state.grads.buckets, strict=True))
