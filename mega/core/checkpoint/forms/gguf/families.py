"""Models that llama.cpp supports: conversion of their metadata to keys of config.json and back, and tensor names.

Sources: docs/gguf.md of ggml; conversion/*.py of llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mega.core.architecture import architecture, inventory
from mega.core.architecture.layer import RopeScaling
from mega.core.checkpoint.forms.families.decoders import BY_TYPE
from mega.core.checkpoint.forms.keys import check_round_trip, translated
from mega.core.checkpoint.forms.mapping import Table, Target, gathered
from mega.core.checkpoint.forms.meta import rotary_rows
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.ops.rotary import scaled
from mega.core.untrusted import Json

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The project's module -> llama.cpp's module. Modules of a layer are listed by their names within the layer."""

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the fp32 tensor, of length head_dim / 2, that contains the divisors of the RoPE frequencies for Llama 3's
scaling."""

OUTPUT = "output.weight"


@dataclass(frozen=True)
class GgufFamily:
    """One `general.architecture`."""

    name: str
    """The value of `general.architecture`."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json for models that a file of this architecture can contain. A file is read as
    the first of these types."""
    neighbours: bool = False
    """Whether query and key rows are in Meta's order, in which adjacent rows are rotated together."""


FAMILIES = (
    GgufFamily("llama", ("llama", "mistral"), neighbours=True),
    GgufFamily("qwen2", ("qwen2",)),
    GgufFamily("qwen3", ("qwen3",)),
)

BY_NAME = {family.name: family for family in FAMILIES}

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
"""Key of the metadata -> key of config.json, for integers."""

NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
SAME = {"attention.value_length": "head_dim", "rope.dimension_count": "head_dim"}
"""Metadata key -> key of config.json. If the metadata key is present, both keys must have the same value."""

SCALING = "rope.scaling."
ORIGINAL = f"{SCALING}original_context_length"
UNREAD = ("vocab_size", "tensor_data_layout", f"{SCALING}finetuned")
NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "attention.causal": (True,),
    f"{SCALING}attn_factor": (1.0,),
    f"{SCALING}yarn_attn_factor": (1.0,),
    f"{SCALING}yarn_ext_factor": (-1.0,),
    f"{SCALING}yarn_log_multiplier": (0.0,),
}
"""Keys of the metadata that change a model's computation unless they have the listed value."""
BETAS = {f"{SCALING}yarn_beta_fast": "beta_fast", f"{SCALING}yarn_beta_slow": "beta_slow"}
"""Key of the metadata -> key of config.json, for parameters of YaRN."""
SCALED = ("linear", "yarn")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_POSITIONS = 8192
ROPE_BASE = 10000.0
"""The RoPE base if the metadata do not contain it."""
LEAST, MOST = 1e-37, 3e38
"""Approximate range of positive fp32 numbers."""


def shortest(number: float) -> float:
    """Return the shortest decimal that rounds to the same fp32 number as `number`.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    (stored,) = struct.unpack("<f", struct.pack("<f", number))
    decimals = (float(f"{stored:.{digits}g}") for digits in range(1, 18))
    return next(value for value in decimals if struct.pack("<f", value) == struct.pack("<f", stored))


# Reading


def model_of_metadata(
    metadata: Mapping[str, Json], tensors: Mapping[str, tuple[int, ...]], factors: list[float] | None, where: str
) -> tuple[GgufFamily, ModelConfig, dict[str, Json]]:
    """Return (family, model section, config.json of the model). tensors: name -> shape. factors: the values of the
    tensor `ROPE_FACTORS`.

    Errors: CheckpointError naming a setting that this project does not support.
    """
    name = str(metadata.get("general.architecture"))
    if name not in BY_NAME:
        raise CheckpointError(f"{where}: general.architecture {name!r} (valid: {', '.join(BY_NAME)})")
    family = BY_NAME[name]
    settings = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    config: dict[str, Json] = {"model_type": family.model_types[0], "tie_word_embeddings": OUTPUT not in tensors}
    prefix = f"{where}: {name}."
    if (layers := _whole(settings, "block_count", prefix)) > len(tensors):
        raise CheckpointError(f"{prefix}block_count {layers}: it has {len(tensors)} tensors")
    config |= _sizes(settings, prefix)
    if len(shape := tensors.get("token_embd.weight", ())) != 2:
        raise CheckpointError(f"{where}: holds no token_embd.weight of two dimensions")
    config["vocab_size"] = shape[0]
    config |= _scaling(settings, factors, prefix)
    for key, value in settings.items():
        if key not in UNREAD and value not in NEUTRAL.get(key, (None, 0, False)):
            raise CheckpointError(f"{prefix}{key} {_shown(value)}: is not known here, so the model may be another")
    if any(shape and key.endswith("attn_q.bias") for key, shape in tensors.items()) and name == "llama":
        config |= {"attention_bias": True}
    model = BY_TYPE[family.model_types[0]].model_from_config(config, where, tensors)
    expected = rope_factors(model)
    if factors is not None and expected is not None and not _near(factors, expected):
        raise CheckpointError(
            f"{where}: {ROPE_FACTORS}: are not the factors of Llama 3 within {LLAMA3_POSITIONS} positions"
        )
    return family, model, config


def _near(factors: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether the factors are equal up to rounding."""
    pairs = zip(factors, expected, strict=False)
    return len(factors) == len(expected) and all(abs(one / other - 1) < 1e-4 for one, other in pairs)


def _shown(value: Json) -> str:
    text = repr(value[:9] if isinstance(value, list) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(settings: Mapping[str, Json], key: str, place: str, otherwise: int | None = None) -> int:
    """Return the positive integer at `key`. place: the prefix of the key in messages."""
    value = settings.get(key, otherwise)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise CheckpointError(f"{place}{key} {_shown(value)}: must be a positive whole number")
    return value


def _number(value: Json, what: str) -> float:
    """Check that a value is a positive number in the range of fp32, and return it. what: the key's name in messages."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
        raise CheckpointError(f"{what} {_shown(value)}: must be a positive number of 32 bits")
    return shortest(value)


def _sizes(settings: dict[str, Json], place: str) -> dict[str, Json]:
    """Remove sizes and numbers from `settings`, and return them under the keys of config.json."""
    heads, hidden = (_whole(settings, key, place) for key in ("attention.head_count", "embedding_length"))
    implied = {"attention.head_count_kv": heads, "attention.key_length": hidden // heads}
    config: dict[str, Json] = {}
    for key, config_key in SIZES.items():
        config[config_key] = _whole(settings, key, place, implied.get(key))
        settings.pop(key, None)
    for key, config_key in NUMBERS.items():
        config[config_key] = _number(
            settings.pop(key, ROPE_BASE if config_key == "rope_theta" else None), f"{place}{key}"
        )
    for key, config_key in SAME.items():
        if (value := settings.pop(key, config[config_key])) != config[config_key]:
            raise CheckpointError(f"{place}{key} {_shown(value)}: must be {config[config_key]}")
    return config


def _scaling(settings: dict[str, Json], factors: list[float] | None, place: str) -> dict[str, Json]:
    """Remove the keys for RoPE scaling from `settings`, and return `rope_scaling` for config.json. A factor without a
    type means linear scaling; a factor of 0 means no scaling."""
    factor, kind = settings.pop(f"{SCALING}factor", None) or None, settings.pop(f"{SCALING}type", None)
    original = None if settings.get(ORIGINAL) is None else _whole(settings, ORIGINAL, place)
    settings.pop(ORIGINAL, None)
    kind = ("none" if factor is None else "linear") if kind is None else kind
    if kind not in ("none", *SCALED):
        raise CheckpointError(f"{place}{SCALING}type {_shown(kind)} (valid: none, {', '.join(SCALED)})")
    if factors is not None:
        if kind != "none":
            raise CheckpointError(f"{place}{SCALING}type {kind}: together with {ROPE_FACTORS} is not known here")
        if not factors or not all(LEAST <= each <= MOST for each in factors):
            raise CheckpointError(f"{place.rpartition(': ')[0]}: {ROPE_FACTORS}: must hold positive numbers")
        rope: dict[str, Json] = {"rope_type": "llama3", "factor": shortest(max(factors)), **LLAMA3}
        return {"rope_scaling": {**rope, "original_max_position_embeddings": original or LLAMA3_POSITIONS}}
    if kind == "none" or (kind == "linear" and factor is None):
        return {}
    rope_scaling: dict[str, Json] = {"rope_type": kind, "factor": _number(factor, f"{place}{SCALING}factor")}
    if kind == "yarn":
        rope_scaling |= {
            config_key: _number(settings.pop(key), place + key) for key, config_key in BETAS.items() if key in settings
        }
        rope_scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": rope_scaling}


# Writing


def metadata_of_model(options: ModelConfig) -> tuple[GgufFamily, dict[str, Json]]:
    """Return (the first family that can express a model, the metadata). Errors: CheckpointError naming a setting that
    no family supports, of the model's own family if there is one."""
    other_families: list[CheckpointError] = []
    own_family: list[CheckpointError] = []
    for family in FAMILIES:
        for model_type in family.model_types:
            faults = other_families
            try:
                config = BY_TYPE[model_type].config_from_model(options, "float32")
                faults = own_family
                return family, _metadata(family, options, config)
            except CheckpointError as error:
                faults.append(error)
    valid = ", ".join(model_type for family in FAMILIES for model_type in family.model_types)
    raise CheckpointError(f"--to gguf: is written only for {valid}; {[*own_family, *other_families][0]}")


def _metadata(family: GgufFamily, options: ModelConfig, config: Mapping[str, Json]) -> dict[str, Json]:
    metadata: dict[str, Json] = {"general.architecture": family.name}
    for key, config_key in {**SIZES, **SAME, **NUMBERS}.items():
        metadata[f"{family.name}.{key}"] = config.get(config_key, options.head_dim)
    metadata[f"{family.name}.vocab_size"] = options.vocab
    rope = config.get("rope_scaling")
    if isinstance(rope, dict):
        kind = rope.get("rope_type")
        if kind in SCALED:
            metadata |= {f"{family.name}.{SCALING}type": kind, f"{family.name}.{SCALING}factor": rope["factor"]}
        if "original_max_position_embeddings" in rope:
            metadata[f"{family.name}.{ORIGINAL}"] = rope["original_max_position_embeddings"]
    tensors = {gguf_name(tensor.name): tensor.shape for tensor in inventory(options)}
    _, reread, _ = model_of_metadata(metadata, tensors, rope_factors(options), "its metadata")
    check_round_trip(options, reread, f"GGUF's {family.name}")
    return metadata


def rope_factors(options: ModelConfig) -> list[float] | None:
    """Return the divisors of the RoPE frequencies for Llama 3's scaling; None for a model without this scaling."""
    (rope,) = architecture(options).ropes or {None}
    if rope is None or not isinstance(rope.scaling, RopeScaling):
        return None
    plain = rope.base ** -(torch.arange(0, rope.width, 2, dtype=torch.float64) / rope.width)
    factors: list[float] = (plain / scaled(plain, rope.scaling)).float().tolist()
    return factors


# Tensors


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a logical tensor.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight"), gguf_name("lm_head.weight")
    ('blk.3.attn_q.weight', 'output.weight')
    """
    return translated(name, NAMES, "blk.{}.")


def table(family: GgufFamily, options: ModelConfig, names: Iterable[str] = ()) -> Table:
    """Return the table that produces `weights/<name>` for every logical tensor. names: names of the tensors in a
    file."""
    targets = []
    for tensor in inventory(options):
        heads = next((n for part, n in _heads(options).items() if part in tensor.name), None)
        runs = None if heads is None or not family.neighbours else rotary_rows(heads, options.head_dim)
        fragments = gathered(tensor.shape, [gguf_name(tensor.name)], 0, runs)
        targets.append(Target(f"weights/{tensor.name}", tensor.shape, fragments))
    return Table(tuple(targets), ignored=frozenset(name for name in names if name == ROPE_FACTORS))


def _heads(options: ModelConfig) -> Mapping[str, int]:
    """Substring of a module's name -> number of heads, for the modules whose rows are rotated."""
    return {".q_proj.": options.heads, ".k_proj.": options.kv_heads}
