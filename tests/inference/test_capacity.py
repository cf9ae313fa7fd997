"""What fits is counted before a start as in it: bytes of stages that are built, limits of an engine that runs."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mega import cli
from mega.core.architecture import placement
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference import capacity
from mega.core.inference.capacity import cache_blocks, even_layers, expected, weight_bytes
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import engine_on
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, local_parameters
from tests.inference.test_engine import LLAMA, SMALL, made
from tests.support.core_forms import run_of


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


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = (each.untyped_storage() for each in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@dataclasses.dataclass(frozen=True)
class Card(Device):
    """A device of `memory` bytes whose allocator counts tensors, as that of a GPU does. others: tensors of other tests,
    which are not counted."""

    memory: int = 0
    others: list[torch.Tensor] = dataclasses.field(default_factory=live_tensors)
    is_cuda = True

    def resident(self) -> int:
        return storage_bytes(live_tensors()) - storage_bytes(self.others)

    def room(self) -> int:
        return self.memory

    def release(self) -> None:
        pass


WIDE = dataclasses.replace(LLAMA, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=256, positions=512)


@pytest.fixture
def share_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capacity.SHARES, "cpu", capacity.SHARES["cuda"])
    gc.collect()
    gc.freeze()  # what is alive is not counted, and no search for tensors walks it


def on_card(memory: int, options: EngineOptions, *, fp8_weights: bool = False) -> Any:
    """An engine of WIDE in bf16 on a card."""
    card = Card(torch.device("cpu"), "gloo", memory)
    stage = made(WIDE, torch.bfloat16, fp8_weights=fp8_weights)
    return engine_on(stage, Mesh.at(0), card, dataclasses.replace(options, cuda_graph=False))


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_the_cache_has_the_memory_that_weights_in_fp8_leave(share_of_a_card: None, fp8_weights: bool) -> None:
    """As many blocks as the estimate says: none of the wide weights' memory lies idle."""
    memory = weight_bytes(WIDE, 2)[0] + 2_000_000
    options = EngineOptions(max_requests=64, fp8_weights=fp8_weights)
    engine = on_card(memory, options, fp8_weights=fp8_weights)
    found = expected(WIDE, 2, memory, "cuda", tp=1, pp=1, requests=64, fp8_weights=fp8_weights)
    assert found.limits.cache < 64 * 512, "as many as fit"
    assert abs(engine.limits.cache - found.limits.cache) <= 16
    if fp8_weights:
        wide = expected(WIDE, 2, memory, "cuda", tp=1, pp=1, requests=64)
        assert engine.limits.cache > 1.1 * wide.limits.cache


@pytest.mark.parametrize("positions", [512, 16])
def test_a_draft_model_and_its_cache_are_counted(share_of_a_card: None, tmp_path: Path, positions: int) -> None:
    """Both caches fill the share of what both models leave, also if the small model's sequences are short."""
    small = dataclasses.replace(WIDE, layers=1, positions=positions)
    memory = weight_bytes(WIDE, 2)[0] + weight_bytes(small, 2)[0] + 4_000_000
    options = EngineOptions(max_requests=64, speculate=str(run_of(tmp_path, small, torch.bfloat16)))
    engine = on_card(memory, options)
    found = expected(WIDE, 2, memory, "cuda", tp=1, pp=1, requests=64, draft=small)
    assert found.limits.cache < 64 * 512, "as many as fit"
    assert abs(engine.limits.cache - found.limits.cache) <= 16
    assert engine.draft_bytes[0] == found.draft_weights == weight_bytes(small, 2)[0]
    assert engine.draft_bytes[1] == pytest.approx(found.draft_cache, abs=16 * 256)
    pools = engine._worker.cache.pool.nbytes + engine.draft_bytes[1]
    left = 0.85 * (memory - found.weights - found.draft_weights)
    assert 0.98 * left < pools < left + 16 * 512, "with the block of the model's cache for padding"


def test_the_memory_of_a_draft_model_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = run_of(tmp_path / "run", dataclasses.replace(WIDE, vocab=32000), torch.bfloat16)
    line = f"memory-estimate --serve --model llama2-7b --bf16 --gpu h200 --speculate {small}".split()
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert "a rank holds 12.55 GiB of weights" in shown
    assert re.search(r"rank 0 also holds the draft model: 0\.02 GiB of weights and 0\.03 GiB of keys and values", shown)
    other = run_of(tmp_path / "other", WIDE, torch.bfloat16)
    assert cli.main([*line[:-1], str(other)]) == 2
    assert f"--speculate {other}: has 61 tokens, the model 32000" in capsys.readouterr().err


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
