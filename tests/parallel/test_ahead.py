"""Tokens after the next one: every layout is one process, and that one is plain torch; what a run cannot have."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch

from mega.core.architecture import architecture, inventory
from mega.core.batch import DecoderBatch
from mega.core.config.check import check
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.estimate.memory import memory
from mega.core.flops import model_flops_per_token
from mega.core.model import ahead as module
from mega.core.model.decoder import Head
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import Snapshot, own_samples, snapshots, synthetic_batch
from mega.core.training.step import backward, evaluate_step, means
from mega.core.training.wire import build_mesh, build_state
from tests.support.one_process import enough, named, same_run
from tests.support.runs import small_options, small_run

STEPS = (1, 2)  # the second sees an update; moments, which the third would, are those of proof/test_parity.py
SP = {"tp": 2, "sequence_parallel": True}
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
EXPERTS = {"experts": 4, "experts_from": 1, "balance_loss": (0.5,), "expert_dispatch": "all-to-all"}
AHEAD: dict[str, Any] = {"mtp_layers": 2, "mtp_loss": 0.6, "position": "rope", "mock_data": True}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt", 2, {"zero": 3, **FULL}),
    ("gpt", 2, {"pp": 2, "schedule": "zb-h1"}),
    ("gpt", 2, {"cp": 2, "cp_comm": "ring"}),
    ("experts", 4, {**SP, "pp": 2, "chunks": 2, "micro_batch": 2, "recompute": "selective"}),
    ("experts", 4, {**SP, "ep": 2, "zero": 3}),
    ("packed", 2, {"cp": 2, "cp_comm": "ring"}),
]


def run(model: str = "gpt", world: int = 1, **values: Any) -> RunConfig:
    """`experts`: untied, with a mixture in every layer but the first, so in those that look further ahead. `packed`:
    rows of several documents."""
    added = {"tied": False, **EXPERTS} if model == "experts" else {}
    values = {**AHEAD, "lr": LR["fp64"], "steps": 10, **added, **values}
    check(small_options("gpt", **values), world)
    return small_run("gpt", world, **values, reset_attention=model == "packed")


_references: dict[tuple[Any, ...], list[Snapshot]] = {}


def reference(pool: Pool, model: str, **size: int) -> list[Snapshot]:
    """One rank, one sample at a time."""
    key = model, *size.items()
    if key not in _references:
        _references[key] = snapshots(pool, run(model, **size), 1, STEPS)
    return _references[key]


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS, ids=named)
def test_every_layout_is_one_process(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    size = enough(world, layout)
    found = snapshots(pool, run(model, world, **layout, **size), world, STEPS)
    same_run(STEPS, reference(pool, model, **size), found)


def test_every_tensor_is_trained(pool: Pool) -> None:
    first = reference(pool, "experts", global_batch=8)[0]
    names = {f"grads/{tensor.name}" for tensor in inventory(run("experts").model)}
    still = [name for name, one in first.gradients.items() if float(one.abs().max()) < 1e-9 * first.grad_norm]
    assert set(first.gradients) == names and not [name for name in still if "k_proj.bias" not in name]
    assert any("mtp.layers.1.transformer_layer.mlp.experts.3" in name for name in names)


def test_it_is_plain_torch() -> None:
    """Losses from what the layers put out, one sequence at a time; the gradient along a line is the loss's slope. A
    held-out set judges the next token alone."""
    assert doctest.testmod(module).failed == 0
    config = run(hidden_dropout=0.0, attention_dropout=0.0)
    state, seen = build_state(config, build_mesh(config, 0, 1), Device.choose("cpu")), []
    head = state.stages[0].head
    assert isinstance(head, Head)
    for layer in head.ahead:
        layer.register_forward_hook(lambda module, given, made: seen.append((given[1], made.detach())))
    made = [synthetic_batch(config, rows) for rows in own_samples(config, state.mesh, 0)]
    batches = [batch for batch in made if isinstance(batch, DecoderBatch)]
    loss, found = means(state, backward(state, batches))
    totals, weights = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for number, batch in enumerate(batches):
        for depth in (1, 2):
            tokens, h = seen[2 * number + depth - 1]
            assert tokens[0, :-depth].equal(batch.tokens[0, depth:]) and not tokens[0, -depth:].any()
            logits = (h @ head.weight.detach().T)[:, : config.model.vocab].log_softmax(1)
            for column in range(batch.tokens.shape[1] - depth):
                weight = batch.loss_weights[0, column + depth].double()
                totals[depth - 1] -= weight * logits[column, batch.labels[0, column + depth]]
                weights[depth - 1] += weight
    for depth in (1, 2):
        torch.testing.assert_close(found[f"mtp_{depth}_loss"], (totals / weights)[depth - 1], rtol=1e-12, atol=0)
    both = 0.3 * (found["mtp_1_loss"] + found["mtp_2_loss"])
    torch.testing.assert_close(loss, found["lm"] + both, rtol=1e-12, atol=0)
    assert means(state, evaluate_step(state, batches))[0] == pytest.approx(float(found["lm"]), rel=1e-12)


def test_packed_documents_are_the_documents_alone() -> None:
    """Losses and gradients of a row of two documents are those of two rows."""
    config = run(hidden_dropout=0.0, attention_dropout=0.0)
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    tokens, labels, weights = text[:, :6], text[:, 1:], torch.tensor([[1.0, 1, 0, 1, 1, 0]])
    positions, documents = torch.arange(3).repeat(1, 2), torch.tensor([[0, 0, 0, 1, 1, 1]])
    row = DecoderBatch(tokens, labels, weights, positions, torch.tensor([0]), documents)
    halves = [
        DecoderBatch(tokens[:, own], labels[:, own], weights[:, own], positions[:, own], torch.tensor([number]))
        for number, own in enumerate((slice(0, 3), slice(3, 6)))
    ]
    found = []
    for batches in ([row], halves):
        state = build_state(config, build_mesh(config, 0, 1), Device.choose("cpu"))
        loss, terms = means(state, backward(state, batches))
        found.append({**terms, "loss": loss, **{piece.key: piece.tensor.clone() for piece in state.gradient_pieces()}})
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_operations_of_the_layers_count() -> None:
    """Each layer, its linear, and the output matrix once more."""
    plain, further = (run(mtp_layers=layers) for layers in (0, 2))
    model = further.model
    each = sum(tensor.elements for tensor in inventory(model) if tensor.name.startswith("mtp."))
    each += 2 * model.vocab * model.hidden
    attention = architecture(model).block.attention
    scores = 12 * attention.width * further.batch.seq_length
    assert model_flops_per_token(further) - model_flops_per_token(plain) == pytest.approx(6 * each + 2 * scores)


def test_the_estimate_holds_their_weights() -> None:
    """To the byte; they are as the last layer is, with experts, though the first has none."""
    options = run("experts", dtype="bf16", grad_dtype="fp32")
    (stage,) = memory(options, 1).stages
    buckets = build_state(options, build_mesh(options, 0, 1), Device.choose("cpu")).grads.buckets
    flat = sum(bucket.weights.numel() for bucket in buckets)
    assert (stage.held.weights, stage.held.grads) == (2 * flat, 4 * flat)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"position": "learned"}, "--mtp-layers 2: needs --position rope or none, not learned"),
        ({"cuda_graph": True}, "--cuda-graph: excludes --mtp-layers; valid there: --no-cuda-graph"),
        ({"mtp_layers": 64, "seq_length": 64}, "--mtp-layers 64: must be below --seq-length 64"),
    ],
)
def test_what_a_run_cannot_have(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        run(**values)
