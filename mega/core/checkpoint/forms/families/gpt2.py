"""GPT-2: matrices are stored as [in, out], and query, key and value are fused. Source: transformers'
GPT2LMHeadModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily, StoredModule, concatenated_qkv
from mega.core.checkpoint.forms.families.keys import (
    NULL,
    Config,
    Key,
    Number,
    Only,
    Unread,
    Values,
    Whole,
    Word,
    flag,
)
from mega.core.checkpoint.forms.families.phi3 import Dropouts
from mega.core.checkpoint.forms.keys import only, whole_in
from mega.core.config.sections import ModelConfig

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""Value of `activation_function` -> value of --activation."""


@dataclass(frozen=True)
class HeadCount:
    """A key for the number of heads, in a family without grouped-query attention. The width of a head, `head_dim`, is
    the hidden width divided by the number of heads. hidden: the key for the hidden width."""

    hidden: str = "n_embd"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hidden,)

    def read(self, config: Config, name: str, where: str) -> Values:
        heads, hidden = (whole_in(config, key, where) for key in (name, self.hidden))
        return {"hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.heads, self.hidden: model.hidden}


@dataclass(frozen=True)
class Inner:
    """The key `n_inner`, the feed-forward width; null means four times the hidden width."""

    names = ()

    def read(self, config: Config, name: str, where: str) -> Values:
        return {"ffn": whole_in(config, name, where, 4 * whole_in(config, "n_embd", where))}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: None if model.ffn == 4 * model.hidden else model.ffn}


@dataclass(frozen=True)
class ScoreScale:
    """Keys for the scale of attention scores: whether scores are divided by the square root of head_dim, and whether
    they are divided by the layer's number."""

    names = ("scale_attn_by_inverse_layer_idx",)

    def read(self, config: Config, name: str, where: str) -> Values:
        for key in (name, *self.names):
            only(config, key, (True, False, None), where)
        usual, by_layer = config.get(name, True), config.get("scale_attn_by_inverse_layer_idx")
        return {"attention_scale": None if usual else 1.0, "attention_scale_by_layer": bool(by_layer)}

    def write(self, model: ModelConfig, name: str) -> Values:
        by_layer = {"scale_attn_by_inverse_layer_idx": True} if model.attention_scale_by_layer else {}
        return {**({} if model.attention_scale is None else {name: False}), **by_layer}


SIZES: Mapping[str, Key] = {
    "n_layer": Whole("layers"),
    "n_head": HeadCount(),
    "n_inner": Inner(),
    "n_positions": Whole("positions"),
    "n_ctx": Unread(),  # older files also contain this key, with the same value
    "vocab_size": Whole("vocab"),
}
NUMBERS: Mapping[str, Key] = {
    "activation_function": Word("activation", ACTIVATIONS, "gelu_new"),
    "layer_norm_epsilon": Number("norm_eps", 1e-5),
    "attn_pdrop": Number("attention_dropout", 0.0),
    "initializer_range": Number("init_std", 0.02),
    **{f"summary_{each}": Unread() for each in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")},
}

gpt2 = HubFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    words="Hugging Face's GPT-2",
    values={"family": "gpt", "position": "learned", "norm": "layernorm", "bias": True, "qkv_bias": True},
    keys={
        **SIZES,
        **NUMBERS,
        "attn_pdrop": Number("attention_dropout", 0.1),
        "resid_pdrop": Dropouts(("embd_pdrop",), 0.1),
        "tie_word_embeddings": flag("tied", True),
        "scale_attn_weights": ScoreScale(),
        "reorder_and_upcast_attn": Only((False, True, None)),  # changes only the precision of attention
        "add_cross_attention": NULL,
    },
    names={
        "model.embed_tokens": "wte",
        "model.embed_positions": "wpe",
        "model.norm": "ln_f",
        "input_layernorm": "ln_1",
        **{f"self_attn.{which}_proj": StoredModule("attn.c_attn", concatenated_qkv(which), True) for which in "qkv"},
        "self_attn.o_proj": StoredModule("attn.c_proj", transposed=True),
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": StoredModule("mlp.c_fc", transposed=True),
        "mlp.down_proj": StoredModule("mlp.c_proj", transposed=True),
    },
    prefix="transformer.",
    layer="h.{}.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
