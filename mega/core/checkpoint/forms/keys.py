"""Translate module names to other tools' names, and check keys of other tools' configuration files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from mega.core.architecture import architecture
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig

TRAINING = (
    *("vocab_multiple", "hidden_dropout", "attention_dropout", "init_std"),
    *("balance", "balance_loss", "balance_bias_rate", "z_loss", "router_jitter", "router_dtype"),
    *("capacity_factor", "drop_policy", "pad_to_capacity"),
)
"""Options of a model that affect only training, not the outputs for given weights."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def translated(name: str, modules: Mapping[str, str], block: str, number: int | None = None) -> str:
    """Return another tool's name for a logical tensor.

    modules: the project's module -> the other tool's module; modules in a block are listed by their names within the
    block. block: prefix of the other tool's names in a block, with {} for the block's index. number: the other tool's
    index of the block, if it differs from the project's.

    >>> translated("model.layers.3.mlp.up_proj.bias", {"mlp.up_proj": "fc1"}, "decoder.layers.{}.")
    'decoder.layers.3.fc1.bias'
    """
    module, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(module):
        return f"{block.format(match[1] if number is None else number)}{modules[match[2]]}.{kind}"
    return f"{modules[module]}.{kind}"


def whole_in(config: Mapping[str, object], key: str, where: str, otherwise: int | None = None) -> int:
    """Return the positive integer at `key`, or `otherwise` if the key is absent or null. where: the file to name in
    errors."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or not 0 < value < 1 << 40:
        raise CheckpointError(f"{where}: {key} {value!r}: must be a positive whole number")
    return value


def number_in(config: Mapping[str, object], key: str, where: str, otherwise: float | None = None) -> float:
    """Return the number at `key`, or `otherwise` if the key is absent or null. where: the file to name in errors."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where}: {key} {value!r}: must be a number")
    return float(value)


def check_round_trip(model: ModelConfig, read: ModelConfig, whose: str, unsupported: Collection[str] = ()) -> None:
    """Check that a format can express a model completely. read: the model obtained by reading the written files back.
    whose: the format's name in error messages. unsupported: options that the format cannot express. These options may
    differ.

    Options that only training uses (`TRAINING`) and options that have no effect in this model may differ too. The two
    models may have different families with the same architecture, such as GPT and Llama.
    Errors: CheckpointError naming the first option that the written files do not preserve.
    """
    reread = dataclasses.asdict(read)
    allowed = {name: reread.pop(name) for name in (*TRAINING, *unsupported)}
    expected = architecture(dataclasses.replace(model, **allowed))
    if dataclasses.replace(expected, family=read.family) == architecture(read):
        return
    for name, value in dataclasses.asdict(model).items():
        if name == "family" or value == reread.get(name, value):
            continue
        if architecture(dataclasses.replace(model, **{name: reread[name]})) != architecture(model):
            available = "none" if reread[name] is None else f"only {reread[name]}"
            raise CheckpointError(f"{name} {value}: {whose} has {available}")
    if "family" not in allowed:
        raise CheckpointError(f"family {model.family}: {whose} has only {read.family}")


def check_decoder(model: ModelConfig, whose: str) -> None:
    """Check that a model is a left-to-right language model, as all models of a format are. whose: the format's name in
    error messages. Errors: CheckpointError."""
    if not all(stack.layers[0].attention.causal for stack in architecture(model).stacks):
        raise CheckpointError(f"family {model.family}: {whose} is a left-to-right decoder")


def check_known(config: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Check that all keys of a config.json are known. Errors: CheckpointError naming the file `where` and a key that
    has a value but is not in `known`."""
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value is not None:
            text = repr(value)
            text = text if len(text) <= 60 else f"{text[:57]}..."
            raise CheckpointError(
                f"{where}: {name} {text}: is not a known key of model_type {config.get('model_type')!r}; take it out "
                "if it changes nothing of what the model computes"
            )


def only(config: Mapping[str, object], key: str, valid: tuple[object, ...], where: str) -> None:
    """Check that `key` is absent or has a value in `valid`. Errors: CheckpointError naming the file `where`, the key
    and its value."""
    if key in config and config[key] not in valid:
        raise CheckpointError(f"{where}: {key} {config[key]!r} (valid: {valid[0]!r})")
