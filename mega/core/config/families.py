"""Check that a run has no flags of another model family.

Megatron-LM has a script for each family, and no flag that names the family. In mega, a flag of BERT or T5 in a run of
another family is an error; otherwise such a command line would train a GPT. The families of a flag are properties of
the flag's option (`families`, `usual_in` and `spelling_families` in config/option.py) and include families that are not
implemented. This module does not depend on the names of flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mega.core.config.option import Families
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.run import Options, entries, value_of
from mega.core.config.schema import Entry

TITLES = {"bert": "BERT", "t5": "T5"}
"""Model family, implemented or not -> the name of the model."""


class Typed(NamedTuple):
    """A flag as the user typed it."""

    spelling: str
    flag: str
    """The canonical flag, or "" if the spelling is obsolete."""
    values: tuple[str, ...]
    families: tuple[str, ...] = ()
    """Families whose Megatron-LM script (such as pretrain_gpt.py) accepts this spelling; () means all families."""

    def __str__(self) -> str:
        return " ".join((self.spelling, *self.values))


def belongs(families: Sequence[str]) -> str:
    """Return the reason why a run of another family refuses a flag that belongs to `families`.

    >>> belongs(("bert",)), belongs(("retro",))
    ('needs --family bert', 'belongs to retro, which is not built yet; valid --family: gpt, llama, bert, t5')
    """
    if built := [name for name in families if name in FAMILY_DEFAULTS]:
        return f"needs --family {' or '.join(built)}"
    models = " and ".join(TITLES.get(name, name) for name in families)
    are = "are" if len(families) > 1 else "is"
    return f"belongs to {models}, which {are} not built yet; valid --family: {', '.join(FAMILY_DEFAULTS)}"


def foreign_values(options: Options) -> Iterator[tuple[str, object, str]]:
    """Yield (name, value, rule) for each option that is not at its default and that the run's family does not read."""
    for name, entry in entries().items():
        value = value_of(options, name)
        families = _families_at(entry.option.families, value)
        if value != entry.default and families and not _reads(options.model.family, entry, families):
            yield name, value, belongs(families)


def check_typed(options: Options, given: Mapping[str, object], typed: Sequence[Typed]) -> None:
    """Check that every flag that the user typed belongs to the run's family, even a flag that is set to its default.
    given: name -> value of each option that a file or a flag sets.

    Errors: ValueError with a line for each flag of another family.
    """
    family, by_flag = options.model.family, {entry.flag: entry for entry in entries().values()}
    problems = []
    for each in typed:
        entry = by_flag.get(each.flag)
        if each.families and family not in each.families:
            hint = f"; of {family} it is {each.flag}" if entry is not None else ""
            problems.append(f"{each}: {belongs(each.families)}{hint}")
        elif entry is not None and entry.name in given:
            families = _families_at(entry.option.families, given[entry.name])
            if families and not _reads(family, entry, families):
                problems.append(f"{each}: {belongs(families)}")
    if "family" not in given:
        problems += _unusual(family, given, {each.flag: str(each) for each in typed})
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def _unusual(family: str, given: Mapping[str, object], spelled: Mapping[str, str]) -> Iterator[str]:
    """Refuse BERT's tokenizer without --family. A tokenizer does not belong to a family, but a script with this
    tokenizer probably trains BERT."""
    for name, value in given.items():
        entry = entries()[name]
        families = _families_at(entry.option.usual_in, value)
        if value != entry.default and families and family not in families:
            text = spelled.get(entry.flag, f"{entry.flag} {value}")
            yield f"{text}: {belongs(families)}; give --family {family} to train that with it"


def _families_at(families: Families, value: object) -> tuple[str, ...]:
    """Return the families to which an option belongs if it has `value`; () means all families."""
    return families.get(value, ()) if isinstance(families, Mapping) else families


def _reads(family: str, entry: Entry, families: Sequence[str]) -> bool:
    """Return whether runs of `family` read an option: `family` is one of the `families` of the option's value, or
    `family` sets a default for the option."""
    by_value = isinstance(entry.option.families, Mapping)
    return family in families or (not by_value and entry.name in FAMILY_DEFAULTS[family].values)
