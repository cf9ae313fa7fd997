"""Granite 3: Llama with multipliers for embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import Config, Number, Values
from mega.core.checkpoint.forms.families.llama import LLAMA, VALUES, Biases
from mega.core.checkpoint.forms.keys import number_in
from mega.core.config.sections import ModelConfig


@dataclass(frozen=True)
class AttentionMultiplier:
    """The key for the multiplier of attention scores (option `attention_scale`), by default 1. If the option is None,
    head_dim ** -0.5 is written."""

    names = ()

    def read(self, config: Config, name: str, where: str) -> Values:
        return {"attention_scale": number_in(config, name, where, 1.0)}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale}


granite = HubFamily(
    model_type="granite",
    architecture="GraniteForCausalLM",
    words="Hugging Face's Granite",
    values=VALUES,
    keys={
        **LLAMA,
        "mlp_bias": Biases(),
        "embedding_multiplier": Number("embedding_multiplier", 1.0),
        "residual_multiplier": Number("residual_multiplier", 1.0),
        "logits_scaling": Number("logit_divisor", 1.0),
        "attention_multiplier": AttentionMultiplier(),
    },
)
