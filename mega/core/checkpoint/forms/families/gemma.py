"""Text models of Gemma 1 to 3: norm weights with an offset of one, gated GELU, and scaled embeddings. Gemma 2 and 3
also have norms before and after each branch, windows in some layers, and soft caps or QK norms."""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import NULL, Config, Number, Only, Unread, Values, Word, flag
from mega.core.checkpoint.forms.families.layers import RopeByKind, Window, every
from mega.core.checkpoint.forms.families.llama import ATTENTION_BIAS, LLAMA, VALUES, head_dim, kv_heads
from mega.core.checkpoint.forms.families.rope import RopeKeys
from mega.core.checkpoint.forms.keys import number_in
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig

GEMMA_VALUES = {**VALUES, "norm_offset": True, "embedding_scale": True, "embedding_scale_rounded": True}
TANH = Word("activation", {"gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"}, "gelu_pytorch_tanh")
LEGACY = Word("activation", {**TANH.values, "gelu": "geglu_tanh", "silu": "swiglu"}, "gelu_pytorch_tanh")
"""The released files of Gemma 1 call the tanh approximation "gelu". The family has no exact gelu."""

ERF_TOO = Word("activation", {**TANH.values, "gelu": "geglu", "silu": "swiglu"}, "gelu_pytorch_tanh")
GEMMA = {
    **LLAMA,
    "head_dim": head_dim(256),
    "tie_word_embeddings": flag("tied", True),
    "attention_bias": ATTENTION_BIAS,
    "mlp_bias": Only((False, None)),
    "use_bidirectional_attention": NULL,
}


@dataclass(frozen=True)
class QueryScalar:
    """A key for the number whose square root divides the attention scores. If the number equals head_dim,
    `attention_scale` remains None."""

    names = ()

    def read(self, config: Config, name: str, where: str) -> Values:
        scalar = number_in(config, name, where, 256.0)
        if scalar <= 0:
            raise CheckpointError(f"{where}: {name} {scalar}: must be greater than 0")
        width = number_in(config, "head_dim", where, 256.0)
        return {"attention_scale": None if scalar == width else scalar**-0.5}

    def write(self, model: ModelConfig, name: str) -> Values:
        if model.attention_scale is None:
            return {name: model.head_dim}
        exact, rounded = model.attention_scale**-2, round(model.attention_scale**-2)
        return {name: rounded if rounded > 0 and rounded**-0.5 == model.attention_scale else exact}


gemma = HubFamily(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    words="Hugging Face's Gemma",
    values=GEMMA_VALUES,
    keys={**GEMMA, "num_key_value_heads": kv_heads(16), "hidden_act": LEGACY, "hidden_activation": Unread()},
)

GEMMA_2_VALUES = {**GEMMA_VALUES, "norm_placement": "both"}
GEMMA_2 = {
    **{name: key for name, key in GEMMA.items() if name != "hidden_act"},
    "num_key_value_heads": kv_heads(4),
    "hidden_activation": ERF_TOO,
    "hidden_act": Unread(),
    "query_pre_attn_scalar": QueryScalar(),
    "cache_implementation": Unread(),
}

gemma2 = HubFamily(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    words="Hugging Face's Gemma 2",
    values=GEMMA_2_VALUES,
    keys={
        **GEMMA_2,
        "attn_logit_softcapping": Number("attention_softcap", 50.0, optional=True),
        "final_logit_softcapping": Number("logit_softcap", 30.0, optional=True),
        "sliding_window": Window(4096, every(2), listed=True),
        "sliding_window_size": Unread(),
    },
)

gemma3 = HubFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    words="Hugging Face's Gemma 3",
    values={**GEMMA_2_VALUES, "qk_norm": True},
    keys={
        **GEMMA_2,
        "attn_logit_softcapping": Number("attention_softcap", None, optional=True),
        "final_logit_softcapping": Number("logit_softcap", None, optional=True),
        "max_position_embeddings": RopeByKind(RopeKeys(base=1000000.0), 10000.0, "rope_local_base_freq"),
        "sliding_window": Window(
            4096, every("sliding_window_pattern", 6), listed=True, others=("sliding_window_pattern",), local=True
        ),
    },
)

FAMILIES = (gemma, gemma2, gemma3)
