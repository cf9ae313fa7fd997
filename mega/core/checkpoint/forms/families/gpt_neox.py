"""GPT-NeoX and Pythia: parallel branches with separate norms, partial rotary positions, fused query, key and value."""

from __future__ import annotations

from mega.core.checkpoint.forms.families.family import HubFamily, StoredModule, interleaved_qkv
from mega.core.checkpoint.forms.families.gpt2 import HeadCount
from mega.core.checkpoint.forms.families.keys import Flag, Number, Unread, Whole, Word, flag
from mega.core.checkpoint.forms.families.llama import TRAINED
from mega.core.checkpoint.forms.families.rope import RopeKeys
from mega.core.checkpoint.forms.families.starcoder2 import PLAIN

gpt_neox = HubFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    words="Hugging Face's GPT-NeoX",
    values={"family": "gpt", "position": "rope", "norm": "layernorm", "bias": True},
    keys={
        "num_hidden_layers": Whole("layers"),
        "num_attention_heads": HeadCount("hidden_size"),
        "intermediate_size": Whole("ffn"),
        "vocab_size": Whole("vocab"),
        **TRAINED,
        "max_position_embeddings": RopeKeys(
            fraction=0.25, partial=True, base_key="rotary_emb_base", fraction_key="rotary_pct"
        ),
        "hidden_act": Word("activation", PLAIN, "gelu"),
        "layer_norm_eps": Number("norm_eps", 1e-5),
        "tie_word_embeddings": flag("tied"),
        "attention_bias": Flag(True, {"qkv_bias": True}, {"qkv_bias": False, "out_bias": False}),
        "use_parallel_residual": Flag(True, {"parallel_branches": "two-norms"}, {"parallel_branches": "no"}),
        "hidden_dropout": Number("hidden_dropout", 0.0),
        "classifier_dropout": Unread(),
        "attention_probs_dropout_prob": Unread(),
        "hidden_dropout_prob": Unread(),
    },
    names={
        "model.embed_tokens": "embed_in",
        "model.norm": "final_layer_norm",
        "lm_head": "embed_out",
        **{
            f"self_attn.{which}_proj": StoredModule("attention.query_key_value", interleaved_qkv(which))
            for which in "qkv"
        },
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    prefix="gpt_neox.",
    outside=("embed_out",),
    buffers=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)
