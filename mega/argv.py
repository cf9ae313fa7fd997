"""Turns argparse's habits into Typer's, so that Megatron-LM's command lines work as they stand.

Megatron-LM's spellings and constants (`--swiglu`), values that follow one flag (`--data-path 0.2 a 0.3 b`),
unique prefixes (`--train-it`), `--flag=value` and underscores all become the canonical `--flag=value`.
Flags that mean nothing any more are dropped with a note; unknown ones are refused with the nearest valid
one. This file knows flags and their meanings, and neither Typer nor what a run does with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mega.core.config.compose import nearest
from mega.core.config.families import Typed
from mega.core.config.megatron import IGNORED, REFUSED
from mega.core.config.option import VALUE, weak
from mega.core.config.run import Entry

MANY = -1
"""As many values as follow."""


@dataclass(frozen=True)
class Sets:
    """A spelling that sets an option.

    flag: the canonical flag.
    values: how many values follow: 0, 1 or `MANY`.
    constant: what a spelling without values stands for, as it is emitted; None emits the flag alone.
    gives_way: the constant yields to any other spelling of the same option.
    renames: values under Megatron-LM's names -> ours.
    kind, choices: what each value must be.
    families: model families whose scripts alone have this spelling; () is all.
    synonyms: other words for values -> ours.
    """

    flag: str
    values: int
    constant: str | None = None
    gives_way: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    kind: type = str
    choices: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drops:
    """A spelling that means nothing any more, with the number of its values, the reason, and families as in `Sets`."""

    values: int
    reason: str
    families: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refuses:
    """A spelling that Megatron-LM knows and this project does not; its values are skipped."""

    reason: str
    values: int = MANY


Meaning = Sets | Drops | Refuses


class Translated(NamedTuple):
    """A command line as Typer reads it, a note for each flag that was dropped, and every option as it was typed."""

    arguments: list[str]
    notes: list[str]
    typed: list[Typed]


def meanings(entries: Sequence[Entry], extra: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Every spelling that a command with these options answers to; `extra` are the command's own flags."""
    known: dict[str, Meaning] = {name: Drops(*ignored) for name, ignored in IGNORED.items()}
    known |= {name: Refuses(reason) for name, reason in REFUSED.items()}
    for entry in entries:
        known |= dict(_of_entry(entry))
    return known | dict(extra)


def _of_entry(entry: Entry) -> Iterator[tuple[str, Meaning]]:
    for spelling, stands_for in entry.option.megatron.items():
        yield (
            spelling,
            replace(_of_spelling(entry, stands_for), families=entry.option.spelling_families.get(spelling, ())),
        )
    if entry.kind is bool:
        yield entry.flag, Sets(entry.flag, 0, constant="true")
        yield _no(entry.flag), Sets(entry.flag, 0, constant="false")
    else:
        yield entry.flag, replace(_of_spelling(entry, VALUE), synonyms=entry.option.synonyms)
    for spelling, flag in entry.option.synonyms.items():
        if flag == entry.flag:
            yield spelling, _of_spelling(entry, VALUE)


def _of_spelling(entry: Entry, stands_for: Any) -> Sets:
    if stands_for is VALUE or isinstance(stands_for, Mapping):
        renames = stands_for if isinstance(stands_for, Mapping) else {}
        values = MANY if entry.many else 1
        return Sets(entry.flag, values, renames=renames, kind=entry.kind, choices=entry.choices)
    gives_way = isinstance(stands_for, weak)
    constant = stands_for.value if gives_way else stands_for
    shown = str(constant).lower() if isinstance(constant, bool) else str(constant)
    return Sets(entry.flag, 0, constant=shown, gives_way=gives_way)


def translate(argv: Sequence[str], known: Mapping[str, Meaning]) -> Translated:
    """The canonical argument list, one note for each flag that was dropped, and what was typed.

    ValueError for an unknown, ambiguous, refused or contradictory flag, and for a value of the wrong kind.

    >>> from mega.core.config.run import entries
    >>> known = meanings(list(entries().values()), {})
    >>> translate(["--num-layers", "2", "--swiglu", "--seq=8"], known)
    Traceback (most recent call last):
    ...
    ValueError: --seq: is short for several flags: --seq-length, --sequence-parallel
    >>> translate(["--num-layers", "2", "--swiglu", "--data-path", "0.2", "a", "0.8", "b", "--bf"], known).arguments
    ... # doctest: +NORMALIZE_WHITESPACE
    ['--layers=2', '--activation=swiglu', '--data-path=0.2', '--data-path=a', '--data-path=0.8',
     '--data-path=b', '--dtype=bf16']
    """
    passed, notes, typed, problems, words = [], [], [], [], list(argv)
    settings: dict[str, dict[str, tuple[bool, list[str]]]] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            passed += [word, *words]
            break
        if not word.startswith("--"):
            passed.append(word)
            continue
        try:
            spelling, meaning = _look_up(word.partition("=")[0], known)
            values = _values(word, spelling, meaning, words)
            typed.append(_typed(spelling, meaning, values))
            if not isinstance(meaning, Sets):
                notes.append(f"{spelling} is accepted and changes nothing: {meaning.reason}")
            elif meaning.values == 0 and meaning.constant is None:
                passed.append(meaning.flag)
            else:
                spelled = settings.setdefault(meaning.flag, {})
                # A switch and its negation are one spelling, of which the last counts.
                spelling = spelling.replace("--no-", "--") if spelling == _no(meaning.flag) else spelling
                before = spelled[spelling][1] if meaning.values == MANY and spelling in spelled else []
                spelled[spelling] = (meaning.gives_way, before + values)
        except ValueError as error:
            problems.append(str(error))
    canonical: list[str] = []
    for flag, spelled in settings.items():
        try:
            canonical += _emitted(flag, _agreed(spelled), known)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return Translated(canonical + passed, notes, typed)


def _typed(spelling: str, meaning: Meaning, values: Sequence[str]) -> Typed:
    """What stands for `values` in messages: nothing after a switch."""
    flag, constant = (meaning.flag, meaning.constant) if isinstance(meaning, Sets) else ("", None)
    families = () if isinstance(meaning, Refuses) else meaning.families
    return Typed(spelling, flag, () if constant is not None else tuple(values), families)


def _look_up(typed: str, known: Mapping[str, Meaning]) -> tuple[str, Meaning]:
    """The known spelling that `typed` is, or is the only prefix of; hyphens and underscores are alike."""
    if typed in known:
        return typed, known[typed]
    hyphened = typed.replace("_", "-")
    found = {name: meaning for name, meaning in known.items() if name.replace("_", "-").startswith(hyphened)}
    exact = [name for name in found if name.replace("_", "-") == hyphened]
    if exact:
        return exact[0], known[exact[0]]
    if not found:
        valid = [name for name, meaning in known.items() if isinstance(meaning, Sets)]
        every = "--help-all" if "--help-all" in known else "--help"
        raise ValueError(f"{typed}: is not an option{nearest(typed, valid)}; {every} lists all")
    first = next(iter(found))
    if any(meaning != found[first] for meaning in found.values()):
        raise ValueError(f"{typed}: is short for several flags: {', '.join(sorted(found))}")
    return first, found[first]


def _values(word: str, spelling: str, meaning: Meaning, rest: list[str]) -> list[str]:
    """Takes the values of a flag from after its `=` or from the front of `rest`, and checks them."""
    _, attached, value = word.partition("=")
    taken = [value] if attached else []
    while not attached and len(taken) != meaning.values and rest and not _is_flag(rest[0]):
        taken.append(rest.pop(0))
    if isinstance(meaning, Refuses):
        raise ValueError(f"{spelling}: {meaning.reason}")
    if meaning.values == 0 and taken:
        raise ValueError(f"{word}: {spelling} takes no value")
    if meaning.values != 0 and not taken:
        raise ValueError(f"{spelling}: needs a value")
    if isinstance(meaning, Drops):
        return taken
    if meaning.constant is not None:
        return [meaning.constant]
    return [_checked(spelling, value, meaning) for value in taken]


def _is_flag(word: str) -> bool:
    """Whether a word starts a new flag; a negative number does not."""
    if not word.startswith("-") or word == "-":
        return False
    return not _reads_as(float, word)


def _reads_as(kind: type, word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _checked(spelling: str, value: str, meaning: Sets) -> str:
    """`value` under our name for it; ValueError where it is not such a number or choice."""
    choices = tuple(meaning.renames) or meaning.choices
    value = meaning.synonyms.get(value, value)
    if choices and value not in choices:
        if value in meaning.choices:
            return value
        raise ValueError(f"{spelling} {value}: is not a choice{nearest(value, choices)}; valid: {', '.join(choices)}")
    if meaning.kind in (int, float) and not _reads_as(meaning.kind, value):
        whole = "whole " if meaning.kind is int else ""
        raise ValueError(f"{spelling} {value}: must be a {whole}number")
    return meaning.renames.get(value, value)


def _agreed(spelled: Mapping[str, tuple[bool, list[str]]]) -> list[str]:
    """The one value that all spellings of an option agree on; those that give way count only alone."""
    firm = {spelling: values for spelling, (gives_way, values) in spelled.items() if not gives_way}
    counted = firm or {spelling: values for spelling, (_, values) in spelled.items()}
    (first, agreed), *others = counted.items()
    for spelling, values in others:
        if values != agreed:
            raise ValueError(f"{spelling}: contradicts {first}; give one of them")
    return agreed


def _emitted(flag: str, values: list[str], known: Mapping[str, Meaning]) -> list[str]:
    """An option as Typer reads it: `--flag=value` for each value, `--flag` or `--no-flag` for a switch."""
    meaning = known.get(flag)
    if isinstance(meaning, Sets) and meaning.values == 0:
        return [flag if values == ["true"] else _no(flag)]
    if isinstance(meaning, Sets) and meaning.values > 1:
        return [flag, *values]
    return [f"{flag}={value}" for value in values]


def _no(flag: str) -> str:
    """
    >>> _no("--bias")
    '--no-bias'
    """
    return "--no-" + flag.removeprefix("--")
