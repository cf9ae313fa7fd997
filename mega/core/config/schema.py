"""Combine sections into one table of options, whose properties are read from each field's type and `option`.

The options of a subcommand are frozen sections: either the sections of a run (config/run.py), or sections defined in
the package that the subcommand calls, whose functions have the section as a parameter. A field without `option` is not
a flag and is set by code. This module does not depend on the names of options.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mega.core.config.option import Option, Section, describe


class Entry(NamedTuple):
    """One option of a schema, with its section, its type and its properties."""

    section: str
    """Name of the section in `Options` or in the subcommand's signature, and of the TOML table."""
    title: str
    """Heading of the section's panel of flags."""
    name: str
    """Name of the field, such as `seq_length`, and of the TOML key."""
    kind: type
    """Type of the value: `int`, `float`, `str`, `bool` or `Path`. If `many`, the type of the tuple's items."""
    many: bool
    """Whether the value is a tuple of `kind`."""
    optional: bool
    """Whether `None`, which means "derived", is a valid value."""
    literal: tuple[str, ...]
    """Values of the field's `Literal` type; () if the type is not a `Literal`."""
    default: object
    """Default value; `dataclasses.MISSING` if the option must be given."""
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid values; () if the values are not restricted to a list."""
        return self.literal if self.option.choices is None else tuple(self.option.choices)

    @property
    def may_be_empty(self) -> bool:
        """Whether the empty string is a valid value."""
        return self.option.text or self.default == "" or self.kind not in (str, Path)

    @property
    def flag(self) -> str:
        """The flag, as typed on the command line.

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
        """Whether the option must be given."""
        return self.default is dataclasses.MISSING


class Schema(NamedTuple):
    """Several sections. tables: TOML table -> dataclass. entries: option name -> entry; option names are unique."""

    tables: Mapping[str, type[Section]]
    entries: Mapping[str, Entry]

    def value(self, table: str, values: Mapping[str, object]) -> object:
        """Build the section `table` from `values`, a map from option name to value. All other options have their
        defaults."""
        section_values = {name: value for name, value in values.items() if self.entries[name].section == table}
        return self.tables[table](**section_values)


def schema_of(tables: Mapping[str, type[Section]], without: Mapping[str, Collection[str]] | None = None) -> Schema:
    """Return the schema of the sections `tables`. without: table -> names of options to leave out."""
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
