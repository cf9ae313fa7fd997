"""Sections as one table of options: the properties of their fields, read from each field's type and its `option`.

A verb's options are frozen sections: those of a run (config/run.py), or those of the package that the verb calls, whose
functions take the section itself. A field without `option` is not a flag; code sets it. This file names no option.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mega.core.config.option import Option, Section, describe


class Entry(NamedTuple):
    """One option as its readers need it: its section, its type, and its properties."""

    section: str
    """Name of the section in `Options` or in the verb's signature; also the TOML table."""
    title: str
    """Heading of the section's panel of flags."""
    name: str
    """Field name, such as `seq_length`; also the TOML key."""
    kind: type
    """`int`, `float`, `str`, `bool` or `Path`; the type of the items if `many`."""
    many: bool
    """Whether the value is a tuple of `kind`."""
    optional: bool
    """Whether `None`, which means "derived", is a valid value."""
    literal: tuple[str, ...]
    """The values of a `Literal`, or ()."""
    default: object
    """`dataclasses.MISSING` if a value must be given."""
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The only valid values, or ()."""
        return self.literal if self.option.choices is None else tuple(self.option.choices)

    @property
    def flag(self) -> str:
        """The flag as a user types it.

        >>> from mega.core.config.run import entries
        >>> entries()["seq_length"].flag
        '--seq-length'
        """
        return "--" + self.name.replace("_", "-")

    @property
    def off(self) -> str:
        """The flag that switches a `bool` off.

        >>> from mega.core.config.run import entries
        >>> entries()["bias"].off
        '--no-bias'
        """
        return "--no-" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is dataclasses.MISSING


class Schema(NamedTuple):
    """Several sections: TOML table -> its dataclass, and option -> its entry. No two options share a name."""

    tables: Mapping[str, type[Section]]
    entries: Mapping[str, Entry]

    def value(self, table: str, values: Mapping[str, object]) -> object:
        """Build the section `table` from `values`, option name -> value; all other options have their defaults."""
        section_values = {name: value for name, value in values.items() if self.entries[name].section == table}
        return self.tables[table](**section_values)


def schema_of(tables: Mapping[str, type[Section]], without: Mapping[str, Collection[str]] | None = None) -> Schema:
    """The schema of sections. without: table -> names of options to leave out."""
    entries: dict[str, Entry] = {}
    for table, cls in tables.items():
        for entry in _entries_of(table, cls):
            if entry.name not in (without or {}).get(table, ()):
                assert entry.name not in entries, f"option {entry.name} is defined twice"
                entries[entry.name] = entry
    return Schema(tables, entries)


def _entries_of(table: str, cls: type[Section]) -> Iterator[Entry]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "option" in field.metadata:
            kind, many, optional, literal = _shape(hints[field.name])
            yield Entry(
                section=table,
                title=cls.title,
                name=field.name,
                kind=kind,
                many=many,
                optional=optional,
                literal=literal,
                default=field.default,
                option=describe(field, cls),
            )


def _shape(hint: object) -> tuple[type, bool, bool, tuple[str, ...]]:
    """Split a field's type into kind, many, optional, and the values of a `Literal`."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is Literal:
        return str, False, optional, get_args(hint)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True, optional, ()
    assert hint in (int, float, str, bool, Path), f"no flag can hold a {hint}"
    return hint, False, optional, ()
