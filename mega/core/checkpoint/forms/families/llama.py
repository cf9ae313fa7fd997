"""Llama, and the families Mistral, Qwen2 and Qwen3, which differ from Llama in biases, QK norms and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import (
    Config,
    Flag,
    Key,
    Number,
    Only,
    Unread,
    Values,
    Whole,
    Word,
    flag,
)
from mega.core.checkpoint.forms.families.layers import Window, from_layer
from mega.core.checkpoint.forms.families.rope import RopeKeys
from mega.core.checkpoint.forms.keys import only, whole_in
from mega.core.config.sections import ModelConfig

VALUES: Mapping[str, object] = {
    "family": "llama",
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "hidden_dropout": 0.0,
}
"""Options that Llama and similar families have in common."""


def kv_heads(absent: int | None = None) -> Whole:
    """The key `num_key_value_heads`; null means the number of heads. absent: value if the key is absent; default: the
    number of heads."""
    return Whole("kv_heads", _where_absent("num_key_value_heads", absent, _heads))


def head_dim(absent: int | None = None) -> Whole:
    """The key `head_dim`; null means the hidden width divided by the number of heads. absent: value if the key is
    absent; by default the same as for null."""
    return Whole("head_dim", _where_absent("head_dim", absent, _share))


def _heads(config: Config) -> int:
    return whole_in(config, "num_attention_heads", "config.json")


def _share(config: Config) -> int:
    return whole_in(config, "hidden_size", "config.json") // _heads(config)


def _where_absent(name: str, absent: int | None, null: Callable[[Config], int]) -> Callable[[Config], int]:
    return lambda config: null(config) if absent is None or name in config else absent


SIZES: Mapping[str, Key] = {
    "num_hidden_layers": Whole("layers"),
    "hidden_size": Whole("hidden"),
    "num_attention_heads": Whole("heads"),
    "num_key_value_heads": kv_heads(),
    "head_dim": head_dim(),
    "intermediate_size": Whole("ffn"),
    "vocab_size": Whole("vocab"),
}

TRAINED: Mapping[str, Key] = {
    "attention_dropout": Number("attention_dropout", 0.0),
    "initializer_range": Number("init_std", 0.02),
}

LLAMA: Mapping[str, Key] = {
    **SIZES,
    **TRAINED,
    "hidden_act": Word("activation", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
    "max_position_embeddings": RopeKeys(),
    "rms_norm_eps": Number("norm_eps", 1e-6),
    "tie_word_embeddings": flag("tied"),
}
"""Keys that Llama-like families have in common."""

ABSENT: Mapping[str, Key] = {"attention_bias": Only((False, None)), "mlp_bias": Only((False, None))}
"""Keys for biases, in a family without biases."""

ATTENTION_BIAS = Flag(False, {"qkv_bias": True, "out_bias": True}, {"qkv_bias": False})
"""Key for the biases of all attention linears, in a family whose feed-forward layers have no biases."""


@dataclass(frozen=True)
class Biases:
    """The key `mlp_bias`, together with the key `attention_bias`, which applies to all attention linears. A family
    lists this object under the key `mlp_bias`."""

    names = ("attention_bias",)

    def read(self, config: Config, name: str, where: str) -> Values:
        for key in (name, *self.names):
            only(config, key, (False, True, None), where)
        attention, feed_forward = bool(config.get("attention_bias")), bool(config.get(name))
        out = None if attention == feed_forward else attention
        return {"bias": feed_forward, "qkv_bias": attention, "out_bias": out}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.bias, "attention_bias": model.qkv_bias}


WORDS = "Hugging Face's Llama"

llama = HubFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    words=WORDS,
    values=VALUES,
    keys={**LLAMA, "mlp_bias": Biases(), "sliding_window": Unread()},  # transformers' Llama has no window
)

mistral = HubFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    words="Hugging Face's Mistral",
    values=VALUES,
    keys={**LLAMA, **ABSENT, "num_key_value_heads": kv_heads(8), "sliding_window": Window(4096)},
)

QWEN_WINDOW = Window(4096, from_layer, switch=True, listed=True, others=("max_window_layers",))

qwen2 = HubFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    words="Hugging Face's Qwen2",
    values={**VALUES, "qkv_bias": True},
    keys={
        **LLAMA,
        **ABSENT,
        "num_key_value_heads": kv_heads(32),
        "sliding_window": QWEN_WINDOW,
        "use_mrope": Only((False, None)),
    },
)

qwen3 = HubFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    words="Hugging Face's Qwen3",
    values={**VALUES, "qk_norm": True},
    keys={
        **LLAMA,
        "num_key_value_heads": kv_heads(32),
        "head_dim": head_dim(128),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": Only((False, None)),
        "sliding_window": QWEN_WINDOW,
    },
)

FAMILIES = (llama, mistral, qwen2, qwen3)
