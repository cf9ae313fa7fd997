"""BERT's words are judged where words are masked; the rest of the row takes no head."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.data.synthetic import masked_batch
from mega.core.device import Device
from mega.core.model import bert
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages

SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 40, "seq_length": 24, "micro_batch": 3, "dtype": "fp64"}


def test_the_tokens_that_are_masked_are_enough() -> None:
    run = resolve(compose("tiny-bert", flags={**SHAPE, "hidden_dropout": 0.0, "attention_dropout": 0.0}), 1)
    found = []
    for known in (True, False):
        (stage,) = build_stages(run, Mesh(0), Device.choose("cpu").torch)
        batch = masked_batch(run.model, 24, torch.arange(3), seed=1)
        assert batch.predicted is not None and batch.loss_weights.sum() > 3
        with mock.patch.object(bert, "token_loss", wraps=bert.token_loss) as judged:
            terms = stage(batch if known else replace(batch, predicted=None)).terms
        assert len(judged.call_args.args[1]) == (3 * 4 if known else 3 * 24)
        (terms["lm"].total / terms["lm"].weight + terms["pair"].total).backward()
        found.append((terms["lm"], [weight.grad for weight in weights(stage)]))
    (ours, ours_grads), (theirs, theirs_grads) = found
    assert torch.equal(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.total, theirs.total, rtol=1e-12, atol=0)
    for one, other in zip(ours_grads, theirs_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
