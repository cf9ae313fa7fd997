"""What fits is counted before a start as in it: bytes of stages that are built, limits of an engine that runs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from mega import cli
from mega.core.architecture import placement
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.capacity import cache_blocks, even_layers, expected, weight_bytes
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import engine_on
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, local_parameters
from tests.inference.test_engine import LLAMA, SMALL, made


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("model", [SMALL, dataclasses.replace(LLAMA, layers=5)], ids=["tied", "apart"])
def test_weights_are_those_of_the_stages(model: ModelConfig, tp: int, pp: int) -> None:
    layers = even_layers(model.layers or 0, pp)
    where = placement(model, pp, 1, layers)
    built = []
    for stage in range(pp):
        units = [unit for unit, (at, _) in where.items() if at == stage]
        factory = ParameterFactory({"tp": (0, tp)}, torch.bfloat16, torch.device("meta"))
        region = Region(Axis("tp", tuple(range(tp)), 0), sequence=False)
        built.append(2 * local_parameters(DecoderStage(model, units, factory, region)))
    assert weight_bytes(model, 2, tp=tp, pp=pp) == built


@pytest.mark.parametrize("tokens", [None, 100])
def test_limits_are_those_of_the_engine(tokens: int | None) -> None:
    cpu, options = Device.choose("cpu"), EngineOptions(max_requests=5, cache_tokens=tokens)
    engine = engine_on(made(LLAMA), Mesh.at(0), cpu, options)
    found = expected(LLAMA, 4, cpu.room(), "cpu", tp=1, pp=1, requests=5, cache_tokens=tokens)
    assert engine is not None and found.limits == engine.limits
    assert found.cache == engine._worker.cache.pool.numel() * 4
    fit = 5 if tokens is None else 1
    assert f"5 requests at once, {engine.limits.cache} tokens in the cache: {fit} requests of 64" in found.lines()[0]


def test_what_is_asked_for_is_not_cut() -> None:
    assert cache_blocks(100, 7, 16, asked=True) == 8 and cache_blocks(200, 7, 16, asked=False) == 8
    with pytest.raises(ValueError, match="--cache-tokens 200: at most 112 fit into memory"):
        cache_blocks(200, 7, 16, asked=True)
    with pytest.raises(ValueError, match="not even one block"):
        cache_blocks(200, 0, 16, asked=False)
    with pytest.raises(ValueError, match="of weights a rank do not fit"):
        expected(LLAMA, 4, 1000, "cuda", tp=1, pp=1, requests=1)


def test_of_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    line = "memory-estimate --serve --model llama2-7b --bf16 --gpu h200 --tp 2 --max-length 640".split()
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert "64 requests at once, 262144 tokens in the cache: 64 requests of 640 tokens each, the longest" in shown
    assert "a rank holds 6.28 GiB of weights and 64.00 GiB of keys and values" in shown
    assert cli.main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limits"]["cache"] == 262144
    assert cli.main([*line, "--fp8-weights"]) == 0
    shown = capsys.readouterr().out
    assert "bf16, weights in fp8 on 2" in shown and "a rank holds 3.26 GiB of weights and 64.00 GiB" in shown
    for more, text in ((["--fit", "8xh200"], "--fit 8xh200: excludes --serve"), (["--tp", "3"], "--tp 3: ")):
        assert cli.main([*line, *more]) == 2
        assert text in capsys.readouterr().err
    assert cli.main([*line, "--heads", "0"]) == 2
    assert "--heads 0: must be at least 1" in capsys.readouterr().err
    assert cli.main(["memory-estimate", "--model", "tiny-gpt", "--max-length", "5"]) == 2
    assert re.search("--max-length 5: needs --serve", capsys.readouterr().err)
    assert cli.main(["memory-estimate", "--model", "tiny-gpt", "--fp8-weights"]) == 2
    assert re.search("--fp8-weights: needs --serve", capsys.readouterr().err)


@pytest.mark.parametrize("model", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_weights_in_fp8_are_those_of_a_stage(model: ModelConfig) -> None:
    """Each matrix of a block takes a byte an element and four an output in place of two bytes an element."""
    matrices = [weight for weight in made(model, torch.bfloat16).layers.parameters() if weight.dim() == 2]
    less = sum(weight.numel() - 4 * len(weight) for weight in matrices)
    assert less > 0 and weight_bytes(model, 2, fp8_weights=True) == [weight_bytes(model, 2)[0] - less]
