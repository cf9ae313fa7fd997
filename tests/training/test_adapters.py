"""Low-rank adapters: what they compute, in any layout, and what of a frozen base is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.architecture import inventory, without_adapters
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.estimate.memory import memory
from mega.core.parallel.weight import weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import compare, snapshots, synthetic_batch, within
from mega.core.training.state import TrainState
from mega.core.training.step import backward
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
ADAPTERS: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0, "global_batch": 4, "layers": 2}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ("llama", 2, {"zero": 3}),
    ("llama", 2, {"cp": 2, "recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}),
    ("gpt", 4, {"tp": 2, "zero": 1, "recompute": "selective"}),
    ("gpt", 2, {"pp": 2, "schedule": "zb-h1"}),
    # of cross attention, whose keys and values are of another text than its queries
    ("t5", 4, {"tp": 2, "pp": 2, "split_rank": 1, "sequence_parallel": True}),
    ("bert-window", 4, {"tp": 2, "cp": 2, "cp_comm": "ring", "sequence_parallel": True}),
    # of experts: those of one rank, those that ranks exchange rows with, and parts of them
    ("gpt-experts", 2, {"ep": 2, "expert_dispatch": "all-to-all", "zero": 1}),
    ("gpt-experts", 2, {"tp": 2}),
    ("llama-experts", 4, {"tp": 2, "ep": 2, "sequence_parallel": True, "expert_dispatch": "all-to-all", "zero": 3}),
    ("llama-experts", 4, {"pp": 2, "ep": 2, "schedule": "zb-h1"}),
]
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt": {"experts": 4, "balance_loss": (0.5,), "lora_dropout": 0.0},
    "llama": {
        **{"experts": 4, "expert_ffn": 16, "shared_ffn": 16, "lora_dropout": 0.0},
        "lora_targets": ("q_proj", "up_proj", "down_proj"),
    },
}
"""All linears, experts' among them; and some, not all that are one GEMM."""


def run(model: str = "llama", world: int = 1, **values: Any) -> RunConfig:
    added = MIXTURES[model.removesuffix("-experts")] if model.endswith("-experts") else {}
    model = model.removesuffix("-experts")
    every: dict[str, Any] = {**ADAPTERS, "lora_dropout": 0.25, **added, **values}
    return small_run(model, world, **every)


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS, ids=str)
def test_every_layout_trains_the_same_adapters(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    reference = snapshots(pool, run(model), 1, STEPS)
    trained = {f"grads/{tensor.name}" for tensor in inventory(run(model).model) if tensor.trainable}
    assert set(reference[1].gradients) == trained and all("lora_" in name for name in trained)
    assert all(float(gradient.abs().max()) > 0 for gradient in reference[1].gradients.values())
    for difference in compare("fp64", STEPS, reference, snapshots(pool, run(model, world, **layout), world, STEPS)):
        assert within("fp64", difference), difference


def test_adapters_of_the_memory_drop_some_of_it() -> None:
    """Each sample other elements, the same ones in every pass; nothing where nothing is to be dropped."""
    targets = {"lora_targets": ("k_proj", "v_proj"), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    found = []
    for dropout in (0.25, 0.0):
        options = run("t5", lora_dropout=dropout, layers=1, decoder_layers=1, **targets)
        state = built(options)
        for name, tensor in by_name(state).items():
            if "encoder_attn" in name and name.endswith("lora_B.weight"):
                tensor.fill_(0.5)  # the others add nothing, dropped or not
        found += [backward(state, [synthetic_batch(options, torch.arange(4))]) for _ in range(2)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.allclose(found[0], found[2], rtol=1e-6)


def built(run: RunConfig) -> TrainState:
    return build_state(run, build_mesh(run, 0, 1), Device.choose("cpu"))


def by_name(state: TrainState, main_grad: bool = False) -> dict[str, torch.Tensor]:
    found = {}
    for weight in weights(torch.nn.ModuleList(state.stages)):
        for segment in weight.segments:
            of = weight.main_grad if main_grad else weight.data
            if of is not None:
                found[segment.shard.name] = segment.real(of)
    return found


CHANGES: list[tuple[str, tuple[str, ...]]] = [
    *(("gpt", targets) for targets in ((), ("q_proj", "v_proj", "down_proj"))),
    *(("llama-experts", targets) for targets in ((), ("k_proj", "up_proj"))),
]


@pytest.mark.parametrize(("model", "targets"), CHANGES, ids=str)
def test_it_is_a_change_of_the_weights(model: str, targets: tuple[str, ...]) -> None:
    """Loss and gradients are those of W + s B A, by the chain rule: dA = s B^T dW, dB = s dW A^T."""
    options = run(model, lora_dropout=0.0, lora_targets=targets, hidden_dropout=0.0, attention_dropout=0.0)
    adapted, batches = built(options), [synthetic_batch(options, torch.arange(4))]
    generator = torch.Generator().manual_seed(1)
    held = by_name(adapted)
    for name, tensor in held.items():
        if name.endswith("lora_B.weight"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    assert without_adapters(options.model).lora_rank == 0
    merged = built(RunConfig(**{**vars(options), "model": without_adapters(options.model)}))
    scale, ups = 6.0 / 3, [name for name in held if name.endswith("lora_B.weight")]
    for name in ups:
        stem = name.removesuffix("lora_B.weight")
        by_name(merged)[f"{stem}weight"].add_(held[name] @ held[f"{stem}lora_A.weight"], alpha=scale)
    sums, expected = backward(adapted, batches), backward(merged, batches)
    torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0)
    grads, whole = by_name(adapted, main_grad=True), by_name(merged, main_grad=True)
    assert set(grads) == {name for name in held if "lora_" in name} and len(ups) == len(grads) // 2
    for name in ups:
        stem = name.removesuffix("lora_B.weight")
        down, change = held[f"{stem}lora_A.weight"], whole[f"{stem}weight"]
        torch.testing.assert_close(grads[name], scale * change @ down.T, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(grads[f"{stem}lora_A.weight"], scale * held[name].T @ change, rtol=1e-9, atol=1e-14)


def test_what_stays_as_it_is_has_no_gradients_moments_or_masters() -> None:
    state = built(run(dtype="bf16"))
    trained = sum(tensor.elements for tensor in inventory(state.run.model) if tensor.trainable)
    held = [state.grads.buckets[0]._weights, *state.optimizer.shards[0].tensors()]
    assert all(bucket.grads is not None for bucket in state.grads.buckets)
    for parts in (state.grads.buckets, state.optimizer.shards):
        assert parts and len(parts) == len(state.grads.buckets)
    assert sum(bucket._weights.numel() for bucket in state.grads.buckets) < 1.5 * trained
    assert {tensor.dtype for tensor in held} == {torch.bfloat16, torch.float32}
    frozen = [weight for weight in weights(state.stages[0]) if not weight.requires_grad]
    assert frozen and all(weight.main_grad is None and weight.grad is None for weight in frozen)


def test_the_estimate_holds_what_the_run_holds() -> None:
    """To the byte: the base once in its dtype, gradients, masters and moments of adapters alone."""
    options = run("llama", dtype="bf16", grad_dtype="fp32", lora_dropout=0.0)
    (stage,) = memory(options, 1).stages
    state = built(options)
    frozen = [weight for weight in weights(state.stages[0]) if not weight.requires_grad]
    base = sum(weight.numel() * weight.element_size() for weight in frozen)
    buckets = state.grads.buckets
    flat = sum(bucket.weights.numel() for bucket in buckets)
    assert (stage.held.frozen, stage.held.weights, stage.held.grads) == (base, base + 2 * flat, 4 * flat)
    state_bytes = sum(one.numel() * one.element_size() for owned in state.optimizer.shards for one in owned.tensors())
    assert stage.held.masters + stage.held.moments == state_bytes
    full = memory(RunConfig(**{**vars(options), "model": without_adapters(options.model)}), 1).stages[0]
    assert stage.held.total < 0.35 * full.held.total and stage.activations < full.activations
