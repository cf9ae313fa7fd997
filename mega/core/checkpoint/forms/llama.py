"""Llama and its relatives as Hugging Face keeps them: families as rows of values, config.json both ways.

Tensor names need no table: the inventory's names are Hugging Face's. Knows config.json, no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from mega.core.architecture import Architecture, architecture, inventory
from mega.core.architecture.layer import Attention, Rope
from mega.core.checkpoint.forms.keys import check_kept, number_in, only, whole_in
from mega.core.checkpoint.forms.mapping import Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json, and what distinguishes it from Llama.

    window: `sliding_window` where the file does not say; None where the family has none. window_on_demand: it counts
    only where `use_sliding_window` is true, and in the layers that `layer_types` names, else in those from
    `max_window_layers` on.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    window_on_demand: bool = False


FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("mistral", "MistralForCausalLM", window=4096),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window=4096, window_on_demand=True),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, window=4096, window_on_demand=True),
)

HEAD = "lm_head.weight"
FULL, SLIDING = "full_attention", "sliding_attention"
_BUFFERS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
"""Ends of names that old exports carry and that hold no parameters."""


def model_from_config(config: Mapping[str, Json], where: str, found: Collection[str] = ()) -> ModelConfig:
    """The resolved model section that a config.json describes.

    where: names the file in errors. found: names of the tensors along with it, off which nothing is read.
    Errors: CheckpointError naming a key whose value has no counterpart.
    """
    model_type = config.get("model_type")
    family = next((row for row in FAMILIES if row.model_type == model_type), None)
    if family is None:
        valid = ", ".join(row.model_type for row in FAMILIES)
        raise CheckpointError(f"{where}: model_type {model_type!r} (valid: {valid})")
    heads = whole_in(config, "num_attention_heads", where)
    hidden = whole_in(config, "hidden_size", where)
    only(config, "hidden_act", ("silu", "swish"), where)
    only(config, "attention_bias", (False, None), where)
    only(config, "mlp_bias", (False, None), where)
    only(config, "tie_word_embeddings", (False, True, None), where)
    layers = whole_in(config, "num_hidden_layers", where)
    positions, window = _reach(config, family, layers, where)
    return ModelConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole_in(config, "num_key_value_heads", where, heads),
        head_dim=whole_in(config, "head_dim", where, hidden // heads),
        ffn=whole_in(config, "intermediate_size", where),
        vocab=whole_in(config, "vocab_size", where),
        positions=positions,
        window=window,
        position="rope",
        **_rope(config, where),
        norm="rmsnorm",
        norm_eps=number_in(config, "rms_norm_eps", where, 1e-6),
        activation="swiglu",
        bias=False,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied=config.get("tie_word_embeddings") is True,
        hidden_dropout=0.0,
        attention_dropout=number_in(config, "attention_dropout", where, 0.0),
        init_std=number_in(config, "initializer_range", where, 0.02),
    )


class _RopeOptions(TypedDict, total=False):
    rope_base: float
    rope_interpolation: float
    rope_scaling: Literal["llama3"]
    rope_scaling_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    rope_original_positions: int


def _rope(config: Mapping[str, Json], where: str) -> _RopeOptions:
    """The options about rotation. New files keep all their keys in `rope_parameters`; the old place wins, as there."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(f"{where}: {key} {rope!r}: must be an object of numbers, the same for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"{where}: rope_type {kind!r} (valid: default, linear, llama3)")
    both = {**config, **rope}
    only(both, "partial_rotary_factor", (1.0, None), where)
    found: _RopeOptions = {"rope_base": number_in(both, "rope_theta", where, 10000.0)}
    if kind == "linear":
        found["rope_interpolation"] = number_in(rope, "factor", where)
    if kind == "llama3":
        found |= {
            "rope_scaling": "llama3",
            "rope_scaling_factor": number_in(rope, "factor", where),
            "rope_low_freq_factor": number_in(rope, "low_freq_factor", where),
            "rope_high_freq_factor": number_in(rope, "high_freq_factor", where),
            "rope_original_positions": whole_in(rope, "original_max_position_embeddings", where),
        }
    return found


def _rope_keys(rope: Rope | None) -> dict[str, Json]:
    """The keys about rotation; none of a model that has none, which is refused as it is read back."""
    return {} if rope is None else {"rope_theta": rope.base, "rope_scaling": _scaling(rope)}


def _scaling(rope: Rope) -> dict[str, Json] | None:
    """`rope_scaling` of a config.json."""
    if rope.scaling is not None and rope.interpolation != 1.0:
        raise CheckpointError("rope_scaling and rope_interpolation together: Hugging Face has one or the other")
    if rope.scaling is not None:
        return {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low,
            "high_freq_factor": rope.scaling.high,
            "original_max_position_embeddings": rope.scaling.original,
        }
    return {"rope_type": "linear", "factor": rope.interpolation} if rope.interpolation != 1.0 else None


def _reach(config: Mapping[str, Json], family: Family, layers: int, where: str) -> tuple[int, int | None]:
    """Positions, and the window of all layers.

    Where only some layers have one, attention is that of all the others within it, so such a model ends with it.
    """
    positions = whole_in(config, "max_position_embeddings", where)
    wanted = bool(config.get("use_sliding_window")) if family.window_on_demand else family.window is not None
    if not wanted or config.get("sliding_window", family.window) is None:
        return positions, None
    window = whole_in(config, "sliding_window", where, family.window)
    kinds = _attention_kinds(config, family, layers, where)
    if window >= positions or SLIDING not in kinds:
        return positions, None
    return (window, None) if FULL in kinds else (positions, window)


def _attention_kinds(config: Mapping[str, Json], family: Family, layers: int, where: str) -> set[str]:
    """SLIDING, FULL or both: what the layers of a model with a window are, `layer_types` before `max_window_layers`."""
    if not family.window_on_demand:
        return {SLIDING}
    kinds = config.get("layer_types")
    if kinds is None:
        without = config.get("max_window_layers", 28)
        if not isinstance(without, int) or without < 0:
            raise CheckpointError(f"{where}: max_window_layers {without!r}: must be a whole number of at least 0")
        kinds = [FULL] * min(without, layers) + [SLIDING] * (layers - without)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(f"{where}: layer_types {kinds!r}: must be {FULL} or {SLIDING} for each layer")
    return set(kinds)


def config_from_model(options: ModelConfig, dtype: str) -> dict[str, Json]:
    """A config.json for `AutoModelForCausalLM`. dtype: of the weights, in torch's words ("bfloat16").

    Errors: CheckpointError naming the option that these families do not have.
    """
    model = architecture(options)
    config = _config(model, dtype)
    everywhere = (model.block.attention.window or 0) >= model.positions  # as good as none, which it is read as
    read = model_from_config(config, "config.json")
    check_kept(options, read, "Hugging Face's Llama", unsaid=("window",) if everywhere else ())
    return config


def _config(model: Architecture, dtype: str) -> dict[str, Json]:
    attention = model.block.attention
    family = _family(attention)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": model.hidden,
        "intermediate_size": model.block.feed_forward.width,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.input.vocab,
        "max_position_embeddings": model.positions,
        **_rope_keys(attention.rope),
        "rms_norm_eps": model.block.norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": attention.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
        "torch_dtype": dtype,
        **_window(attention, family),
    }


def _family(attention: Attention) -> Family:
    """The first that has such an attention."""
    wanted = (attention.qkv_bias, attention.q_norm is not None)
    alike = [row for row in FAMILIES if (row.qkv_bias, row.qk_norm) == wanted]
    for row in alike:
        if attention.window is None or row.window is not None:
            return row
    raise CheckpointError("qkv_bias and qk_norm together: no Hugging Face family has both")


def _window(attention: Attention, family: Family) -> dict[str, Json]:
    """The keys of a sliding window, where a model has one."""
    if attention.window is None:
        return {}
    on_demand = {"use_sliding_window": True, "max_window_layers": 0} if family.window_on_demand else {}
    return {"sliding_window": attention.window, **on_demand}


def table(model: ModelConfig, found: Collection[str] = ()) -> Table:
    """`weights/<name>` of every logical tensor is the Hugging Face tensor of that name. found: names in a folder."""
    embedding, *others = (
        Target(f"weights/{tensor.name}", tensor.shape, (whole(tensor.shape, tensor.name),))
        for tensor in inventory(model)
    )
    repeated = architecture(model).tied and HEAD in found
    return Table(
        (embedding, *others),
        copies=((embedding.name, whole(embedding.shape, HEAD)),) if repeated else (),
        ignored=frozenset(name for name in found if name.endswith(_BUFFERS)),
    )
