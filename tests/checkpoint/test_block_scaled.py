"""fp8 with one scale per block on disk: there and back, as transformers reads it, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.cli import main
from mega.core.checkpoint.forms import huggingface
from mega.core.checkpoint.forms.block_scaled import SCALE, Bounds, Dequantised, Quantised, dequantised
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.families.mixtures import unstacked
from mega.core.checkpoint.forms.foreign import TorchSource
from mega.core.checkpoint.forms.read_back import read_back
from mega.core.checkpoint.own import container
from mega.core.checkpoint.own.pieces import Box, CheckpointError, whole_box
from mega.core.ops.block_scales import WEIGHT_BLOCK, quantise
from tests.support import hub_families as hub
from tests.support.ranks import random

FP8 = torch.float8_e4m3fn
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
NARROW = {key: value for key, value in WIDE.items() if key != "head_dim"}
CASES: dict[str, dict[str, Any]] = {
    "llama-mlp-bias": WIDE,
    "mistral": WIDE,
    "qwen2-windows": {**WIDE, "tie_word_embeddings": True},
    "qwen3-windows": {**WIDE, "layer_types": None},
    "phi3-partial": NARROW,
    "pythia": NARROW,
    "mixtral": WIDE,
    "qwen2-moe": {
        **WIDE,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "layer_types": ["full_attention"] * 2,
    },
    "qwen3-moe": {**WIDE, "moe_intermediate_size": 128},
}
"""Families whose sizes are multiples of 128."""


def exported(folder: Path, case: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A random model, imported and written with blocks: folder / fp8, of folder / run."""
    hub.saved(folder / "hf", case, dtype, std=0.05, **{**CASES.get(case, {}), **changes})
    convert(folder / "hf", folder / "run")
    convert(folder / "run", folder / "fp8", "hf", outtype="fp8")
    return folder / "fp8"


def blocks_times_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a folder by plain arithmetic, apart from this project's."""
    whole = {}
    for name, tensor in tensors.items():
        if name + SCALE in tensors:
            scale = torch.kron(tensors[name + SCALE], torch.ones(128, 128))[: tensor.shape[0], : tensor.shape[1]]
            whole[name] = (tensor.float() * scale).bfloat16()
        elif not name.endswith(SCALE):
            whole[name] = tensor
    return whole


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_written(tmp_path: Path, case: str) -> None:
    """Every linear of the layers is in blocks, and nothing else; the three readers agree bit for bit."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = exported(tmp_path, case)
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert {key: config[key] for key in ("quant_method", "activation_scheme", "weight_block_size")} == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    narrow = {name for name, tensor in stored.items() if tensor.dtype == FP8}
    assert {name + SCALE for name in narrow} == {name for name in stored if name.endswith(SCALE)}
    for name in narrow:
        assert stored[name + SCALE].shape == tuple(-(-size // 128) for size in stored[name].shape)
        assert stored[name + SCALE].dtype == torch.float32
    expected = blocks_times_scales(stored)
    save_file(expected, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    plain, blocks = (
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16)
        for each in (tmp_path / "hf", folder)
    )
    linears, heads = {n for n, m in plain.named_modules() if type(m) is torch.nn.Linear}, {"lm_head", "embed_out"}
    kept = set(config["modules_to_not_convert"])
    assert kept & heads and linears - kept - heads == {
        n.removesuffix(".weight") for n in narrow if ".experts." not in n
    }
    found = blocks.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, found[name]), name
    opened, plainly = (hub.wholes(hub.opened(each)) for each in (folder, tmp_path / "hf"))
    assert all(torch.equal(tensor, plainly[name]) for name, tensor in opened.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_and_back_is_byte_identical(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of sizes that blocks of 128 do not divide, written in small parts and in several files. Both ways verify."""
    changes = {"hidden_size": 200, "intermediate_size": 300, "head_dim": 50, "num_hidden_layers": 2}
    folder = exported(tmp_path, "mistral", dtype, **changes)
    line = ["convert-llama", "--verify", "--load-dir"]
    assert main([*line, str(folder), "--save-dir", str(tmp_path / "again")]) == 0
    assert "largest difference of a logit" in capsys.readouterr().out
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 200_000)
    monkeypatch.setattr(container, "BLOCK", 3_000)
    target = tmp_path / "back"
    command = [*line, str(tmp_path / "again"), "--save-dir", str(target), "--to", "hf", "--outtype", "fp8"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "are bit for bit those" in printed.out and "apart from" not in printed.out
    assert "are not multiples of 128" in printed.err
    back: dict[str, torch.Tensor] = {}
    for path in sorted(target.glob("model-*.safetensors")):
        back |= load_file(path)
    assert len(list(target.glob("model-*.safetensors"))) > 2
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor.view(torch.uint8), back[name].view(torch.uint8)), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((target / name).read_text())


def test_every_element_is_within_half_a_step() -> None:
    """Of a matrix of many magnitudes; parts of it are those of the whole."""
    wide = (random(300, 200, seed=1) * torch.logspace(-8, 3, 300).unsqueeze(1)).bfloat16()
    wide[128:256, :128] = 0
    stored = Quantised(TorchSource({"w": wide}), ["w"])
    read = {name: stored.read(name, whole_box(shape)) for name, (shape, _) in stored.tensors.items()}
    for name, box in (("w", Box((100, 3), (150, 190))), ("w" + SCALE, Box((1, 1), (2, 1)))):
        assert torch.equal(stored.read(name, box).float(), read[name].float()[box.index])
    source = Dequantised(TorchSource(read), WEIGHT_BLOCK)
    for box in (whole_box((300, 200)), Box((100, 3), (150, 190))):
        error = (source.read("w", box).double() - wide[box.index].double()).abs()
        bound = Bounds(source).read("w", box)
        assert (error <= bound).all() and (error > 0.9 * bound).any()
        assert (bound <= read["w" + SCALE].max() * 18).all()
    assert (
        float((source.read("w", whole_box((300, 200))).double() - wide.double()).norm() / wide.double().norm()) < 0.03
    )


def test_the_error_is_said_and_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(tmp_path, "mistral")
    report = read_back(tmp_path / "run", folder)
    assert report.quantised == 14 and 0.02 < report.error < 0.03
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    changed = dict(stored)
    changed[name] = stored[name].clone()
    changed[name].view(torch.uint8)[5, 7] ^= 0x02
    save_file(changed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight: is further from .* than its precision allows"):
        read_back(tmp_path / "run", folder)
    with pytest.raises(CheckpointError, match=r"up_proj.weight: is not what"):  # what is read has no such freedom
        convert(folder, tmp_path / "imported")
        save_file(stored, folder / "model.safetensors")
        read_back(folder, tmp_path / "imported")


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state[name]

    return change


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda state: state.update({name: value(state[name])})


W = "model.layers.0.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "missing scale": (_without(W + SCALE), "q_proj.weight_scale_inv: is missing; must be "),
    "missing weight": (_without(W), "q_proj.weight_scale_inv: is there without "),
    "wide weight": (_set(W, lambda t: t.bfloat16()), "q_proj.weight_scale_inv: is there, but .* is torch.bfloat16"),
    "shape": (_set(W + SCALE, lambda t: t[:1].clone()), r"q_proj.weight_scale_inv: has shape \(1, "),
    "dtype": (_set(W + SCALE, lambda t: t.to(torch.int32)), "q_proj.weight_scale_inv: is torch.int32"),
    "nan": (_set(W + SCALE, lambda t: t * float("nan")), "q_proj.weight_scale_inv: holds a scale that is NaN"),
    "negative": (_set(W + SCALE, lambda t: -t), "q_proj.weight_scale_inv: holds a scale that is NaN"),
    "zero": (_set(W + SCALE, lambda t: t * 0), "q_proj.weight_scale_inv: holds a scale that is NaN"),
}


def test_damage_is_named(tmp_path: Path) -> None:
    folder = exported(tmp_path, "mistral")
    stored = load_file(folder / "model.safetensors")
    for change, message in DAMAGE.values():
        state = dict(stored)
        change(state)
        save_file(state, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            hub.wholes(hub.opened(folder))
        assert main(["convert-llama", "--load-dir", str(folder), "--save-dir", str(tmp_path / "no")]) == 2
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "compressed-tensors", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_quantisation_is_refused(quantization: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="only fp8 with weight_block_size is read"):
        dequantised(TorchSource({"w": random(4, 4, seed=0)}), quantization, "config.json")


def test_stacked_experts_are_read(tmp_path: Path) -> None:
    """As transformers keeps them in memory: the matrices and the scales of one layer's experts in one tensor each."""
    name, experts = "model.layers.0.mlp.experts.down_proj", random(3, 200, 256, seed=4).bfloat16()
    narrow, scale = quantise(experts, WEIGHT_BLOCK)
    for each in range(3):
        alone, its_scale = quantise(experts[each], WEIGHT_BLOCK)
        assert torch.equal(alone.float(), narrow[each].float()) and torch.equal(its_scale, scale[each])
    source = unstacked(Dequantised(TorchSource({name: narrow, name + SCALE: scale}), WEIGHT_BLOCK))
    one = source.read("model.layers.0.mlp.experts.1.down_proj.weight", Box((5, 100), (190, 130)))
    state = {"w": narrow[1], "w" + SCALE: scale[1]}
    assert torch.equal(one, Dequantised(TorchSource(state), WEIGHT_BLOCK).read("w", Box((5, 100), (190, 130))))


def test_what_has_no_such_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.saved(tmp_path / "hf", "gpt2", torch.float32)
    convert(tmp_path / "hf", tmp_path / "run")
    line = ["convert-llama", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "x"), "--to"]
    for to, outtype, words in (
        ("hf", "fp8", "stores transformer.h.0.attn.c_attn.weight transposed"),
        ("hf", "bf16", "--outtype bf16: a Hugging Face folder has the dtype of the weights, or fp8"),
        ("gguf", "fp8", "--outtype fp8: llama.cpp has no such type; valid: f32"),
        ("meta", "fp8", "only GGUF files and Hugging Face folders have a type of their own"),
    ):
        assert main([*line, to, "--outtype", outtype]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
