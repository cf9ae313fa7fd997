"""StableLM and StableLM 2: layer norms, a gated feed-forward layer, partial rotary positions, parallel branches."""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import NULL, Config, Flag, Number, Unread, Values
from mega.core.checkpoint.forms.families.llama import LLAMA, VALUES, kv_heads
from mega.core.checkpoint.forms.families.rope import RopeKeys
from mega.core.checkpoint.forms.keys import only, whole_in
from mega.core.config.sections import ModelConfig


@dataclass(frozen=True)
class WholeHeads:
    """A key for the number of query heads. The width of a head, `head_dim`, is the hidden width divided by the number
    of query heads, and there may be fewer key/value heads."""

    names = ("head_dim",)

    def read(self, config: Config, name: str, where: str) -> Values:
        heads, hidden = (whole_in(config, key, where) for key in (name, "hidden_size"))
        only(config, "head_dim", (hidden // heads, None), where)
        return {"heads": heads, "head_dim": hidden // heads}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.heads}


stablelm = HubFamily(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    words="Hugging Face's StableLM",
    values={**VALUES, "norm": "layernorm"},
    keys={
        **{name: key for name, key in LLAMA.items() if name not in ("rms_norm_eps", "head_dim")},
        "num_attention_heads": WholeHeads(),
        "num_key_value_heads": kv_heads(32),
        "max_position_embeddings": RopeKeys(fraction=0.25, partial=True),
        "layer_norm_eps": Number("norm_eps", 1e-5),
        "use_qkv_bias": Flag(False, {"qkv_bias": True}, {"qkv_bias": False}),
        "qk_layernorm": NULL,
        "use_parallel_residual": Flag(False, {"parallel_branches": "one-norm"}, {"parallel_branches": "no"}),
        "hidden_dropout": Number("hidden_dropout", 0.0),
        "rotary_scaling_factor": Unread(),
        "norm_eps": Unread(),
    },
)
