"""SmolLM3: Llama in which some layers have no rotary positions."""

from __future__ import annotations

from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.keys import flag
from mega.core.checkpoint.forms.families.layers import Window, WithoutRope, full_with_rope
from mega.core.checkpoint.forms.families.llama import LLAMA, VALUES, Biases, kv_heads
from mega.core.checkpoint.forms.families.rope import RopeKeys

smollm3 = HubFamily(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    words="Hugging Face's SmolLM3",
    values=VALUES,
    keys={
        **LLAMA,
        "num_key_value_heads": kv_heads(4),
        "max_position_embeddings": RopeKeys(base=2000000.0),
        "tie_word_embeddings": flag("tied", True),
        "mlp_bias": Biases(),
        "sliding_window": Window(
            None, full_with_rope, switch=True, listed=True, others=("max_window_layers",), masked_anyway=True
        ),
        "no_rope_layers": WithoutRope(),
    },
)
