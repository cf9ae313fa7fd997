"""Names of other tools: of modules, and of keys of their configuration files with the kinds of their values."""

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
"""Options of a model that change nothing of what its weights compute."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def translated(name: str, modules: Mapping[str, str], block: str, number: int | None = None) -> str:
    """Another tool's name of a logical tensor.

    modules: ours (of a block, without its number) -> theirs. block: what theirs are called in a block, with {} for its
    number, which is `number` where theirs differs.

    >>> translated("model.layers.3.mlp.up_proj.bias", {"mlp.up_proj": "fc1"}, "decoder.layers.{}.")
    'decoder.layers.3.fc1.bias'
    """
    module, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(module):
        return f"{block.format(match[1] if number is None else number)}{modules[match[2]]}.{kind}"
    return f"{modules[module]}.{kind}"


def whole_in(config: Mapping[str, object], key: str, where: str, otherwise: int | None = None) -> int:
    """The positive whole number `key` of the file `where`; `otherwise` where it is absent or null."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or not 0 < value < 1 << 40:
        raise CheckpointError(f"{where}: {key} {value!r}: must be a positive whole number")
    return value


def number_in(config: Mapping[str, object], key: str, where: str, otherwise: float | None = None) -> float:
    """The number `key` of the file `where`; `otherwise` where it is absent or null."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where}: {key} {value!r}: must be a number")
    return float(value)


def check_kept(model: ModelConfig, read: ModelConfig, whose: str, unsaid: Collection[str] = ()) -> None:
    """That a form holds a whole model. read: what its own files are read back as. unsaid: options that it has no place
    for.

    What only training reads (`TRAINING`) may differ, and options that change nothing where others are as they are. The
    two may be of two families whose architectures are one, as GPT and Llama.
    Errors: CheckpointError naming the first option that `whose` files do not keep.
    """
    theirs = dataclasses.asdict(read)
    left = {name: theirs.pop(name) for name in (*TRAINING, *unsaid)}
    kept = architecture(dataclasses.replace(model, **left))
    if dataclasses.replace(kept, family=read.family) == architecture(read):
        return
    for name, ours in dataclasses.asdict(model).items():
        if name == "family" or ours == theirs.get(name, ours):
            continue
        if architecture(dataclasses.replace(model, **{name: theirs[name]})) != architecture(model):
            has = "none" if theirs[name] is None else f"only {theirs[name]}"
            raise CheckpointError(f"{name} {ours}: {whose} has {has}")
    if "family" not in left:
        raise CheckpointError(f"family {model.family}: {whose} has only {read.family}")


def check_known(config: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Errors: CheckpointError naming a key of the config.json `where` that says something and is not known."""
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value is not None:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise CheckpointError(
                f"{where}: {name} {shown}: is not a known key of model_type {config.get('model_type')!r}; take it out "
                "if it changes nothing of what the model computes"
            )


def only(config: Mapping[str, object], key: str, valid: tuple[object, ...], where: str) -> None:
    """Errors: CheckpointError where `key` of the file `where` has a value that nothing here corresponds to."""
    if key in config and config[key] not in valid:
        raise CheckpointError(f"{where}: {key} {config[key]!r} (valid: {valid[0]!r})")
