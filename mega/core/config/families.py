"""Which flags belong to some model families only, and the lines that refuse them in a run of another family.

Megatron-LM has a script for each family, and no flag that names it; here a flag of BERT or T5 in a run of another
family is a mistake, else their command lines would train a GPT. Which flags these are is a property of each option
(`families`, `usual_in` and `spelling_families` in config/option.py), built or not. This file knows no flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mega.core.config.option import Families
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.run import Options, entries, value_of
from mega.core.config.schema import Entry

TITLES = {"bert": "BERT", "t5": "T5"}
"""Families that flags name and that may not be built -> the name of the model."""


class Typed(NamedTuple):
    """A flag as a user typed it: its spelling, the canonical flag or "" where it means nothing any more, its values.

    families: those whose scripts alone have this spelling; () is all.
    """

    spelling: str
    flag: str
    values: tuple[str, ...]
    families: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.spelling, *self.values))


def belongs(families: Sequence[str]) -> str:
    """Why a flag of these families is refused in a run of another.

    >>> belongs(("bert",)), belongs(("retro",))
    ('needs --family bert', 'belongs to retro, which is not built yet; valid --family: gpt, llama, bert, t5')
    """
    if built := [name for name in families if name in FAMILY_DEFAULTS]:
        return f"needs --family {' or '.join(built)}"
    models = " and ".join(TITLES.get(name, name) for name in families)
    are = "are" if len(families) > 1 else "is"
    return f"belongs to {models}, which {are} not built yet; valid --family: {', '.join(FAMILY_DEFAULTS)}"


def foreign_values(options: Options) -> Iterator[tuple[str, object, str]]:
    """Name, value and rule of each option that is not at its default and that the run's family does not read."""
    for name, entry in entries().items():
        value = value_of(options, name)
        families = _those(entry.option.families, value)
        if value != entry.default and families and not _reads(options.model.family, entry, families):
            yield name, value, belongs(families)


def check_typed(options: Options, given: Mapping[str, object], typed: Sequence[Typed]) -> None:
    """That what the user typed is of the run's family, at its default too. given: options that a file or flags name.

    Errors: ValueError with a line for each flag of another family.
    """
    family, by_flag = options.model.family, {entry.flag: entry for entry in entries().values()}
    problems = []
    for each in typed:
        entry = by_flag.get(each.flag)
        if each.families and family not in each.families:
            here = f"; of {family} it is {each.flag}" if entry is not None else ""
            problems.append(f"{each}: {belongs(each.families)}{here}")
        elif entry is not None and entry.name in given:
            families = _those(entry.option.families, given[entry.name])
            if families and not _reads(family, entry, families):
                problems.append(f"{each}: {belongs(families)}")
    if "family" not in given:
        problems += _unusual(family, given, {each.flag: str(each) for each in typed})
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def _unusual(family: str, given: Mapping[str, object], spelled: Mapping[str, str]) -> Iterator[str]:
    """A tokenizer is of no family, but a script that names BERT's is one of BERT's until the family is named."""
    for name, value in given.items():
        entry = entries()[name]
        families = _those(entry.option.usual_in, value)
        if value != entry.default and families and family not in families:
            shown = spelled.get(entry.flag, f"{entry.flag} {value}")
            yield f"{shown}: {belongs(families)}; give --family {family} to train that with it"


def _those(families: Families, value: object) -> tuple[str, ...]:
    """The families of an option that holds `value`; () is all."""
    return families.get(value, ()) if isinstance(families, Mapping) else families


def _reads(family: str, entry: Entry, families: Sequence[str]) -> bool:
    """Whether runs of `family` read an option at a value of these `families`; at any, where it has a default there."""
    by_value = isinstance(entry.option.families, Mapping)
    return family in families or (not by_value and entry.name in FAMILY_DEFAULTS[family].values)
