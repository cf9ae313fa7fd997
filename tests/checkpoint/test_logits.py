"""Converted weights in our own model: the logits of transformers, and the text of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mega.core.checkpoint.convert import convert
from mega.core.checkpoint.layout import Layout
from mega.core.checkpoint.store import locate
from mega.core.inference.agreement import agreement, logits, their_logits
from tests.support.hugging_face import FAMILIES, hf_folder
from tests.support.shared import shared


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(tmp_path: Path, family: str) -> None:
    source = hf_folder(tmp_path / "hf", family)
    convert(source, tmp_path / "run", layout=Layout(2, 2))
    found = agreement(source, tmp_path / "run")
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
def test_sliding_layers_behind_full_ones(tmp_path: Path, family: str, full: int) -> None:
    """`full` blocks without a window, then those with one; a model of ours ends with the window."""
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": full}
    source = hf_folder(tmp_path / "hf", family, num_hidden_layers=3, **window)
    convert(source, tmp_path / "run")
    found = agreement(source, tmp_path / "run")
    assert found.largest < 1e-5 * max(1.0, found.scale) and found.same == 1.0


def test_a_wrong_weight_shows(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    other = hf_folder(tmp_path / "other", "llama3", rope_theta=100.0)
    convert(source, tmp_path / "run")
    assert agreement(other, tmp_path / "run").largest > 1e-3


def test_the_trained_model_tells_its_story(tmp_path: Path) -> None:
    source = shared("stories260K_hf/config.json").parent
    convert(source, tmp_path / "run")
    checkpoint = locate(tmp_path / "run")
    for case in json.loads((source / "expected.json").read_text())["cases"]:
        prompt, expected = case["prompt_ids"], case["greedy_ids"]
        found = logits(checkpoint, torch.tensor([prompt + expected]))[0]
        wanted = torch.tensor(case["last_prompt_position_logits"])
        assert (found[len(prompt) - 1] - wanted).abs().max() < 1e-4
        assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == expected
