"""Tiny random models of every family that is converted, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 102,
    "max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0},
    "llama3.2": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True, "n_inner": 48},
}


def hf_folder(folder: Path, family: str, dtype: torch.dtype = torch.float32, *, std: float = 1.0, **more: Any) -> Path:
    """A tiny random model of `family`, written by transformers. std: of all its weights, norms and biases too."""
    transformers = pytest.importorskip("transformers")
    values = {"tie_word_embeddings": False, **SIZES, **FAMILIES[family], **more}
    kind = values.pop("model_type")
    if kind == "gpt2":  # which has neither
        values = {
            key: value for key, value in values.items() if key not in ("intermediate_size", "num_key_value_heads")
        }
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():  # biases and norms are constants at first
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return folder
