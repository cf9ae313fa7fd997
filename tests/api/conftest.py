"""A tokenizer of bytes, and one small run that tests of the Python interface share."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mega
from mega.core.text.gpt2 import byte_letters

SIZES: dict[str, Any] = {
    **{"layers": 2, "hidden": 16, "heads": 2, "seq_length": 32, "micro_batch": 2, "global_batch": 4},
    **{"lr": 1e-2, "lr_decay": "constant", "steps": 2, "eval_iters": 1, "device": "cpu"},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of GPT-2's BPE without merges: a token is a byte, and one ends a document."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = {letter: byte for byte, letter in byte_letters().items()}
    (folder / "vocab.json").write_text(json.dumps({**letters, "<|endoftext|>": 256}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return {"tokenizer": "GPT2BPETokenizer", **files}


@pytest.fixture(scope="session")
def trained(tokenizer: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> mega.TrainingResult:
    """Two steps on random tokens; its checkpoint."""
    save = tmp_path_factory.mktemp("runs") / "first"
    return mega.pretrain(mega.config(**SIZES, **tokenizer, mock_data=True, save=save))
