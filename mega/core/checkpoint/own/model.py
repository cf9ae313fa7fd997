"""Read the model section from a checkpoint's plain state, and check it option by option. No other module reads the
model section from plain state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

from mega.core.architecture import parameters
from mega.core.checkpoint.own.pieces import CheckpointError, Tensors
from mega.core.config.check_mixture import choice
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.run import entries
from mega.core.config.sections import ModelConfig
from mega.core.config.toml import unfit
from mega.core.untrusted import Json, below

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "positions")
"""Names of sizes that every resolved model section contains."""


def check_model(model: ModelConfig, where: str) -> None:
    """Check the model section of another program's checkpoint. Errors: CheckpointError naming an option whose value is
    out of range."""
    model_of({"config": {"model": dataclasses.asdict(model)}}, where)


def model_of(meta: Mapping[str, Json], where: str) -> ModelConfig:
    """Return the model section of a checkpoint. Errors: CheckpointError naming the option that is missing, unknown or
    invalid."""
    fields = below(meta, "config", "model")
    if not fields:
        raise CheckpointError(f"{where}: meta holds no config.model")
    options = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := sorted(set(fields) - options):
        raise CheckpointError(f"{where}: config.model.{unknown[0]} is unknown to this version")
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    for name, value in {**dict.fromkeys(SIZES), **fields}.items():
        option = entries()[name].option
        within, problem = option.within, None if value is None else unfit("model", name, value)
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
        if problem is None and within is not None and not all(map(within.holds, numbers)):
            problem = f"{value!r} must be {within.rule}"
        if problem is None and isinstance(value, int) and value > option.most:
            problem = f"{value} must be at most {option.most}"
        if problem is None and value is None and name in SIZES:
            problem = "is missing"
        if problem is not None:
            raise CheckpointError(f"{where}: config.model.{name}: {problem}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if values.get("qkv_bias") is None:  # the same default as on the command line
        values["qkv_bias"] = values.get("bias", entries()["bias"].default)
    model = ModelConfig(**values)
    for name, rule in choice(model) if model.experts else ():
        raise CheckpointError(f"{where}: config.model.{name}: {getattr(model, name)} {rule}")
    stacks = FAMILY_DEFAULTS[model.family].stacks
    if len(model.stacks) < stacks:
        raise CheckpointError(f"{where}: config.model.decoder_layers: is missing")
    return model


def check_size(model: ModelConfig, tensors: Tensors, where: str) -> None:
    """Check that the files contain about as many elements as the model. A malicious config may describe a model that
    does not fit into memory.

    Errors: CheckpointError if the files contain far fewer elements than the model.
    """
    elements = sum(prod(shape) for shape, _ in tensors.values())
    few = f"{where}: {len(tensors)} tensors of {elements:,} elements do not hold its"
    if model.experts * (model.hidden or 1) > elements:  # a router has a row for each expert; before they are listed
        raise CheckpointError(f"{few} {model.experts:,} experts")
    if model.layers > len(tensors) or parameters(model) > 4 * elements:
        raise CheckpointError(f"{few} {model.layers} layers")
