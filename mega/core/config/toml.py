"""A run as a TOML file: one table a section, one key an option, `None` written as absence.

Reading refuses what it does not know, naming file, table, key and the nearest valid one. What it returns is
only what the file holds: presets, defaults and flags meet in config/compose.py.
"""

from __future__ import annotations

import json
import math
import tomllib
from typing import Any

from mega.core.config.compose import compose, nearest
from mega.core.config.run import Entry, RunConfig, entries, sections, value_of


def write(run: RunConfig) -> str:
    """The whole run as TOML; `parse` of it is equal to `run`.

    >>> print(write(RunConfig())[:22])
    [model]
    family = "gpt"
    """
    tables = []
    for section in sections():
        lines = [f"[{section}]"]
        for name, entry in entries().items():
            if entry.section == section and (value := value_of(run, name)) is not None:
                lines.append(f"{name} = {format_value(value)}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def parse(text: str, source: str = "TOML") -> RunConfig:
    """The run that `text` describes above the defaults; ValueError as `values` raises."""
    return compose(file=values(text, source))


def read(path: str) -> dict[str, Any]:
    """Option name -> value of the TOML file at `path`; ValueError naming the file for each mistake."""
    try:
        with open(path, encoding="utf-8") as file:
            return values(file.read(), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: must be UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from None


def values(text: str, source: str) -> dict[str, Any]:
    """Option name -> value, of TOML `text` that came from `source`.

    >>> values('[model]\\nlayers = 2', "run.toml")
    {'layers': 2}
    >>> values('[model]\\nlayer = 2', "run.toml")
    Traceback (most recent call last):
    ...
    ValueError: run.toml: [model] layer: is not an option (nearest: layers)
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{source}: is not TOML that can be read: nested too deeply") from None
    problems: list[str] = []
    found: dict[str, Any] = {}
    for table, keys in tables.items():
        if table not in sections():
            problems.append(f"{source}: [{table}]: {_unknown_table(table)}")
        elif not isinstance(keys, dict):
            problems.append(f"{source}: {table}: must be a table, written [{table}]")
        else:
            for key, value in keys.items():
                if (problem := unfit(table, key, value)) is not None:
                    problems.append(f"{source}: [{table}] {key}: {problem}")
                else:
                    found[key] = _held(entries()[key], value)
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _unknown_table(table: str) -> str:
    if table in entries():
        return f"is not a table; the option {table} belongs under [{entries()[table].section}]"
    return f"is not a table{nearest(table, sections())}; valid: {', '.join(sections())}"


def unfit(table: str, key: str, value: Any) -> str | None:
    """Why `value`, of TOML or JSON, cannot stand at `key` of `table`, or None if it can."""
    entry = entries().get(key)
    if entry is None:
        own = [name for name, entry in entries().items() if entry.section == table]
        return f"is not an option{nearest(key, own) or nearest(key, entries())}"
    if entry.section != table:
        return f"belongs under [{entry.section}], not here"
    if entry.many:
        if isinstance(value, list) and all(_is(entry.kind, item) for item in value):
            return None
        return f"{value!r} must be a list, each {_NAMES[entry.kind]}"
    if not _is(entry.kind, value):
        return f"{value!r} must be {_NAMES[entry.kind]}{_choices(entry)}"
    if entry.choices and value not in entry.choices:
        return f"{value!r} is not a choice{nearest(value, entry.choices)}{_choices(entry)}"
    return None


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _choices(entry: Entry) -> str:
    return f"; valid: {', '.join(entry.choices)}" if entry.choices else ""


def _is(kind: type, value: Any) -> bool:
    """Whether a TOML value is of `kind`; true is not a number, and 1 is accepted for 1.0."""
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _held(entry: Entry, value: Any) -> Any:
    if entry.many:
        return tuple(entry.kind(item) for item in value)
    return entry.kind(value)


def format_value(value: Any) -> str:
    """A Python value as TOML.

    >>> format_value((0.5, "a\\tb", True))
    '[0.5, "a\\\\tb", true]'
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also escapes DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)
