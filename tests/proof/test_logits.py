"""Converted weights in our own model: the logits of transformers, and the text of a trained model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from mega.core.proof.logits import compare_logits, logits, their_logits
from tests.support import hub_families as hub
from tests.support.hugging_face import FAMILIES, hf_folder
from tests.support.shared import shared


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(tmp_path: Path, family: str) -> None:
    source = hf_folder(tmp_path / "hf", family)
    convert(source, tmp_path / "run", layout=Layout(2, 2))
    found = compare_logits(source, tmp_path / "run")
    assert found.largest < 1e-5 * max(1.0, found.scale) and found.same == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_their_model_run_block_by_block_is_their_model(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = hf_folder(tmp_path / "hf", family, **({"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}))
    ids = torch.randint(0, 102, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits
    assert torch.equal(their_logits(source, ids), whole)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("full", [0, 1, 3])
def test_sliding_layers_after_full_ones(tmp_path: Path, family: str, full: int) -> None:
    """`full` blocks without a window, then those with one."""
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": full}
    source = hf_folder(tmp_path / "hf", family, num_hidden_layers=3, **window)
    convert(source, tmp_path / "run")
    found = compare_logits(source, tmp_path / "run")
    assert found.largest < 4e-5 * max(1.0, found.scale) and found.same == 1.0


def test_a_wrong_weight_shows(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    other = hf_folder(tmp_path / "other", "llama3", rope_theta=100.0)
    convert(source, tmp_path / "run")
    assert compare_logits(other, tmp_path / "run").largest > 1e-3


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("large", 0, ""),
        ("wrong", 1, "do not compute the same"),
        ("nan", 2, "model.layers.1.mlp.up_proj.weight: holds a NaN or an infinity"),
    ],
)
def test_verify_follows_the_size_of_logits_and_reports_what_failed(
    tmp_path: Path,
    change: str,
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    state = load_file(source / "model.safetensors")
    if change == "large":  # a power of two: the same roundings, only larger, and beyond a bound that is not relative
        state["lm_head.weight"] *= 2.0**10
    if change == "nan":
        state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    if change == "wrong":
        read = HubFamily.model_from_config
        monkeypatch.setattr(HubFamily, "model_from_config", lambda *given: replace(read(*given), rope_base=100.0))
    command = ["convert-llama", "--load-dir", str(source), "--save-dir", str(tmp_path / "run"), "--verify"]
    assert main(command) == code
    printed = capsys.readouterr().err
    assert words in printed and ("mega: --verify: " in printed) == (code == 1)
    if change == "large":
        assert compare_logits(source, tmp_path / "run").largest > 1e-4


def test_the_trained_model_is_compared(tmp_path: Path) -> None:
    source = shared("stories260K_hf/config.json").parent
    convert(source, tmp_path / "run")
    checkpoint = locate(tmp_path / "run")
    for case in json.loads((source / "expected.json").read_text())["cases"]:
        prompt, expected = case["prompt_ids"], case["greedy_ids"]
        found = logits(checkpoint, torch.tensor([prompt + expected]))[0]
        wanted = torch.tensor(case["last_prompt_position_logits"])
        assert (found[len(prompt) - 1] - wanted).abs().max() < 1e-4
        assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == expected


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
def test_logits_of_mixtures(tmp_path: Path, case: str, stacked: bool) -> None:
    """transformers has a layer's experts as stacks and Mixtral's router under another name than most folders do."""
    model = hub.theirs(case).float()
    model.save_pretrained(tmp_path / "hf", save_original_format=not stacked)
    command = ["convert-llama", "--verify", "--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "run")]
    assert main(command) == 0
    ids = torch.randint(0, hub.VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "hf", ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    back = ["convert-llama", "--verify", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "back")]
    assert main(back) == 0
    backbone = {name.removeprefix("model."): one for name, one in load_file(tmp_path / "hf/model.safetensors").items()}
    headless = {name: one for name, one in backbone.items() if name != "lm_head.weight"}
    save_file(headless, tmp_path / "hf/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert main([*command[:-1], str(tmp_path / "headless")]) == 0


def test_what_transformers_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key that mega does not read."""
    hub.theirs("mixtral").save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "router_aux_loss_coef": "much"}))
    command = ["convert-llama", "--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "run"), "--verify"]
    assert main(command) == 2
    *before, line = capsys.readouterr().err.splitlines()  # transformers shows its progress while it saves
    assert line.startswith("mega: --verify: transformers does not open ") and "router_aux_loss_coef" in line
    assert not any("Traceback" in each for each in before)


def test_a_folder_of_an_unknown_family_is_refused_by_its_type(tmp_path: Path) -> None:
    """transformers has more families than mega, which must know how the folder names the parameters."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zebra"}))
    with pytest.raises(CheckpointError, match=r"config\.json: model_type 'zebra' \(valid: "):
        their_logits(tmp_path, torch.zeros(1, 2, dtype=torch.int64))
