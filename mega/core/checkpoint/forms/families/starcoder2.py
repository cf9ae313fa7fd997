"""StarCoder2: layer norms, biases, grouped-query attention and rotary positions."""

from __future__ import annotations

from mega.core.checkpoint.forms.families.family import LLAMA_NAMES, HubFamily
from mega.core.checkpoint.forms.families.keys import Flag, Number, Only, Unread, Word, flag
from mega.core.checkpoint.forms.families.layers import Window
from mega.core.checkpoint.forms.families.llama import SIZES, TRAINED, kv_heads
from mega.core.checkpoint.forms.families.phi3 import Dropouts
from mega.core.checkpoint.forms.families.rope import RopeKeys

PLAIN = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Value of `hidden_act` -> value of --activation, for feed-forward layers without a gate."""

starcoder2 = HubFamily(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    words="Hugging Face's StarCoder2",
    values={"family": "gpt", "position": "rope", "norm": "layernorm"},
    keys={
        **SIZES,
        **TRAINED,
        "num_key_value_heads": kv_heads(2),
        "max_position_embeddings": RopeKeys(),
        "hidden_act": Word("activation", PLAIN, "gelu_pytorch_tanh"),
        "initializer_range": Number("init_std", 0.018042),
        "norm_epsilon": Number("norm_eps", 1e-5),
        "tie_word_embeddings": flag("tied", True),
        "use_bias": Flag(True, {"bias": True, "qkv_bias": True}, {"bias": False, "qkv_bias": False}),
        "residual_dropout": Dropouts(("embedding_dropout",)),
        "sliding_window": Window(),
        "mlp_type": Only((None, "default")),
        "norm_type": Only((None, "layer_norm")),
        "rms_norm_eps": Unread(),
    },
    names={**LLAMA_NAMES, "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
