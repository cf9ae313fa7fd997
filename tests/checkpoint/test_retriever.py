"""Checkpoints of Megatron-LM 23.06's Retro: the golden model, opened from a tree, has the golden logits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

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
