"""The predicted speed of a server: what it counts, what limits it, and how far it is from measured rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega import cli
from mega.core.bench.load import Load
from mega.core.bench.simulated import simulated
from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.estimate.hardware import hardware
from mega.core.estimate.serving import ServingTimes, StepSize, step_size
from mega.core.inference.capacity import weight_bytes
from mega.core.inference.request import Limits

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.estimate.served import mixture_rows, served, serving_rows

ONE = StepSize(1, 1, (1,), ())
LIMITS = Limits(4096, 65536, 64, 32000)


def test_measured_rows() -> None:
    """What docs/planning.md says of them. The time between tokens under a load is predicted less well."""
    rows = list(serving_rows())
    assert len(rows) == 17
    for row in rows:
        assert abs(row.error) <= (0.22 if row.what.startswith("between") else 0.09), row
    assert sorted(abs(row.error) for row in rows)[8] <= 0.025
    steps = list(mixture_rows())
    assert len(steps) == 8 and all(abs(row.error) <= 0.06 for row in steps), steps


@pytest.mark.parametrize(
    ("preset", "tp", "pp"),
    [("llama2-7b", 1, 1), ("llama2-70b", 4, 2), ("gpt2-345m", 2, 1), ("qwen3-30b-a3b", 2, 1), ("mixtral-8x7b", 1, 4)],
)
def test_a_step_reads_the_weights_of_its_rank(preset: str, tp: int, pp: int) -> None:
    """All but norms, biases, and embeddings that are not the head."""
    model = replace(served(preset, "h100"), tp=tp, pp=pp)
    table = model.options.hidden * model.options.vocab * 2 / tp
    for stage, size in enumerate(weight_bytes(model.options, 2, tp=tp, pp=pp)):
        looked_up = table if stage == 0 and not (pp == 1 and model.options.tied) else 0
        positions = model.options.hidden * 1024 * 2 if preset.startswith("gpt") else 0
        assert model.weight_bytes(stage) == pytest.approx(size - looked_up - positions, rel=2e-3)


def test_what_limits_a_step() -> None:
    seven = served("llama2-7b", "h100")
    (one,), (fp8,) = seven.step(ONE), replace(seven, fp8_weights=True).step(ONE)
    assert one.limit == "bandwidth" and one.bandwidth == pytest.approx(seven.weight_bytes(0) / seven.rate, rel=0.02)
    assert 0.5 < fp8.all / one.all < 0.75
    (prompt,) = seven.step(step_size([2048], [2048], 2048, 1))
    assert prompt.limit == "compute"
    (later,) = seven.step(step_size([2048], [4096], 2048, 1))
    assert later.compute > prompt.compute, "the second half of a prompt attends to the first"
    (long,) = seven.step(StepSize(1, 1, (4096,), ()))
    assert long.bandwidth - one.bandwidth == pytest.approx(4095 * (1 << 19) / seven.rate)
    (ranks,) = served("llama2-7b", "h100", tp=2).step(ONE)
    assert ranks.exchange > 0 and one.exchange == 0 and ranks.bandwidth < 0.6 * one.bandwidth


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    mixture = served("mixtral-8x7b", "h100", layers=8)
    (one,), (four,), (many,) = (mixture.step(StepSize(n, n, (1,) * n, ())) for n in (1, 4, 64))
    assert 2 < four.bandwidth / one.bandwidth < 3, "5.5 experts of 8, where one token reads 2"
    assert 3 < many.bandwidth / one.bandwidth < 4


def test_a_window_bounds_the_keys() -> None:
    model = model_alone(compose("mistral-7b"))
    window = model.window
    assert window is not None
    there, beyond = (
        ServingTimes(model, "bf16", hardware("h100")).step(StepSize(1, 1, (keys,), ())) for keys in (window, 2 * window)
    )
    assert there == beyond


def test_more_requests_are_more_tokens_and_later_ones() -> None:
    seven = served("llama2-7b", "h100")
    few, many = (simulated(seven, LIMITS, Load(0, requests, 128, 8)) for requests in (4, 32))
    assert many.row.tokens_per_second > 2 * few.row.tokens_per_second
    assert many.row.first > few.row.first and many.row.between > few.row.between
    assert few.seconds.host == pytest.approx(seven.host(1), rel=0.1), "only the first step waits for the host"


def test_a_small_model_waits_for_its_host() -> None:
    small = {"layers": 2, "hidden": 128, "heads": 4, "vocab": 1000}
    model = ServingTimes(model_alone(compose("gpt2-345m", flags=small)), "bf16", hardware("h100"))
    found = simulated(model, LIMITS, Load(0, 1, 16, 16))
    assert found.seconds.limit == "host" and "host-bound" in found.limit
    fast = replace(model, device=replace(model.device, host=1.0))
    assert simulated(fast, LIMITS, Load(0, 1, 16, 16)).seconds.limit != "host"


WORDS = ["memory-estimate", "--model", "llama2-7b", "--bf16", "--max-requests", "4", "--prompt-tokens", "64"]


def test_the_command_says_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--new-tokens", "8", "--serve", "--gpu", "h100"]
    assert cli.main([*words, "--rate", "1"]) == 0
    text = capsys.readouterr().out
    assert cli.main([*words, "--rate", "1", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["speed"]
    assert (
        f"one request: {1e3 * found['per_token']:.2f} ms per token after 64 prompt tokens; limited by bandwidth" in text
    )
    assert f"4 requests at once, 64 + 8 tokens each: {found['at_once']['tokens_per_second']:,.0f} tokens/s" in text
    assert f"1 requests a second: {found['at_rate']['tokens_per_second']:,.0f} tokens/s" in text
    assert list(found["first"]) == ["64", "128", "512", "2048"] and "(2,048)" in text
    assert found["alone"]["limit"] == "bandwidth" and sum(found["alone"]["limits"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve"], "--prompt-tokens 64: needs --gpu, whose speed is predicted"),
        (["--gpu", "h100"], "--max-requests 4: needs --serve"),
        (["--serve", "--gpu", "h100", "--new-tokens", "4090"], "--prompt-tokens 64, --new-tokens 4090: tokens 4090"),
        (["--serve", "--gpu", "h100", "--rate", "0"], "--rate 0: must be above 0, to 1e6"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err
