"""A large model that speaks as a small one: the weights of a trained Llama, laid into a larger shape.

    Grown(directory, model, noise).write(place)       as a Hugging Face directory
    Grown(directory, model, noise).fill(stage)        into a rank's stage, at any layout

So speed at the size of a real model can be measured on text that a smaller one has learned, and the small model guesses
what the large one says as well as `noise` lets it. The hidden values of the small model are the first of the large one;
the others stay zero without noise. Blocks that the small model does not have add noise to all of them: matrices with
random values, by which the hidden values change by about `noise`, whatever the shape.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mega.core.architecture import inventory
from mega.core.config.sections import ModelConfig
from mega.core.ops.counter import key
from mega.core.parallel.weight import weights

WRITES = ("o_proj.weight", "down_proj.weight")


class Grown:
    """small: a Hugging Face directory. model: the shape, of a Llama with as many key/value heads as heads, at least as
    large in all dimensions and a multiple in the hidden ones."""

    def __init__(self, small: Path, model: ModelConfig, noise: float = 0.0):
        config = json.loads((small / "config.json").read_text())
        self.small, self.noise, self._config = small, noise, config
        self._tensors = load_file(small / "model.safetensors")
        hidden, heads, layers = (
            config[f"{name}"] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        assert model.hidden and model.heads and model.kv_heads and model.head_dim and model.ffn and model.layers
        assert model.kv_heads == model.heads >= heads and model.layers >= layers, model
        assert model.ffn >= config["intermediate_size"] and (model.vocab or 0) >= config["vocab_size"], model
        self._wider, self._longer = model.hidden / hidden, model.head_dim * heads // hidden
        self._heads, self._kv_heads, self._head = heads, config["num_key_value_heads"], hidden // heads
        self._at = {layer * model.layers // layers: layer for layer in range(layers)}
        self._others = max(1, model.layers - layers)
        positions = config["max_position_embeddings"]
        self.model = replace(model, norm_eps=config["rms_norm_eps"] / self._wider, tied=False, positions=positions)

    def tensor(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """The whole logical tensor of a name, in fp32."""
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if layer.isdigit() and int(layer) not in self._at:
            return self._random(name, shape, device)
        if layer.isdigit():
            name = f"model.layers.{self._at[int(layer)]}.{rest}"
        if name == "lm_head.weight" and name not in self._tensors:
            name = "model.embed_tokens.weight"
        found = self._laid(name, self._tensors[name].to(device))
        whole = torch.zeros(tuple(shape), device=device)
        whole[tuple(slice(size) for size in found.shape)] = found
        return whole

    def _laid(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """Scaled by what a norm over more values divides by; heads with zeros between pairs of their frequencies."""
        if found.dim() == 1:
            return found / math.sqrt(self._wider)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            scale = math.sqrt(self._longer) if "q_proj" in name else 1.0
            pairs = self._per_head(found).view(self._heads, 2, 1, self._head // 2, 1, -1) * scale
            wide = found.new_zeros(*pairs.shape[:4], self._longer, pairs.shape[-1])
            wide[:, :, :, :, :1] = pairs.transpose(2, 4).reshape(*pairs.shape[:4], 1, -1)
            return wide.reshape(-1, found.shape[1])
        if name.endswith("v_proj.weight"):
            wide = found.new_zeros(self._heads, self._head * self._longer, found.shape[1])
            wide[:, : self._head] = self._per_head(found)
            return wide.reshape(-1, found.shape[1])
        if name.endswith("o_proj.weight"):
            wide = found.new_zeros(found.shape[0], self._heads, self._head * self._longer)
            wide[:, :, : self._head] = found.view(found.shape[0], self._heads, self._head)
            return wide.reshape(found.shape[0], -1)
        return found

    def _per_head(self, found: torch.Tensor) -> torch.Tensor:
        """[heads, width of a head, hidden], keys and values repeated for every head that reads them."""
        each = found.view(-1, self._head, found.shape[1])
        return each.repeat_interleave(self._heads // len(each), 0)

    def _random(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(tuple(shape), device=device)
        draw = torch.Generator(device).manual_seed(key(1, name) % 2**63)
        std = 1 / math.sqrt(shape[1])
        if name.endswith(WRITES):
            std *= self.noise / math.sqrt(self._others)
        return torch.randn(tuple(shape), generator=draw, device=device) * std

    @torch.no_grad()
    def fill(self, stage: Any, seed: int = 0) -> None:
        """As `initialise`."""
        for weight in weights(stage):
            weight.zero_()
            for segment in weight.segments:
                block = self.tensor(segment.shard.name, segment.shard.whole, weight.device)
                for dim, (first, size) in enumerate(zip(segment.shard.start, segment.shard.size, strict=True)):
                    block = block.narrow(dim, first, size)
                segment.real(weight).copy_(block)

    def write(self, place: Path) -> Path:
        model, cpu = self.model, torch.device("cpu")
        place.mkdir(parents=True)
        shape = {"hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads}
        shape |= {"num_key_value_heads": model.kv_heads, "intermediate_size": model.ffn, "vocab_size": model.vocab}
        shape |= {"head_dim": model.head_dim, "rms_norm_eps": model.norm_eps, "tie_word_embeddings": False}
        (place / "config.json").write_text(json.dumps({**self._config, **shape}))
        tensors = {each.name: self.tensor(each.name, each.shape, cpu) for each in inventory(model)}
        save_file({name: each.clone() for name, each in tensors.items()}, place / "model.safetensors")
        shutil.copy(self.small / "tokenizer.model", place)
        return place
