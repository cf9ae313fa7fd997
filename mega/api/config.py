"""Make the options of a run from a preset, a TOML file and keyword arguments. This module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mega.core.config import toml
from mega.core.config.compose import compose, nearest
from mega.core.config.families import check_typed
from mega.core.config.run import Options, run_schema, updated, value_of
from mega.core.config.schema import Schema
from mega.core.hub.folders import with_folders


def config(preset: str | None = None, *, file: str | Path | None = None, **options: object) -> Options:
    """Return the options of a run from a preset listed by `mega presets`, a TOML file, and keyword arguments. The file
    overrides the preset, and keyword arguments override both.

    A keyword argument is a flag of `mega pretrain` written with underscores: `--lr-warmup-steps 200` is
    `lr_warmup_steps=200`. `docs/configuration.md` lists all options. The value None leaves an option unset.

    Errors: ValueError naming the preset, file or option, its value, and the valid values.

    >>> run = config("gpt2-124m", lr=6e-4, tp=2)
    >>> run.model.layers, run.optimizer.lr, run.parallel.tp
    (12, 0.0006, 2)
    >>> config("gpt2-124m", num_layers=6)
    Traceback (most recent call last):
    ...
    ValueError: num_layers: is not an option (nearest: layers)
    """
    schema = run_schema()
    left_out = {name for name, value in options.items() if value is None and name in schema.entries}
    keywords = checked_keywords({name: value for name, value in options.items() if name not in left_out}, schema)
    stored = {} if file is None else toml.read(os.fspath(file))
    run = compose(preset, stored, keywords)
    check_typed(run, {**stored, **keywords}, ())
    return run


def with_options(run: Options, options: Mapping[str, object]) -> Options:
    """Return `run` with options replaced by keyword arguments. Names on the Hugging Face Hub are replaced with paths of
    downloaded files.

    Errors: ValueError naming the option; OSError if a download fails.
    """
    replaced = updated(run, checked_keywords(options, run_schema())) if options else run
    stored = {name: value_of(replaced, name) for name in run_schema().entries}
    fetched = with_folders(stored, run_schema().entries.values())
    return updated(replaced, {name: value for name, value in fetched.items() if value != stored[name]})


def checked_keywords(options: Mapping[str, object], schema: Schema) -> dict[str, object]:
    """Convert the values of keyword arguments to the option types in `schema`. Errors: ValueError with one line per
    mistake.

    >>> checked_keywords({"tp": "two"}, run_schema())
    Traceback (most recent call last):
    ...
    ValueError: tp: 'two' must be a whole number
    """
    values: dict[str, object] = {}
    problems = []
    for name, value in options.items():
        entry = schema.entries.get(name)
        if entry is None:
            problems.append(f"{name}: is not an option{_nearest(name, schema)}")
            continue
        # TOML has no null, so None is accepted here and not by toml.unfit.
        if value is None and entry.optional:
            values[name] = None
            continue
        plain = _plain(value)
        if entry.many and not isinstance(plain, list):
            plain = [plain]
        if (problem := toml.unfit(entry.section, name, plain, schema)) is not None:
            problems.append(f"{name}: {problem}")
        else:
            values[name] = toml.converted(entry, plain)
    if problems:
        raise ValueError("\n".join(problems))
    return values


def _nearest(name: str, schema: Schema) -> str:
    """Return a hint for a message about an unknown name: the option that Megatron-LM calls by this name or that has it
    as a synonym, or else the option with the most similar name."""
    flag = "--" + name.replace("_", "-")
    synonyms = (each.name for each in schema.entries.values() if flag in (*each.option.megatron, *each.option.synonyms))
    return nearest(name, schema.entries) if (synonym := next(synonyms, None)) is None else f" (nearest: {synonym})"


def _plain(value: object) -> object:
    """Convert the value to TOML types: paths to strings, and tuples to lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
