"""Values of other tools' configuration files, each by its key, its kind and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega.core.checkpoint.own.pieces import CheckpointError


def whole_in(config: Mapping[str, Any], key: str, where: str, otherwise: int | None = None) -> int:
    """The positive whole number `key` of the file `where`; `otherwise` where it is absent or null."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or not 0 < value < 1 << 40:
        raise CheckpointError(f"{where}: {key} {value!r}: must be a positive whole number")
    return value


def number_in(config: Mapping[str, Any], key: str, where: str, otherwise: float | None = None) -> float:
    """The number `key` of the file `where`; `otherwise` where it is absent or null."""
    value = config.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where}: {key} {value!r}: must be a number")
    return float(value)


def only(config: Mapping[str, Any], key: str, valid: tuple[Any, ...], where: str) -> None:
    """Errors: CheckpointError where `key` of the file `where` has a value that nothing here corresponds to."""
    if key in config and config[key] not in valid:
        raise CheckpointError(f"{where}: {key} {config[key]!r} (valid: {valid[0]!r})")
