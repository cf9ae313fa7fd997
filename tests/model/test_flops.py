"""The formula of a model's operations against the operations of its own stage, counted on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve, text_lengths
from mega.core.config.run import RunConfig
from mega.core.family import synthetic_batch
from mega.core.flops import model_flops_per_token
from mega.core.ops.autograd import run_backward
from mega.core.parallel.mesh import Mesh
from mega.core.training.wire import build_grads, build_stages

ROWS = 2


def added(_: Any, a: Any, b: Any, **options: Any) -> int:
    """Operations of the gradient of a weight, which torch's counter does not know; a, b: shapes."""
    return int(2 * a[0] * a[1] * b[1])


def counted(run: RunConfig) -> float:
    """Operations a token of the matmuls of one microbatch, forward and backward, by the reference operators."""
    (stage,) = build_stages(run, mesh := Mesh.at(0), torch.device("meta"))
    build_grads(run, mesh, [stage]).start()
    batch: Any = synthetic_batch(run, torch.arange(ROWS), seed=0, ragged=False)
    shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in batch.tensors().items()}
    scales = torch.empty(len(stage.terms), dtype=torch.float64, device="meta")
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        terms = stage(replace(batch, **shapes), scales=scales).terms.values()
        roots = tuple(term.total if term.root is None else term.root for term in terms)
        run_backward(roots, tuple(map(torch.empty_like, roots)))
    return counter.get_total_flops() / ROWS / sum(text_lengths(run))


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("gpt2-345m", {}),
        ("llama2-7b", {"layers": 4}),
        ("llama3-8b", {"layers": 4}),
        ("bert-110m", {}),
        ("bert-345m", {}),
        ("bert-345m", {"binary_head": False}),
        ("t5-220m", {}),
        ("t5-220m", {"layers": 4, "decoder_layers": 8}),
        ("llama2-7b", {"layers": 4, "lora_rank": 16}),
    ],
    ids=str,
)
def test_the_formula_counts_what_runs(preset: str, flags: dict[str, Any]) -> None:
    """Within 0.5 %. BERT's vocabulary head sees one of seven tokens here, and up to 15 % of them in training."""
    plain = {"micro_batch": ROWS, "ops": "reference", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    run = resolve(compose(preset, flags={**plain, **flags, "device": "cpu"}), 1)
    assert model_flops_per_token(run) == pytest.approx(counted(run), rel=5e-3)


@pytest.mark.parametrize(
    ("preset", "windowed"),
    [("gemma3-270m", 15), ("olmo2-1b", 0), ("mistral-7b", 32), ("gemma2-2b", 13)],
)
def test_a_layer_with_a_window_counts_the_keys_that_it_sees(preset: str, windowed: int) -> None:
    """12 h s for every layer, in which one with a window has that instead of s."""
    run = resolve(compose(preset, flags={"micro_batch": 1, "seq_length": 8192}), 1)
    model, length = run.model, run.batch.seq_length
    full = resolve(compose(preset, flags={"micro_batch": 1, "seq_length": 8192, "window": 8192}), 1)
    spared = 12.0 * windowed * model.heads * model.head_dim * (length - (model.window or length))
    assert model_flops_per_token(full) - model_flops_per_token(run) == pytest.approx(spared)
    assert (spared > 0) == bool(windowed)
