"""GPT-2 in Hugging Face's form: its names, its matrices stored [in, out], its fused query, key and value.

Knows config.json and tensors' names, no files. Source: transformers' GPT2LMHeadModel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mega.core.architecture import Architecture, Tensor, architecture, inventory
from mega.core.checkpoint.forms.keys import check_kept, number_in, only, translated, whole_in
from mega.core.checkpoint.forms.mapping import Fragment, Span, Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

PREFIX = "transformer."
"""In front of every name in a GPT2LMHeadModel; the first releases have none."""

NAMES = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
"""Our modules -> GPT-2's."""

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
"""Ours -> config.json's `activation_function`."""

HEAD = "lm_head.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Ends of names that old exports carry and that hold the causal mask, not `c_attn.bias`."""


def gpt2_name(name: str) -> str:
    """GPT-2's name of a logical tensor, without the prefix.

    >>> gpt2_name("model.layers.3.self_attn.k_proj.bias"), gpt2_name("model.norm.weight")
    ('h.3.attn.c_attn.bias', 'ln_f.weight')
    """
    return translated(name, NAMES, "h.{}.")


def model_from_config(config: Mapping[str, Json], where: str, found: Collection[str] = ()) -> ModelConfig:
    """The resolved model section that a config.json describes. Errors: CheckpointError naming the key.

    found: names of the tensors along with it, off which nothing is read.
    """
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        only(config, key, (False, None), where)
    only(config, "scale_attn_weights", (True, None), where)
    only(config, "tie_word_embeddings", (True, None), where)
    theirs = config.get("activation_function", "gelu_new")
    activation = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}.get(str(theirs))
    if activation is None:
        raise CheckpointError(f"{where}: activation_function {theirs!r} (valid: gelu_new, gelu_pytorch_tanh, gelu)")
    hidden, heads = whole_in(config, "n_embd", where), whole_in(config, "n_head", where)
    dropout = number_in(config, "resid_pdrop", where, 0.1)
    if number_in(config, "embd_pdrop", where, dropout) != dropout:
        raise CheckpointError(f"{where}: embd_pdrop {config['embd_pdrop']}: must be resid_pdrop {dropout}")
    return ModelConfig(
        family="gpt",
        layers=whole_in(config, "n_layer", where),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=whole_in(config, "n_inner", where, 4 * hidden),
        vocab=whole_in(config, "vocab_size", where),
        positions=whole_in(config, "n_positions", where),
        position="learned",
        norm="layernorm",
        norm_eps=number_in(config, "layer_norm_epsilon", where, 1e-5),
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        bias=True,
        qkv_bias=True,
        tied=True,
        hidden_dropout=dropout,
        attention_dropout=number_in(config, "attn_pdrop", where, 0.1),
        init_std=number_in(config, "initializer_range", where, 0.02),
    )


def config_from_model(options: ModelConfig, dtype: str) -> dict[str, Json]:
    """A config.json for `AutoModelForCausalLM`. Errors: CheckpointError naming the option that GPT-2 does not have."""
    config = _config(architecture(options), dtype)
    check_kept(options, model_from_config(config, "config.json"), "Hugging Face's GPT-2")
    return config


def _config(model: Architecture, dtype: str) -> dict[str, Json]:
    attention, feed_forward = model.block.attention, model.block.feed_forward
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.hidden,
        "n_layer": len(model.layers),
        "n_head": attention.heads,
        "n_inner": None if feed_forward.width == 4 * model.hidden else feed_forward.width,
        "n_positions": model.positions,
        "vocab_size": model.input.vocab,
        "activation_function": ACTIVATIONS.get(feed_forward.activation, "gelu_new"),
        "layer_norm_epsilon": model.block.norm.eps,
        "resid_pdrop": model.input.dropout,
        "embd_pdrop": model.input.dropout,
        "attn_pdrop": attention.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def table(model: ModelConfig, found: Collection[str] = ()) -> Table:
    """`weights/<name>` of every logical tensor from GPT-2's. found: names in a folder."""
    prefix = PREFIX if not found or any(name.startswith(PREFIX) for name in found) else ""
    targets = []
    for tensor in inventory(model):
        at, transposed = Span(*map(range, tensor.shape)), _is_transposed(tensor)
        taken = Span(_rows(tensor), *at.ranges[1:])
        taken = Span(*reversed(taken.ranges)) if transposed else taken
        fragment = Fragment(prefix + gpt2_name(tensor.name), at, taken, transposed)
        targets.append(Target(f"weights/{tensor.name}", tensor.shape, (fragment,)))
    return Table(
        tuple(targets),
        copies=((targets[0].name, whole(targets[0].shape, HEAD)),) if HEAD in found else (),
        ignored=frozenset(name for name in found if name.endswith(_BUFFERS)),
    )


def _is_transposed(tensor: Tensor) -> bool:
    """Matrices but for the two tables are stored [in, out]."""
    return len(tensor.shape) == 2 and "embed_" not in tensor.name


def _rows(tensor: Tensor) -> range:
    """Where a tensor's rows are in GPT-2's: one after another for query, key and value."""
    part = tensor.name.rpartition("_proj")[0][-1:]
    place = "qkv".index(part) if part in ("q", "k", "v") and "self_attn" in tensor.name else 0
    return range(place * tensor.shape[0], (place + 1) * tensor.shape[0])
