"""Reads a corpus recipe, a TOML file that lists the steps from raw files to a corpus as `mega corpus` commands.

    input = ["raw/*.jsonl.gz"]
    output = "corpus"             a folder; step 2 writes corpus/2-clean, and the last step writes the corpus
    workers = 8                   any flag that is common to all subcommands

    [[step]]
    verb = "clean"
    language = "en"               any flag of the subcommand, with _ or -

This module does not depend on particular subcommands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_OWN = ("input", "output", "step")


class RecipeStep(NamedTuple):
    """A subcommand with its command line and output folder."""

    verb: str
    arguments: list[str]
    output: Path


def steps(path: Path) -> list[RecipeStep]:
    """Read the steps of a recipe. Errors: ValueError naming file, key and violated rule."""
    try:
        recipe = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as TOML: {error}") from None
    inputs, output, step_tables = recipe.get("input"), recipe.get("output"), recipe.get("step")
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, list) or not inputs or not all(isinstance(word, str) for word in inputs):
        raise ValueError(f"{path}: input: must be a path or a list of paths, as input = ['raw/*.jsonl.gz']")
    if not isinstance(output, str) or not output:
        raise ValueError(f"{path}: output: must be a folder, as output = 'corpus'")
    if not isinstance(step_tables, list) or not step_tables:
        raise ValueError(f"{path}: step: must be one or more tables [[step]], each with a verb")
    shared = {key: value for key, value in recipe.items() if key not in _OWN}
    recipe_steps: list[RecipeStep] = []
    for number, step in enumerate(step_tables, 1):
        if not isinstance(step, dict) or not isinstance(step.get("verb"), str):
            raise ValueError(f"{path}: step {number}: must have a verb, as verb = 'clean'")
        step_output = Path(output) / f"{number}-{step['verb']}"
        flags = shared | {key: value for key, value in step.items() if key != "verb"}
        line = ["--input", *inputs, "--output", str(step_output), *_flags(flags, f"{path}: step {number}")]
        recipe_steps.append(RecipeStep(step["verb"], line, step_output))
        inputs = [str(step_output)]  # the next step reads the output of this step
    return recipe_steps


def _flags(options: Mapping[str, object], location: str) -> Iterator[str]:
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        elif isinstance(value, str | int | float):
            yield from (flag, str(value))
        else:
            raise ValueError(f"{location}: {key}: must be text, a number, true or false, or a list of these")
