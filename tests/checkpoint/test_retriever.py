"""Checkpoints of Megatron-LM 23.06's Retro: the golden model, opened from a tree, has the golden logits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.inference.loading.load import load_model, open_model
from tests.model.test_retriever import close, golden, golden_batch
from tests.support.shared import shared


def write_tree(folder: Path) -> None:
    """As 23.06 writes it: the arguments of the golden run, its weights as a tree."""
    typed = argparse.Namespace(
        num_layers=12,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        max_position_embeddings=12,
        bias_gelu_fusion=False,
        make_vocab_size_divisible_by=1,
        padded_vocab_size=40,
        retro_add_retriever=True,
        retro_gpt_chunk_length=json.loads(shared("golden/retro/retro_learned.json").read_text())["chunk_length"],
    )
    tree: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for name, tensor in golden().items():
        if name.startswith("weight."):
            _, model, part, inside = name.split(".", 3)
            tree.setdefault(model, {}).setdefault(part, {})[inside] = tensor
    rank = folder / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({"args": typed, "iteration": 1, "checkpoint_version": 3.0, "model": tree}, rank / "model_optim_rng.pt")


def test_a_tree_of_2023_has_the_golden_logits(tmp_path: Path) -> None:
    write_tree(tmp_path)
    opened = open_model(str(tmp_path))
    assert opened.model.retro_layers == (5, 8, 11) and opened.model.retro_encoder_layers == 2
    assert not opened.model.retro_rope
    stage = load_model(opened)
    with torch.no_grad():
        close(stage(golden_batch(), outputs=True).outputs, golden()["logits"])


def resharded(load: Path, save: Path, *more: str) -> int:
    return main(["reshard", "--load-dir", str(load), "--save-dir", str(save), "--no-load-optim", *more])


def test_a_tree_is_written_as_it_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path / "read")
    assert resharded(tmp_path / "read", tmp_path / "own") == 0
    assert resharded(tmp_path / "own", tmp_path / "written", "--saver", "megatron-23.06") == 0
    trees = [
        torch.load(tmp_path / name / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        for name in ("read", "written")
    ]
    theirs, ours = (dict(leaves(tree["model"])) for tree in trees)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    typed = vars(trees[0]["args"])
    said = vars(trees[1]["args"])
    assert all(said[name] == value for name, value in typed.items() if name.startswith("retro_"))
    assert open_model(str(tmp_path / "written")).model == open_model(str(tmp_path / "read")).model
    for flags, words in (
        ("--saver mcore", "--saver mcore: has no model with --retriever"),
        ("--saver megatron --target-pipeline-parallel-size 2", "--pp 2: "),
    ):
        capsys.readouterr()
        assert resharded(tmp_path / "own", tmp_path / "other", *flags.split()) == 2
        assert words in capsys.readouterr().err


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
