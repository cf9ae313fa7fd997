"""Keys of config.json for rotary positions: `rope_parameters` in new files, `rope_scaling` and other keys in old files.

If a file contains both, the old key takes precedence, as in transformers. Source: transformers' modeling_rope_utils.
This module does not depend on the model family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mega.core.checkpoint.forms.families.keys import Config, Values
from mega.core.checkpoint.forms.keys import number_in, only, whole_in
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"

ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""`rope_type` -> keys of `rope_parameters` for this type."""

KINDS = tuple(NUMBERS)


@dataclass(frozen=True)
class RopeKeys:
    """All keys for rotary positions. A family lists this object under the key `max_position_embeddings`, because some
    of the other keys depend on `max_position_embeddings`."""

    base: float = 10000.0
    """Default RoPE base."""
    fraction: float = 1.0
    """Default fraction of a head that is rotated."""
    partial: bool = False
    """Whether the family supports heads that are rotated only in part."""
    base_key: str = "rope_theta"
    """Key of the RoPE base in old config.json files."""
    fraction_key: str = "partial_rotary_factor"
    """Key of the rotated fraction of a head in old config.json files."""
    kinds: tuple[str, ...] = KINDS
    """Values of `rope_type` that the family supports."""
    renamed: Mapping[str, str] = ()  # type: ignore[assignment]
    """Pairs of (alternative value of `rope_type`, equivalent value in `kinds`)."""
    original: int | None = None
    """Default of `original_max_position_embeddings`; None means the number of positions."""

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *ROPE_KEYS,
            self.base_key,
            self.fraction_key,
            "partial_rotary_factor",
            "original_max_position_embeddings",
        )

    def read(self, config: Config, name: str, where: str) -> Values:
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(key) or {}
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise CheckpointError(f"{where}: {key} {rope!r}: must be an object of numbers, the same for all layers")
        fraction = rope.get("partial_rotary_factor", config.get(self.fraction_key, self.fraction))
        if not self.partial:
            only({**config, **rope}, "partial_rotary_factor", (1.0, None), where)
        keys = {"rope_theta": config.get(self.base_key), **rope}
        positions = whole_in(config, name, where)
        options: Values = {"positions": positions, "rope_base": number_in(keys, "rope_theta", where, self.base)}
        if self.partial:
            options["rope_fraction"] = number_in(
                {"value": fraction}, "value", f"{where}: {self.fraction_key}", self.fraction
            )
        return {**options, **self.scaling(rope, config, positions, f"{where}: {key}" if rope else where)}

    def scaling(self, rope: Config, config: Config, positions: int, where: str) -> Values:
        """Return the options for RoPE scaling."""
        stated_kind = rope.get("rope_type", rope.get("type", "default"))
        kind = dict(self.renamed).get(stated_kind, stated_kind) if isinstance(stated_kind, str) else stated_kind
        if kind not in self.kinds:
            raise CheckpointError(f"{where}: rope_type {stated_kind!r} (valid: {', '.join(self.kinds)})")
        common_keys = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        for name, value in rope.items():
            if name not in (*common_keys, *NUMBERS[str(kind)]) and value is not None:
                raise CheckpointError(f"{where}: {name} {value!r}: is not a key of rope_type {stated_kind!r}")
        if kind in ("default", "dynamic"):  # dynamic scaling has no effect within max_position_embeddings
            return {}
        if kind == "linear":
            return {"rope_interpolation": number_in(rope, "factor", where)}
        outer_original = config.get(ORIGINAL, self.original)  # the key outside `rope` takes precedence
        original = whole_in(rope if outer_original is None else {ORIGINAL: outer_original}, ORIGINAL, where, positions)
        numbers = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[str(kind)](rope, positions, original, where)
        return {"rope_scaling": kind, "rope_original_positions": original, **numbers}

    def write(self, model: ModelConfig, name: str) -> Values:
        values: Values = {name: model.positions, self.base_key: model.rope_base, "rope_scaling": written_scaling(model)}
        if self.partial:
            values[self.fraction_key] = model.rope_fraction
        if self.original is not None:
            values["original_max_position_embeddings"] = model.rope_original_positions
        return values


def _llama3(rope: Config, positions: int, original: int, where: str) -> Values:
    return {
        "rope_scaling_factor": number_in(rope, "factor", where),
        "rope_low_freq_factor": number_in(rope, "low_freq_factor", where),
        "rope_high_freq_factor": number_in(rope, "high_freq_factor", where),
    }


def _yarn(rope: Config, positions: int, original: int, where: str) -> Values:
    factor = number_in(rope, "factor", where, positions / original if "factor" in rope else None)
    magnitude = None
    if rope.get("attention_factor") is not None:
        magnitude = number_in(rope, "attention_factor", where)
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale, mscale_all_dim = (number_in(rope, key, where) for key in ("mscale", "mscale_all_dim"))
        magnitude = (
            1.0
            if factor <= 1
            else (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
        )
    only(rope, "truncate", (True, False), where)
    return {
        "rope_scaling_factor": factor,
        "rope_beta_fast": number_in(rope, "beta_fast", where, 32.0) or 32.0,
        "rope_beta_slow": number_in(rope, "beta_slow", where, 1.0) or 1.0,
        "rope_truncate": rope.get("truncate", True),
        "rope_magnitude": magnitude,
    }


def dynamic(config: Config) -> dict[str, object] | None:
    """Return the `rope_scaling` of a config.json with dynamic scaling. No option expresses dynamic scaling, because it
    has no effect within the model's maximum number of positions."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "dynamic":
            return {"rope_type": "dynamic", "factor": rope.get("factor")}
    return None


def _longrope_magnitude(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0


def _longrope(rope: Config, positions: int, original: int, where: str) -> Values:
    if rope.get("attention_factor") is not None:
        magnitude = number_in(rope, "attention_factor", where)
    elif rope.get("factor") is not None:
        factor = number_in(rope, "factor", where)
        magnitude = _longrope_magnitude(factor, original)
    else:  # based on the file's number of positions, even if a run uses a different number
        magnitude = _longrope_magnitude(positions / original, original)
    return {
        "rope_short_factors": _factors(rope, "short_factor", where),
        "rope_long_factors": _factors(rope, "long_factor", where),
        "rope_magnitude": magnitude,
    }


def _factors(rope: Config, key: str, where: str) -> tuple[float, ...]:
    value = rope.get(key)
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: {key} {value!r}: must be a list of numbers")
    return tuple(number_in({key: each}, key, where) for each in value)


def written_scaling(model: ModelConfig) -> dict[str, object] | None:
    """Return `rope_scaling` for config.json."""
    if model.rope_scaling != "none" and model.rope_interpolation != 1.0:
        raise CheckpointError("rope_scaling and rope_interpolation together: Hugging Face has one or the other")
    if model.rope_scaling == "none":
        linear = {"rope_type": "linear", "factor": model.rope_interpolation}
        return linear if model.rope_interpolation != 1.0 else None
    scaling: dict[str, object] = {
        "rope_type": model.rope_scaling,
        "original_max_position_embeddings": model.rope_original_positions,
    }
    if model.rope_scaling == "llama3":
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        return {**scaling, "factor": model.rope_scaling_factor, "low_freq_factor": low, "high_freq_factor": high}
    magnitude = {} if model.rope_magnitude is None else {"attention_factor": model.rope_magnitude}
    if model.rope_scaling == "longrope":
        factors = {"short_factor": list(model.rope_short_factors), "long_factor": list(model.rope_long_factors)}
        return {**scaling, **factors, **magnitude}
    return {
        **scaling,
        "factor": model.rope_scaling_factor,
        "beta_fast": model.rope_beta_fast,
        "beta_slow": model.rope_beta_slow,
        **({} if model.rope_truncate else {"truncate": False}),
        **magnitude,
    }
