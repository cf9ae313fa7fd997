"""A whole run as one frozen value, and the list of its sections that every reader walks.

`RunConfig` is what a command line, a TOML file, a preset and a checkpoint all describe. This file knows
the sections and nothing of the options in them.
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


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """Section name -> its dataclass, in the order of panels and TOML tables."""
    hints = get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


@functools.cache
def run_schema() -> Schema:
    """Every section of a run."""
    return schema_of(sections())


def entries() -> Mapping[str, Entry]:
    """Every option of a run by its field name; no two sections share a name."""
    return run_schema().entries


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
