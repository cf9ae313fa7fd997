"""The options of a run as given by the user (`Options`) and as resolved (`RunConfig`): two frozen dataclasses with the
same sections.

    preset < TOML file < flags        config/compose.py          the Options that the user gave
    values from weights and data      training/start/inputs.py   the model of --load, steps of --epochs: still Options
    check(options, world)             config/check.py            every rule, all mistakes at once; returns nothing
    resolve(options, world, vocab)    config/resolve.py          the RunConfig, in which every derived value is set
    launch, ranks, loop, checkpoint   training/start/rank.py     read the RunConfig

In `Options`, None may mean "derive this value". Only `updated` changes options, by returning a copy with other values.
In a `RunConfig`, None means "not used". `resolve` makes a `RunConfig`, the ranks receive it, and run.toml stores it; no
code replaces a value in a `RunConfig`. Code that examines another run, such as the estimate, resolves other options
(`variant`). The types enforce this order: `check`, `resolve` and `updated` do not accept a `RunConfig`.

If a section has derived fields, the section's class in a `RunConfig` is a subclass of its class in `Options`
(sections.py), so code that reads either class, such as `value_of` and config/toml.py, is written once. Instances of the
two classes are never equal, so compare a resolved model only with a resolved model. This module depends on the names of
sections, but not on the names of options.
"""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from mega.core.config.option import Range, Section
from mega.core.config.schema import Entry, Schema, schema_of
from mega.core.config.sections import (
    BatchConfig,
    BatchOptions,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FinetuningConfig,
    GuardConfig,
    LogConfig,
    LogOptions,
    MaskingConfig,
    MemoryConfig,
    ModelConfig,
    ModelOptions,
    OptimizerConfig,
    ParallelConfig,
    ParallelOptions,
    PrecisionConfig,
    PrecisionOptions,
    RuntimeConfig,
    ScheduleConfig,
    ScheduleOptions,
    SupervisionConfig,
    TokenizerConfig,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run as given by the user. Each section is a panel of flags and a table of the TOML file."""

    model: ModelOptions = ModelOptions()
    precision: PrecisionOptions = PrecisionOptions()
    parallel: ParallelOptions = ParallelOptions()
    batch: BatchOptions = BatchOptions()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleOptions = ScheduleOptions()
    memory: MemoryConfig = MemoryConfig()
    data: DataConfig = DataConfig()
    masking: MaskingConfig = MaskingConfig()
    finetuning: FinetuningConfig = FinetuningConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogOptions = LogOptions()
    guards: GuardConfig = GuardConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    supervision: SupervisionConfig = SupervisionConfig()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of a resolved run, in which every derived value is set."""

    model: ModelConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memory: MemoryConfig
    data: DataConfig
    masking: MaskingConfig
    finetuning: FinetuningConfig
    tokenizer: TokenizerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    guards: GuardConfig
    runtime: RuntimeConfig
    supervision: SupervisionConfig


AnyRun = Options | RunConfig
"""Either class of options, for functions that read an option by its name."""


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """Return a map from section name to dataclass, in the order of panels and TOML tables."""
    hints = get_type_hints(Options)
    return {field.name: hints[field.name] for field in dataclasses.fields(Options)}


@functools.cache
def run_schema() -> Schema:
    """Return the schema of a run, which contains all sections of a run."""
    return schema_of(sections())


def entries() -> Mapping[str, Entry]:
    """Return a map from field name to entry, with every option of a run. Field names are unique among all sections."""
    return run_schema().entries


def options_with(**properties: object) -> list[str]:
    """Return the names of the options with the given properties, in the order of sections.

    >>> options_with(bench="host")
    ['nproc', 'device', 'backend', 'timeout_minutes']
    """
    required = properties.items()
    return [
        name
        for name, entry in entries().items()
        if all(getattr(entry.option, property) == value for property, value in required)
    ]


def updated(options: Options, values: Mapping[str, object]) -> Options:
    """Return a copy of `options` with new `values`, by field name.

    >>> updated(Options(), {"layers": 2, "lr": 1e-4}).model.layers
    2
    """
    by_section: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        by_section.setdefault(entries()[name].section, {})[name] = value
    return dataclasses.replace(
        options,
        **{section: dataclasses.replace(getattr(options, section), **new) for section, new in by_section.items()},
    )


def value_of(run: AnyRun, name: str) -> Any:
    """Return the value of the option with field name `name`."""
    return getattr(getattr(run, entries()[name].section), name)


def flag_of(name: str) -> str:
    """Return the flag of the option with field name `name`."""
    return entries()[name].flag


def is_set_to(run: AnyRun, name: str, valid: tuple[str, ...] | Range) -> bool:
    """Return whether an option has one of the `valid` values. As in `Option.needs`, () means any value except None and
    off."""
    value = value_of(run, name)
    if isinstance(valid, Range):
        return value is not None and valid.holds(value)
    return value in valid if valid else value not in (None, False, ())
