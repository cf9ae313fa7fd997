"""Check the plain state of a run, stored as `meta` in the manifest: every value used in computation must have a valid
type and range.

This module defines which names are valid. It does not require any value to be present; the code that uses a value
checks this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.run import entries
from mega.core.untrusted import Json

_LARGEST = 1 << 62


class _Rule(NamedTuple):
    holds: Callable[[object], bool]  # whether a value is valid
    words: str  # the rule, a phrase to follow "must be"


def _number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _whole(value: object) -> bool:
    return _number(value) and abs(value) < _LARGEST and value == int(value)


_COUNT = _Rule(lambda value: type(value) is int and 0 <= value < _LARGEST, "a count")
_WHOLE = _Rule(_whole, "a whole number")
_SCALE = _Rule(lambda value: _number(value) and 0 < value < math.inf, "a number above 0")
_NUMBER = _Rule(lambda value: _number(value) and math.isfinite(value), "a finite number")
_THREADS = _Rule(lambda value: value is None or _COUNT.holds(value), "a count, or null")
_RULE_NUMBER = _Rule(lambda value: value in (1, 2) and type(value) is int, "1 or 2")
_SWITCH = _Rule(lambda value: isinstance(value, bool), "true or false")
_NOTE = _Rule(lambda value: value is None or isinstance(value, str), "a text")

PROGRESS = ("step", "consumed", "consumed_valid", "skipped", "skipped_samples")
_FORMER = ("unscheduled",)
_VALUES = {"updates": _COUNT, "dropout_rule": _RULE_NUMBER, "threads": _THREADS, "tp_overlap": _SWITCH}
_SCALER = {"scale": _SCALE, "clean": _WHOLE, "patience": _WHOLE}


def check_plain_state(meta: Mapping[str, Json], where: str) -> None:
    """Check the plain state `meta`. Errors: CheckpointError naming the file `where`, the value and the rule."""
    for name, rule in _VALUES.items():
        if name in meta:
            _check(meta[name], rule, where, f"meta.{name}")
    progress = _object(meta.get("progress"), where, "progress")
    _check_each(progress, dict.fromkeys((*PROGRESS, *_FORMER), _COUNT), where, "progress")
    scaler = _object(meta.get("scaler"), where, "scaler")
    _check_each(scaler, _SCALER, where, "scaler")
    if scaler and (missing := sorted(_SCALER.keys() - scaler.keys())):
        raise CheckpointError(f"{where}: meta.scaler: has no {missing[0]}")
    layout = _object(meta.get("layout"), where, "layout")
    _check_each(layout, dict.fromkeys(layout, _COUNT), where, "layout")
    for prefix, content in _object(meta.get("corpora"), where, "corpora").items():
        hashes = _object(content, where, f"corpora.{prefix}")
        _check_each(hashes, dict.fromkeys(hashes, _NOTE), where, f"corpora.{prefix}")
    _check_config(_object(meta.get("config"), where, "config"), where)


def _check_config(config: Mapping[str, Json], where: str) -> None:
    """Check the numeric options, except those of the model, for which model.py has stricter rules."""
    for section, values in config.items():
        for name, value in _object(values, where, f"config.{section}").items():
            entry = entries().get(name)
            numeric = entry is not None and entry.section == section != "model" and not entry.many
            if numeric and entry is not None and value is not None and entry.kind in (int, float):
                _check(value, _WHOLE if entry.kind is int else _NUMBER, where, f"meta.config.{section}.{name}")


def _object(value: Json, where: str, name: str) -> dict[str, Json]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: meta.{name}: must be an object")
    return value


def _check_each(values: Mapping[str, Json], rules: Mapping[str, _Rule], where: str, name: str) -> None:
    for key, value in values.items():
        if key not in rules:
            raise CheckpointError(f"{where}: meta.{name}.{key} is unknown to this version")
        _check(value, rules[key], where, f"meta.{name}.{key}")


def _check(value: Json, rule: _Rule, where: str, name: str) -> None:
    if not rule.holds(value):
        value_text = str(value) if isinstance(value, int | float) else repr(value)
        raise CheckpointError(f"{where}: {name}: {value_text[:40]} must be {rule.words}")
