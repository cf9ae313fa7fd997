"""Read and write a run's options as TOML: a table for each section, and a key for each option that is not `None`.

An unknown table or key is an error, whose message contains the file, the table, the key and the nearest valid name. The
functions that read a file return only the values in the file; `config/compose.py` combines these values with presets,
defaults and flags.
"""

from __future__ import annotations

import codecs
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega.core.config.compose import compose, nearest
from mega.core.config.option import EMPTY
from mega.core.config.resolve import default_metrics
from mega.core.config.run import AnyRun, Options, RunConfig, options_with, run_schema, value_of
from mega.core.config.schema import Entry, Schema
from mega.core.untrusted import read_limited

LIMIT = 1 << 20
"""Maximum size, in bytes, of a file written by hand, such as options, corpora, a device description or a chat
template."""
MOST_DOTS = 100
"""Maximum number of dots in a key. The parser takes time quadratic in the number of dots."""
LARGEST = 10**100
"""Upper limit of integers. Larger integers are refused, because arithmetic with them would overflow."""
MOST_PROBLEMS = 20
"""Maximum number of mistakes in one message. In a file that is not a run's TOML, every line may be a mistake."""


def write(run: AnyRun) -> str:
    """Return a run as TOML. If `run` is an `Options`, `parse` converts the returned text back to equal options.

    >>> print(write(Options())[:22])
    [model]
    family = "gpt"
    """
    schema = run_schema()
    return write_values(schema, {name: value_of(run, name) for name in schema.entries})


def run_toml(run: RunConfig) -> str:
    """Return the run.toml of a checkpoint, from which the same run can be started with another --save. It contains all
    options except those that apply to one start of the run (`Option.once`), and except --metrics if its path is the
    default for --save."""
    schema, left_out = run_schema(), options_with(once=True)
    values = {name: value_of(run, name) for name in schema.entries}
    return write_values(schema, _without_derived(values | dict.fromkeys(left_out)))


def _without_derived(values: Mapping[str, object]) -> dict[str, object]:
    """Return `values` without a path of --metrics that is the default for their --save.

    Otherwise a run with these values and another --save would write to the metrics file of the first run. run.toml of
    earlier versions contains this path.

    >>> _without_derived({"save": "runs/a", "metrics": "runs/a/metrics.jsonl"})
    {'save': 'runs/a'}
    """
    save, metrics = values.get("save"), values.get("metrics")
    derived = metrics is not None and metrics == default_metrics(None if save is None else str(save))
    return {name: value for name, value in values.items() if not (derived and name == "metrics")}


def write_values(schema: Schema, values: Mapping[str, object]) -> str:
    """Return all options of `schema` as TOML, with the value in `values` (by name) or else the default."""
    tables = []
    for table in schema.tables:
        lines = [f"[{table}]"]
        for name, entry in schema.entries.items():
            value = values.get(name, None if entry.required else entry.default)
            if entry.section == table and value is not None:
                lines.append(f"{name} = {format_value(value)}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def parse(text: str, source: str = "TOML") -> Options:
    """Return the options in the TOML `text`; options that are not in the text have their defaults. Errors: as in
    `values`."""
    return compose(file=values(text, source))


def read(path: str) -> dict[str, object]:
    """Read a TOML file, and return option name -> value. Errors: ValueError with a line for each mistake."""
    return values(read_text(path, f"--config {path}"), path)


def read_schemas(path: str, *schemas: Schema) -> tuple[dict[str, object], ...]:
    """Read a TOML file with the options of several schemas, whose tables have different names; all else is as in
    `read`."""
    return schema_values(read_text(path, f"--config {path}"), path, *schemas)


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a file written by hand. what: flag and file, for messages. Errors: ValueError."""
    try:
        return read_limited(path, LIMIT, what).removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: must be UTF-8 text; byte {error.start} is not") from None


def values(text: str, source: str) -> dict[str, object]:
    """Parse the TOML `text` of a run, and return option name -> value. source: the file, for messages.

    >>> values('[model]\\nlayers = 2', "run.toml")
    {'layers': 2}
    >>> values('[model]\\nlayer = 2', "run.toml")
    Traceback (most recent call last):
    ...
    ValueError: run.toml: [model] layer: is not an option (nearest: layers)
    """
    return schema_values(text, source, run_schema())[0]


def schema_values(text: str, source: str, *schemas: Schema) -> tuple[dict[str, object], ...]:
    """Parse the TOML `text`, and return option name -> value for each schema. source: the file, for messages. Errors:
    ValueError."""
    problems: list[str] = []
    results: tuple[dict[str, object], ...] = tuple({} for _ in schemas)
    for table, keys in loads(text, source).items():
        index = next((index for index, schema in enumerate(schemas) if table in schema.tables), None)
        if index is None:
            problems.append(f"{source}: [{table}]: {_unknown_table(table, schemas)}")
        elif not isinstance(keys, dict):
            problems.append(f"{source}: {table}: must be a table, written [{table}]")
        else:
            problems += _take(table, keys, schemas[index], source, results[index])
        if len(problems) > MOST_PROBLEMS:
            break
    if problems:
        ellipsis = ["... and more"] if len(problems) > MOST_PROBLEMS else []
        raise ValueError("\n".join(problems[:MOST_PROBLEMS] + ellipsis))
    return tuple(map(_without_derived, results))


def _take(table: str, keys: Mapping[str, object], schema: Schema, source: str, found: dict[str, object]) -> list[str]:
    """Add the values of a table to `found`, and return an error message for each mistake."""
    problems: list[str] = []
    for key, value in keys.items():
        if len(problems) > MOST_PROBLEMS:
            break
        if (problem := unfit(table, key, value, schema)) is not None:
            problems.append(f"{source}: [{table}] {key}: {problem}")
        else:
            found[key] = converted(schema.entries[key], value)
    return problems


def loads(text: str, what: str) -> dict[str, Any]:
    """Return the tables of the TOML `text`. what: the file, for messages. Errors: ValueError."""
    for number, line in enumerate(text.splitlines(), 1):
        keys = line.split("=")[:-1] or [line if "," not in line else ""]
        if max(key.count(".") for key in keys) > MOST_DOTS:
            raise ValueError(f"{what}: is not TOML that can be read: line {number} has a key of over {MOST_DOTS} parts")
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise ValueError(f"{what}: is not TOML that can be read: nested too deeply") from None
    except ValueError as error:  # tomllib also raises ValueError for a number with thousands of digits
        raise ValueError(f"{what}: is not TOML: {error}") from None


def _unknown_table(table: str, schemas: Sequence[Schema]) -> str:
    for schema in schemas:
        if table in schema.entries:
            return f"is not a table; the option {table} belongs under [{schema.entries[table].section}]"
    tables = [name for schema in schemas for name in schema.tables]
    return f"is not a table{nearest(table, tables)}; valid: {', '.join(tables)}"


def unfit(table: str, key: str, value: object, schema: Schema | None = None) -> str | None:
    """Return the reason why a TOML or JSON `value` is invalid for `key` of `table`; None if the value is valid. schema:
    schema of the options; None means that of a run."""
    entries = (schema or run_schema()).entries
    entry = entries.get(key)
    if entry is None:
        names = [name for name, entry in entries.items() if entry.section == table]
        return f"is not an option{nearest(key, names) or nearest(key, entries)}"
    if table not in (entry.section, entry.option.formerly):
        return f"belongs under [{entry.section}], not here"
    if not entry.may_be_empty and "" in (value if isinstance(value, list) else [value]):
        return f'"" {EMPTY}'
    if entry.many:
        if isinstance(value, list) and all(_is(entry.kind, item) for item in value):
            return None
        return f"{quoted(value)} must be a list, each {_NAMES[entry.kind]}"
    if not _is(entry.kind, value):
        return f"{quoted(value)} must be {_NAMES[entry.kind]}{_choices(entry)}"
    if entry.choices and value not in entry.choices:
        return f"{quoted(value)} is not a choice{nearest(str(value), entry.choices)}{_choices(entry)}"
    return None


def quoted(value: object) -> str:
    """Return the text of a value for a message, truncated if the text is long.

    >>> quoted("a" * 200)[-10:], quoted(10**5000)
    ('aaaaaaa...', 'a number with thousands of digits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not convert integers with more digits to text
        return "a number with thousands of digits"
    return cut(text)


def cut(text: str) -> str:
    """Return the first 100 characters of a text that a message quotes."""
    return text if len(text) <= 100 else f"{text[:97]}..."


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a string"}


def _choices(entry: Entry) -> str:
    return f"; valid: {', '.join(entry.choices)}" if entry.choices else ""


def _is(kind: type, value: object) -> bool:
    """Return whether a TOML value has the type `kind`; true is not a number, and 1 is accepted for 1.0."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    if kind is float:
        return is_whole or type(value) is float
    return is_whole if kind is int else type(value) is (str if kind is Path else kind)


def converted(entry: Entry, value: Any) -> object:
    """Convert a valid TOML value to the type of the option."""
    if entry.many:
        return tuple(entry.kind(item) for item in value)
    return entry.kind(value)


def format_value(value: object) -> str:
    """Format a Python value as TOML.

    >>> format_value((0.5, "a\\tb", True))
    '[0.5, "a\\\\tb", true]'
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, (str, Path)):
        # JSON and TOML have the same escapes, except that TOML also escapes DEL.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)
