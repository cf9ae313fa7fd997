"""GPT-J: parallel branches with one norm, rotary positions that rotate pairs of adjacent channels, a bias on the
logits."""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily, StoredModule, rotary_pairs
from mega.core.checkpoint.forms.families.gpt2 import NUMBERS, SIZES
from mega.core.checkpoint.forms.families.keys import Config, Only, Unread, Values, flag
from mega.core.checkpoint.forms.families.phi3 import Dropouts
from mega.core.checkpoint.forms.keys import whole_in
from mega.core.config.sections import ModelConfig


@dataclass(frozen=True)
class RotaryDim:
    """A key for the number of rotated channels per head; null means all channels."""

    names = ()

    def read(self, config: Config, name: str, where: str) -> Values:
        width = whole_in(config, "n_embd", where) // whole_in(config, "n_head", where)
        turning = width if name in config and config[name] is None else whole_in(config, name, where, 64)
        return {"rope_fraction": turning / width}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: int(model.head_dim * model.rope_fraction)}


gptj = HubFamily(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    words="Hugging Face's GPT-J",
    values={
        "family": "gpt",
        "position": "rope",
        "norm": "layernorm",
        "bias": True,
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "parallel_branches": "one-norm",
    },
    keys={
        **SIZES,
        **NUMBERS,
        "rotary_dim": RotaryDim(),
        "tie_word_embeddings": flag("tied"),
        "resid_pdrop": Dropouts(("embd_pdrop",)),
        "scale_attn_weights": Only((True, None)),
        "rotary": Only((True, None)),
        "gradient_checkpointing": Unread(),
    },
    names={
        "model.embed_tokens": "wte",
        "model.norm": "ln_f",
        "input_layernorm": "ln_1",
        "self_attn.q_proj": StoredModule("attn.q_proj", rotary_pairs),
        "self_attn.k_proj": StoredModule("attn.k_proj", rotary_pairs),
        "self_attn.v_proj": "attn.v_proj",
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    },
    prefix="transformer.",
    layer="h.{}.",
    buffers=(".attn.bias", ".attn.masked_bias", "attn.embed_positions"),
)
