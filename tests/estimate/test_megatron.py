"""Megatron-LM's memory report, against the figures that its program printed."""

from __future__ import annotations

import pytest

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.estimate.megatron import report

SHARDED = {"sequence_parallel": True, "recompute": "selective"}
GPT3 = {**SHARDED, "vocab": 51200, "tp": 8, "pp": 16, "micro_batch": 1, "global_batch": 192 * 8, "heads": 96}
LLAMA = {**SHARDED, "vocab_multiple": 1, "micro_batch": 1, "global_batch": 1024, "zero": 1}

ROWS = [
    ("gpt2-345m", {"micro_batch": 4, "global_batch": 4}, 1, 6069.97, 3852.48, 9922.46),
    ("gpt3-175b", GPT3, 1024, 24683.09, 9840.03, 34523.12),
    ("gpt3-175b", {**GPT3, "zero": 1}, 1024, 10284.62, 9840.03, 20124.65),
    ("llama2-7b", {**LLAMA, "tp": 2, "pp": 2}, 16, 14459.64, 7376.03, 21835.67),
    ("llama2-70b", {**LLAMA, "tp": 8, "pp": 8}, 256, 9462.67, 10272.03, 19734.70),
]


@pytest.mark.parametrize(("preset", "flags", "world", "weights", "activations", "total"), ROWS)
def test_golden(
    preset: str, flags: dict[str, object], world: int, weights: float, activations: float, total: float
) -> None:
    found = report(resolve(compose(preset, flags=flags), world), world)
    assert found.weights == pytest.approx(weights, abs=0.006)
    assert found.activations == pytest.approx(activations, abs=0.006)
    assert found.total == pytest.approx(total, abs=0.011)


def test_shards_of_gpt3() -> None:
    found = report(resolve(compose("gpt3-175b", flags=GPT3), 1024), 1024)
    assert (round(found.shard / 1e9, 4), round(found.others / 1e9, 4)) == (1.4379, 1.3593)
    assert round(found.layer, 1) == 102.0


@pytest.mark.parametrize(
    ("preset", "tp", "pp", "world", "billions"), [("llama2-7b", 2, 2, 16, 1.6847), ("llama2-70b", 8, 8, 256, 1.1025)]
)
def test_shards_of_llama(preset: str, tp: int, pp: int, world: int, billions: float) -> None:
    found = report(resolve(compose(preset, flags={**LLAMA, "tp": tp, "pp": pp}), world), world)
    assert round(found.shard / 1e9, 4) == billions
