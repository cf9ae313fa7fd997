"""One line per option: what a field of a config section is, to every reader of it.

A section is a frozen, keyword-only dataclass whose fields are made by `option`. The field *is* the
command-line flag, the TOML key, the line of help and the Megatron-LM spelling: nothing about an option
is written a second time anywhere. This file knows neither Typer nor TOML; they read `Option`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class _TakesValue:
    """The Megatron-LM flag carries the value itself, as `--num-layers 24` does."""

    def __repr__(self) -> str:
        return "VALUE"


VALUE = _TakesValue()


@dataclass(frozen=True)
class weak:
    """A constant that gives way to any other flag of the same option.

    `--recompute-activations` means "selective", unless `--recompute-granularity full` stands beside it.
    """

    value: Any


@dataclass(frozen=True)
class Range:
    """The numbers that an option may hold: a test, and the same in words behind "must be"."""

    rule: str
    holds: Callable[[float], bool]


COUNT = Range("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Range("at least 0, and finite", lambda value: 0 <= value < math.inf)
POSITIVE = Range("greater than 0, and finite", lambda value: 0 < value < math.inf)
SHARE = Range("greater than 0 and at most 1", lambda value: 0 < value <= 1)
BELOW_ONE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
SEED = Range("0 to 4294967295", lambda value: 0 <= value < 2**32)
ZERO_STAGE = Range("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3))


@dataclass(frozen=True)
class Option:
    """What `option` stores in a field's metadata.

    help: one sentence, no full stop.
    megatron: Megatron-LM spelling -> `VALUE` if it carries the value, a mapping if it carries the value under
        another name (`{"--normalization": {"RMSNorm": "rmsnorm"}}`), else the constant it stands for
        (`{"--swiglu": "swiglu"}`, `{"--disable-bias-linear": False}`).
    short: a one-letter flag such as "-o", or None.
    common: shown in the short `--help`; the rest appears under `--help-all`.
    unit: what a number counts, for help and messages ("samples", "minutes").
    within: the range of a number, or of each number of a tuple.
    """

    help: str
    megatron: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    short: str | None = None
    common: bool = False
    unit: str | None = None
    within: Range | None = None


def option(
    default: Any,
    help: str,
    *,
    megatron: str | Mapping[str, Any] | None = None,
    short: str | None = None,
    common: bool = False,
    unit: str | None = None,
    within: Range | None = None,
) -> Any:
    """A dataclass field that is also a flag. `megatron` as a plain string means that flag with a value."""
    if megatron is None:
        spellings: Mapping[str, Any] = {}
    elif isinstance(megatron, str):
        spellings = {megatron: VALUE}
    else:
        spellings = dict(megatron)
    described = Option(help=help, megatron=spellings, short=short, common=common, unit=unit, within=within)
    return dataclasses.field(default=default, metadata={"option": described})


def describe(field: dataclasses.Field[Any]) -> Option:
    """The `Option` behind a field of a section."""
    described: Option = field.metadata["option"]
    return described
