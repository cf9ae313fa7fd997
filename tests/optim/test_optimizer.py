"""The update against torch's own AdamW in float64: groups, clipping, skipped steps, spans."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.model.decoder import DecoderStage
from mega.core.optim.adam import AdamW
from mega.core.optim.rule import ShardState, StepArgs
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.weight import Weight, weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import backward, train_step
from mega.core.training.wire import build_mesh, build_stages, build_state
from tests.support.ranks import CPU, random
from tests.support.runs import small_run

RULE = AdamW(0.9, 0.95, 1e-8)
LR, DECAY = 1e-2, 0.1


def state_of(**values: Any) -> tuple[RunConfig, TrainState]:
    run = small_run(layers=2, adam_beta2=0.95, micro_batch=8, **values)
    return run, build_state(run, Mesh.at(0), Device(CPU, "gloo"))


def torch_adamw(stage: DecoderStage) -> torch.optim.AdamW:
    """Megatron's groups: matrices decay, biases and norms do not."""
    every: list[Weight] = list(weights(stage))
    groups = [
        {"params": [w for w in every if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in every if w.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("ops", ["auto", "reference"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_five_steps_are_torchs(clip: float, ops: str) -> None:
    run, state = state_of(clip_grad=clip, ops=ops)
    (alone,) = build_stages(run, Mesh.at(0), CPU)
    theirs = torch_adamw(alone)
    for step in range(5):
        batch = synthetic_batch(run, torch.arange(8 * step, 8 * step + 8))
        report = train_step(state, [batch], LR, DECAY)
        theirs.zero_grad()
        loss = alone(batch).terms["lm"]
        (loss.total / loss.weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), clip or float("inf"))
        theirs.step()
        torch.testing.assert_close(report.grad_norm, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(report.loss, loss.total / loss.weight, rtol=1e-12, atol=0)
    for mine, expected in zip(weights(state.stages[0]), alone.parameters(), strict=True):
        # Clipping divides by norm + 1e-6 in both; what is left is the order of operations.
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-9, atol=1e-11)


def test_fused_update_is_the_reference() -> None:
    span = [random(257, seed=seed) for seed in range(4)]
    span[3].square_()
    fused, plain = [[tensor.clone() for tensor in span] for _ in range(2)]
    for step in (1, 2, 1000):
        RULE.update(*fused, args=StepArgs(step, LR, DECAY))
        RULE.reference(*plain, args=StepArgs(step, LR, DECAY))
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-14)


def test_a_cut_span_changes_nothing() -> None:
    """Where a span begins and ends does not concern the rule: both sides of decay_split give the whole's bits."""
    whole = [random(100, seed=seed).abs() for seed in range(4)]
    decay_split = [tensor.clone() for tensor in whole]
    RULE.update(*whole, args=StepArgs(3, LR, DECAY))
    for part in (slice(0, 37), slice(37, 37), slice(37, 100)):
        RULE.update(*(tensor[part] for tensor in decay_split), args=StepArgs(3, LR, DECAY))
    torch.testing.assert_close(whole, decay_split, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped(value: float) -> None:
    """Weights, moments and the count of updates stay; the next clean step is the first."""
    run, state = state_of()
    _, other = state_of()
    batch = synthetic_batch(run, torch.arange(8))
    before = [weight.detach().clone() for weight in weights(state.stages[0])]
    backward(state, [batch])
    state.grads.buckets[-1].grads[0] = value
    outcome = state.optimizer.step(LR, DECAY)
    assert not bool(outcome.finite) and state.optimizer.updates == 0
    for weight, old in zip(weights(state.stages[0]), before, strict=True):
        assert torch.equal(weight, old)
    assert not any(flat.values.any() for owned in state.optimizer.shards for flat in owned.moments.values())
    for one in (state, other):
        assert bool(train_step(one, [batch], LR, DECAY).finite)
    for mine, expected in zip(weights(state.stages[0]), weights(other.stages[0]), strict=True):
        assert torch.equal(mine, expected)


def test_masters_carry_what_bf16_would_lose() -> None:
    """bf16 weights keep fp32 masters: a hundred steps too small for bf16 still add up."""
    run, state = state_of(dtype="bf16")
    weight_before = [owned.master.clone() for owned in state.optimizer.shards]
    assert all(owned.has_master and owned.master.dtype == torch.float32 for owned in state.optimizer.shards)
    batch = synthetic_batch(run, torch.arange(8))
    for _ in range(5):
        train_step(state, [batch], 1e-6, 0.0)
    moved = [(owned.master - old).abs().max() for owned, old in zip(state.optimizer.shards, weight_before, strict=True)]
    assert all(2e-6 < float(one) < 6e-6 for one in moved)
    for owned in state.optimizer.shards:
        assert torch.equal(owned.bucket.own_weights, owned.master.to(torch.bfloat16))


def order_of_updates(groups: Groups, rank: int) -> list[str]:
    run = small_run(layers=2, pp=2, optimizer="adafactor", bucket_size=1, micro_batch=8, global_batch=16)
    state = build_state(run, build_mesh(run, rank, 2, groups), Device(CPU, "gloo"))
    kinds: list[str] = []
    step = state.optimizer.rule.step

    def seen(owned: ShardState, *given: Any) -> None:
        kinds.append("tied" if owned.bucket.tied_name() else "own")
        step(owned, *given)

    with mock.patch.object(type(state.optimizer.rule), "step", lambda _, owned, *given: seen(owned, *given)):
        train_step(state, [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)], LR, DECAY)
    return kinds


def test_ends_of_a_pipeline_meet_when_both_are_done_with_the_rest(pool: Pool) -> None:
    """They wait for each other over the tensor they share: were it one's first and the other's last, no stage's update
    would overlap the other's."""
    for kinds in pool.run(order_of_updates, world=2):
        assert kinds[-1] == "tied" and kinds.count("tied") == 1 < len(kinds)
