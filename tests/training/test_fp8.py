"""--fp8 in training: close to bf16 under recompute and deferred weight gradients, and the same bits when repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_state
from tests.support.runs import small_run

OPTIONS: dict[str, Any] = {
    "dtype": "bf16",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "seq_length": 32,
    "global_batch": 4,
    "lr": 3e-3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def losses(model: str, steps: int = 12, **values: Any) -> list[float]:
    """Losses of a few steps on the same samples, so that there is something to learn."""
    run = small_run(model, **{**OPTIONS, **values})
    mesh = Mesh(0)
    state = build_state(run, mesh, Device.choose("cpu"))
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 0)]
    return [float(train_step(state, batches, 3e-3, 0.01).loss) for _ in range(steps)]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_losses_are_those_of_bf16(model: str) -> None:
    plain, narrow = losses(model), losses(model, fp8=True)
    assert narrow != plain and narrow[-1] < 0.9 * narrow[0]
    assert narrow == pytest.approx(plain, rel=1e-2)


def test_what_is_recomputed_is_cast_to_the_same_bits() -> None:
    kept = losses("llama", 4, fp8=True)
    assert losses("llama", 4, fp8=True, recompute="selective") == kept
    assert losses("llama", 4, fp8=True, recompute="full", recompute_method="uniform", recompute_layers=1) == kept
    assert losses("llama", 4, fp8=True) == kept


def test_the_head_is_not_cast() -> None:
    state = build_state(small_run("llama", **OPTIONS, fp8=True), Mesh(0), Device.choose("cpu"))
    stage = state.stages[0]
    assert stage.head is not None
    kinds = {type(weight.ops.matmuls).__name__ for weight in stage.layers.parameters()}  # type: ignore[attr-defined]
    assert kinds == {"Fp8Matmuls"} and type(stage.head.weight.ops.matmuls).__name__ == "Matmuls"
    assert torch.float8_e4m3fn not in {weight.dtype for weight in stage.parameters()}
