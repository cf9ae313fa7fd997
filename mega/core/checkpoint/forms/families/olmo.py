"""OLMo 2 and 3: norms after each branch, and QK norms over all heads together. In OLMo 3, most layers have a window."""

from __future__ import annotations

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import CLIP_QKV, Number, Only
from mega.core.checkpoint.forms.families.layers import RopeByKind, Window, every
from mega.core.checkpoint.forms.families.llama import ATTENTION_BIAS, LLAMA, VALUES
from mega.core.checkpoint.forms.families.rope import RopeKeys

OLMO_VALUES = {**VALUES, "norm_placement": "branch", "qk_norm": True, "qk_norm_whole": True}
OLMO = {
    **LLAMA,
    "attention_bias": ATTENTION_BIAS,
    "mlp_bias": Only((False, None)),
    "rms_norm_eps": Number("norm_eps", 1e-5),
    "clip_qkv": CLIP_QKV,
}

olmo2 = HubFamily(
    model_type="olmo2", architecture="Olmo2ForCausalLM", words="Hugging Face's OLMo 2", values=OLMO_VALUES, keys=OLMO
)

olmo3 = HubFamily(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    words="Hugging Face's OLMo 3",
    values=OLMO_VALUES,
    keys={
        **OLMO,
        "max_position_embeddings": RopeByKind(RopeKeys(base=500000.0)),
        "sliding_window": Window(4096, every(4), listed=True, local=True),
    },
)

FAMILIES = (olmo2, olmo3)
