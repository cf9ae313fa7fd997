"""Phi-3 and Phi-4: Llama with fused linears and LongRoPE."""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import (
    LLAMA_NAMES,
    HubFamily,
    StoredModule,
    concatenated_qkv,
    gate_then_up,
)
from mega.core.checkpoint.forms.families.keys import NULL, Config, Number, Only, Values
from mega.core.checkpoint.forms.families.layers import Window
from mega.core.checkpoint.forms.families.llama import ABSENT, LLAMA, VALUES
from mega.core.checkpoint.forms.families.rope import RopeKeys
from mega.core.checkpoint.forms.keys import number_in
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig


@dataclass(frozen=True)
class Dropouts:
    """Keys for dropout in the residual stream and after the embedding, which this project combines in one option.
    names: all keys except the first."""

    names: tuple[str, ...]
    default: float = 0.0

    def read(self, config: Config, name: str, where: str) -> Values:
        first = number_in(config, name, where, self.default)
        for key in self.names:
            if number_in(config, key, where, self.default) != first:
                raise CheckpointError(f"{where}: {key} {config.get(key, self.default)}: must be {name} {first}")
        return {"hidden_dropout": first}

    def write(self, model: ModelConfig, name: str) -> Values:
        return dict.fromkeys((name, *self.names), model.hidden_dropout)


phi3 = HubFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    words="Hugging Face's Phi-3",
    values=VALUES,
    keys={
        **LLAMA,
        **ABSENT,
        "max_position_embeddings": RopeKeys(
            partial=True, original=4096, kinds=("default", "longrope"), renamed={"su": "longrope", "yarn": "longrope"}
        ),
        "rms_norm_eps": Number("norm_eps", 1e-5),
        "resid_pdrop": Dropouts(("embd_pdrop",)),
        "sliding_window": Window(),
        "full_attn_mod": Only((None, 1)),
        "interpolate_factor": Only((None, 1)),
        "lm_head_bias": NULL,
    },
    names={
        **LLAMA_NAMES,
        **{f"self_attn.{which}_proj": StoredModule("self_attn.qkv_proj", concatenated_qkv(which)) for which in "qkv"},
        **{f"mlp.{which}_proj": StoredModule("mlp.gate_up_proj", gate_then_up(which)) for which in ("gate", "up")},
    },
)
