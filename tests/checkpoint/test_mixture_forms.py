"""Mixtures of experts in Hugging Face's form: golden files of transformers 5.23, stacked experts, and what is refused.

Random models of every family against transformers itself are in test_hub_families.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mega.core.architecture import units
from mega.core.batch import DecoderBatch
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.families.decoders import BY_TYPE, config_from_model, model_from_config
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.model.decoder import DecoderStage
from mega.core.model.experts import ExpertLayer
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, weights
from tests.support import hub_families as hub
from tests.support.ranks import CPU
from tests.support.shared import shared

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def stage_at(folder: Path) -> DecoderStage:
    opened = hub.opened(folder)
    stage = DecoderStage(opened.model, units(opened.model), ParameterFactory({}, torch.float64, CPU), ALONE)
    wholes = hub.wholes(opened)
    with torch.no_grad():
        for weight in weights(stage):
            weight.zero_()
            for segment in weight.segments:
                segment.real(weight).copy_(wholes.pop(segment.shard.name))
    assert not wholes
    return stage.eval()


def routed(stage: DecoderStage) -> list[torch.Tensor]:
    """Router logits of each layer of the passes that follow, in order."""
    found: list[torch.Tensor] = []
    for layer in (module for module in stage.modules() if isinstance(module, ExpertLayer)):
        gate = layer.router.gate
        layer.router.register_forward_pre_hook(lambda _, given, gate=gate: found.append(F.linear(given[0], gate)))
    return found


def batch_of(ids: torch.Tensor) -> DecoderBatch:
    rows, length = ids.shape
    positions = torch.arange(length).expand(rows, length)
    return DecoderBatch(ids, ids.roll(-1, 1), torch.ones(rows, length), positions, torch.arange(rows))


def balance(logits: list[torch.Tensor], chosen: int) -> torch.Tensor:
    """transformers' balance loss: of all layers' rows together, not divided by the number of chosen experts."""
    shares = torch.cat(logits).softmax(-1)
    picked = torch.zeros_like(shares).scatter_(1, shares.topk(chosen).indices, 1.0)
    return shares.shape[1] * (picked.mean(0) * shares.mean(0)).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits_routers_and_loss(family: str) -> None:
    folder = shared(f"golden/moe/{family}")
    expected, said = load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())
    stage = stage_at(folder)
    routers, ids = routed(stage), expected["input_ids"]
    with torch.no_grad():
        logits = stage(batch_of(ids), outputs=True).outputs
    assert logits is not None
    logits = logits[..., : expected["logits"].shape[-1]]
    real = expected["attention_mask"].bool()
    torch.testing.assert_close(logits[real].float(), expected["logits"][real], rtol=1e-5, atol=1e-5)
    for number, router in enumerate(routers):
        own = router.reshape(*ids.shape, -1)[real].float()
        theirs = expected[f"router_logits.{number}"].reshape(*ids.shape, -1)[real]
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
    config = json.loads((folder / "config.json").read_text())
    text = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    balanced = balance([router.flatten(0, -2) for router in routers], config["num_experts_per_tok"])
    assert float(balanced) == pytest.approx(said["aux_loss_no_mask"], abs=1e-5)
    assert float(text + config["router_aux_loss_coef"] * balanced) == pytest.approx(said["loss_no_mask"], abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_folder_comes_back(tmp_path: Path, family: str) -> None:
    """Cut for two tensor ranks and two stages in between; with stacked experts it is the same model."""
    folder = shared(f"golden/moe/{family}")
    convert(folder, tmp_path / "run", layout=Layout(2, 2))
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    stack(folder, tmp_path / "stacked")
    stacked, alone = (hub.wholes(hub.opened(each)) for each in (tmp_path / "stacked", folder))
    assert stacked.keys() == alone.keys()
    assert all(torch.equal(stacked[name], alone[name]) for name in alone)


def stack(folder: Path, to: Path) -> dict[str, torch.Tensor]:
    """A golden folder as transformers 5 has its tensors in memory."""
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    stored = {
        name.replace("block_sparse_moe", "mlp")
        .replace(".w1.", ".gate_proj.")
        .replace(".w3.", ".up_proj.")
        .replace(".w2.", ".down_proj."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    found = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for stem in {name.partition(".experts.")[0] + ".experts." for name in stored if ".experts." in name}:
        count = sum(name.startswith(stem) for name in stored) // 3

        def each(which: str, stem: str = stem, count: int = count) -> torch.Tensor:
            return torch.stack([stored[f"{stem}{number}.{which}_proj.weight"] for number in range(count)])

        found[f"{stem}gate_up_proj"] = torch.cat([each("gate"), each("up")], 1)
        found[f"{stem}down_proj"] = each("down")
    save_file(found, to / "model.safetensors")
    return found


def test_transformers_reads_what_is_stacked(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared("golden/moe/mixtral")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = stack(folder, tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def edited(tmp_path: Path, change: Any, config: dict[str, Any] | None = None, family: str = "mixtral") -> Path:
    """A golden folder with other tensors or another config.json."""
    folder = shared(f"golden/moe/{family}")
    (to := tmp_path / "edited").mkdir(parents=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**said, **(config or {})}))
    return to


MATRIX = "model.layers.1.block_sparse_moe.experts.3.w3.weight"


def test_an_expert_that_is_missing_or_more_is_refused(tmp_path: Path) -> None:
    gone = edited(tmp_path / "gone", lambda tensors: tensors.pop(MATRIX))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3\.weight: is missing"):
        convert(gone, tmp_path / "run")
    more = edited(tmp_path / "more", lambda t: t.update({MATRIX.replace("3.w3", "4.w3"): t[MATRIX].clone()}))
    with pytest.raises(CheckpointError, match=r"experts\.4\.w3\.weight.*: nothing is made of it"):
        convert(more, tmp_path / "run")


def test_a_router_of_another_size_is_refused(tmp_path: Path) -> None:
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    folder = edited(tmp_path, lambda tensors: tensors.update({gate: torch.zeros(6, 32)}))
    with pytest.raises(CheckpointError, match=r"gate\.weight \(6, 32\), the model implies \(4, 32\)"):
        convert(folder, tmp_path / "run")


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder = shared("golden/moe/qwen3_moe")
    tensors = stack(folder, tmp_path / "stacked")
    twice = "model.layers.0.mlp.experts.2.down_proj.weight"
    save_file({**tensors, twice: torch.zeros(32, 24)}, tmp_path / "stacked" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{twice}: is there twice, alone and in .*experts\.down_proj"):
        convert(tmp_path / "stacked", tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts_per_tok": 5}, r"experts_chosen: 5 must be at most --experts 4"),
        ({"num_local_experts": 10**9}, r"tensors of .* elements do not hold its 1,000,000,000 experts"),
    ],
)
def test_numbers_of_experts_that_are_impossible(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """Refused before names of a thousand million experts are listed."""
    folder = edited(tmp_path, lambda tensors: None, config)
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "run")


def test_a_stack_of_countless_empty_experts(tmp_path: Path) -> None:
    tensors = stack(shared("golden/moe/qwen3_moe"), tmp_path / "stacked")
    empty = {"model.layers.0.mlp.experts.down_proj": torch.zeros(10**9, 0, 24)}
    save_file({**tensors, **empty}, tmp_path / "stacked" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight: is missing"):
        convert(tmp_path / "stacked", tmp_path / "run")


@pytest.mark.parametrize(("family", "words"), [("deepseek_v3", r"latent attention \(MLA\)"), ("gpt_oss", "sinks")])
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, family: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"model_type '{family}' .*{words}"):
        convert(shared(f"golden/moe/{family}"), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({"num_local_experts": 0}, "num_local_experts 0"),
        ({"num_shared_experts": 1}, "num_shared_experts 1: is not a known key"),
    ],
)
def test_a_key_of_a_mixture_that_is_not_understood(changes: dict[str, Any], words: str) -> None:
    config = json.loads((shared("golden/moe/mixtral") / "config.json").read_text())
    with pytest.raises(CheckpointError, match=words):
        model_from_config({**config, **changes}, "config.json")


SIZES = {
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 9},
    **{"max_position_embeddings": 16},
}


@pytest.mark.parametrize("family", ["olmoe", "olmo2"])
def test_a_clip_of_projections_is_refused_by_what_it_does(family: str) -> None:
    with pytest.raises(CheckpointError, match=r"clip_qkv 8.0: clips queries, keys and values.*valid: null"):
        model_from_config({"model_type": family, "clip_qkv": 8.0, **SIZES}, "config.json")


def test_what_only_training_reads_is_not_written() -> None:
    """A router's losses, jitter and capacity change nothing of what the weights compute; its scale does."""
    from dataclasses import replace

    model = model_from_config(json.loads((shared("golden/moe/mixtral") / "config.json").read_text()), "config.json")
    trained = replace(model, balance_loss=(0.01,), z_loss=1e-3, router_jitter=0.1, capacity_factor=1.0)
    assert config_from_model(trained, "float32") == config_from_model(model, "float32")
    for change, words in (
        ({"router_scale": 2.0}, "router_scale 2.0: Hugging Face's Mixtral has only 1.0"),
        ({"router_score": "sigmoid"}, "router_score sigmoid"),
        ({"shared_ffn": 8}, "shared_gate False: Hugging Face's Qwen2-MoE has only True"),
        ({"router_groups": 2, "router_groups_chosen": 1}, "router_groups 2"),
    ):
        with pytest.raises(CheckpointError, match=words):
            config_from_model(replace(model, **change), "float32")


def test_dense_layers_have_one_canonical_form() -> None:
    """Those that no option of Qwen3-MoE names are listed."""
    from dataclasses import replace

    config = json.loads((shared("golden/moe/qwen3_moe") / "config.json").read_text())
    model = model_from_config({**config, "num_hidden_layers": 6}, "config.json")
    written = BY_TYPE["qwen3_moe"].config_from_model(replace(model, experts_from=2), "float32")
    assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, [0, 1])
    every = model_from_config({**config, "decoder_sparse_step": 2}, "config.json")
    assert (every.experts_from, every.experts_every) == (1, 2)
