"""A whole run as one frozen value, and the list of its sections that every reader walks.

`RunConfig` is what a command line, a TOML file, a preset and a checkpoint all describe. This file knows
the sections and nothing of the options in them.
"""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mega.core.config.option import Option, Range, Section, describe
from mega.core.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FinetuningConfig,
    LogConfig,
    MaskingConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
    ScheduleConfig,
    TokenizerConfig,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run; each section is a panel of flags and a table of the TOML file."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()
    data: DataConfig = DataConfig()
    masking: MaskingConfig = MaskingConfig()
    finetuning: FinetuningConfig = FinetuningConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class Entry(NamedTuple):
    """One option as its readers need it: where it lies, what it may hold, and how it is described."""

    section: str
    """Name of the section within `RunConfig`, which is also the TOML table."""
    title: str
    """Heading of the section's panel of flags."""
    name: str
    """Field name, which is also the TOML key: `seq_length`."""
    kind: type
    """`int`, `float`, `str` or `bool`; of the items where `many`."""
    many: bool
    """A tuple of `kind`."""
    optional: bool
    """`None`, meaning "derived", is a value."""
    literal: tuple[str, ...]
    """The values of a `Literal`, or ()."""
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The only valid values, or ()."""
        return self.literal if self.option.choices is None else tuple(self.option.choices)

    @property
    def flag(self) -> str:
        """The flag as a user types it.

        >>> entries()["seq_length"].flag
        '--seq-length'
        """
        return "--" + self.name.replace("_", "-")

    @property
    def off(self) -> str:
        """The flag that switches a `bool` off.

        >>> entries()["bias"].off
        '--no-bias'
        """
        return "--no-" + self.name.replace("_", "-")


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """Section name -> its dataclass, in the order of panels and TOML tables."""
    hints = get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Every option of a run by its field name; no two sections share a name."""
    found: dict[str, Entry] = {}
    for section, cls in sections().items():
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            assert field.name not in found, f"option {field.name} is defined twice"
            kind, many, optional, literal = _shape(hints[field.name])
            found[field.name] = Entry(
                section=section,
                title=cls.title,
                name=field.name,
                kind=kind,
                many=many,
                optional=optional,
                literal=literal,
                default=field.default,
                option=describe(field, cls),
            )
    return found


def options_with(**properties: Any) -> list[str]:
    """Names of the options whose properties are these, in the order of sections.

    >>> options_with(bench="host")
    ['nproc', 'device', 'backend', 'timeout_minutes']
    """
    wanted = properties.items()
    return [
        name
        for name, entry in entries().items()
        if all(getattr(entry.option, property) == value for property, value in wanted)
    ]


def updated(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`run` with options replaced by field name.

    >>> updated(RunConfig(), {"layers": 2, "lr": 1e-4}).model.layers
    2
    """
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(entries()[name].section, {})[name] = value
    return dataclasses.replace(
        run,
        **{section: dataclasses.replace(getattr(run, section), **new) for section, new in by_section.items()},
    )


def value_of(run: RunConfig, name: str) -> Any:
    """The value of an option by its field name."""
    return getattr(getattr(run, entries()[name].section), name)


def flag_of(name: str) -> str:
    """The flag of an option by its field name."""
    return entries()[name].flag


def found_with(run: RunConfig, name: str, valid: tuple[str, ...] | Range) -> bool:
    """Whether an option holds one of `valid`, as `Option.needs` lists them: (), any value but none and off."""
    value = value_of(run, name)
    if isinstance(valid, Range):
        return value is not None and valid.holds(value)
    return value in valid if valid else value not in (None, False, ())


def _shape(hint: Any) -> tuple[type, bool, bool, tuple[str, ...]]:
    """Takes a field's type apart: kind, many, optional, values of a `Literal`."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is Literal:
        return str, False, optional, get_args(hint)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True, optional, ()
    assert hint in (int, float, str, bool), f"no flag can hold a {hint}"
    return hint, False, optional, ()
