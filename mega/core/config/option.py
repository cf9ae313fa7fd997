"""One line per option: what a field of a config section is, to every reader of it.

A section is a frozen, keyword-only dataclass whose fields are made by `option`. The field *is* the
command-line flag, the TOML key, the line of help and the Megatron-LM spelling: nothing about an option
is written a second time anywhere. This file knows neither Typer nor TOML; they read `Option`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar


class _TakesValue:
    """The Megatron-LM flag carries the value itself, as `--num-layers 24` does."""

    def __repr__(self) -> str:
        return "VALUE"


VALUE = _TakesValue()

Section = TypeVar("Section")


@dataclass(frozen=True)
class Option:
    """What `option` stores in a field's metadata.

    help: one sentence, no full stop.
    megatron: Megatron-LM spelling -> `VALUE` if it carries the value, else the constant it stands for
        (`{"--swiglu": "swiglu"}`, `{"--disable-bias-linear": False}`).
    short: a one-letter flag such as "-o", or None.
    common: shown in the short `--help`; the rest appears under `--help-all`.
    unit: what a number counts, for help and messages ("samples", "minutes").
    """

    help: str
    megatron: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    short: str | None = None
    common: bool = False
    unit: str | None = None


def option(
    default: Any,
    help: str,
    *,
    megatron: str | Mapping[str, Any] | None = None,
    short: str | None = None,
    common: bool = False,
    unit: str | None = None,
) -> Any:
    """A dataclass field that is also a flag. `megatron` as a plain string means that flag with a value."""
    if megatron is None:
        spellings: Mapping[str, Any] = {}
    elif isinstance(megatron, str):
        spellings = {megatron: VALUE}
    else:
        spellings = dict(megatron)
    described = Option(help=help, megatron=spellings, short=short, common=common, unit=unit)
    return dataclasses.field(default=default, metadata={"option": described})


def describe(field: dataclasses.Field[Any]) -> Option:
    """The `Option` behind a field of a section."""
    described: Option = field.metadata["option"]
    return described


def section(title: str) -> Any:
    """Class decorator: a frozen, keyword-only dataclass whose `title` heads its panel of flags."""

    def decorate(cls: type[Section]) -> type[Section]:
        made: type[Section] = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        made.title = title  # type: ignore[attr-defined]
        return made

    return decorate
