"""Turns argparse's habits into Typer's, so that Megatron-LM's command lines work as they stand.

Megatron-LM's spellings and constants (`--swiglu`), values that follow one flag (`--data-path 0.2 a 0.3 b`),
unique prefixes (`--train-it`), `--flag=value` and underscores all become the canonical `--flag=value`.
Flags that mean nothing any more are dropped with a note; unknown ones are refused with the nearest valid
one. `read` lists what is wrong with a line, `translate` refuses a line with a mistake. This file knows flags and their
meanings, and neither Typer nor what a run does with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mega.core.config.compose import nearest, nearest_flag
from mega.core.config.families import Typed
from mega.core.config.option import VALUE, Renamed, weak
from mega.core.config.run import entries
from mega.core.config.schema import Entry

MANY = -1
"""As many values as follow."""


@dataclass(frozen=True)
class Sets:
    """A spelling that sets an option.

    flag: the canonical flag.
    values: how many values follow: 0, 1 or `MANY`.
    constant: what a spelling without values stands for, as it is emitted; None emits the flag alone.
    gives_way: the constant, or a renamed value, yields to any other spelling of the same option.
    renames: values under Megatron-LM's names -> ours; None sets nothing.
    kind, choices: what each value must be.
    families: model families whose scripts alone have this spelling; () is all.
    synonyms: other words for values -> ours.
    refused: values that are not choices, of which more is known than that -> the reason.
    """

    flag: str
    values: int
    constant: str | None = None
    gives_way: bool = False
    renames: Mapping[str, str | None] = field(default_factory=dict)
    kind: type = str
    choices: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Several:
    """A spelling that sets several options, each by the same values or by a constant."""

    parts: tuple[Sets, ...]

    @property
    def values(self) -> int:
        """As of `Sets`: as many as a part takes that takes any."""
        return next((part.values for part in self.parts if part.values), 0)

    @property
    def families(self) -> tuple[str, ...]:
        return self.parts[0].families


@dataclass(frozen=True)
class Drops:
    """A spelling that means nothing any more, with the number of its values, the reason, and families as in `Sets`.

    only: the values at which it changes nothing; another is refused. () is any.
    """

    values: int
    reason: str
    families: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refuses:
    """A spelling that Megatron-LM knows and this project does not; its values are skipped."""

    reason: str
    values: int = MANY


Meaning = Sets | Several | Drops | Refuses


class Setting(NamedTuple):
    """An option that a line sets. values: canonical; of a switch "true" or "false". switch: whether it is one."""

    flag: str
    values: list[str]
    switch: bool

    @property
    def words(self) -> list[str]:
        """As Typer reads it: `--flag=value` for each value, `--flag` or `--no-flag` for a switch."""
        if self.switch:
            return [self.flag if self.values == ["true"] else _no(self.flag)]
        return [f"{self.flag}={value}" for value in self.values]


class ReadLine(NamedTuple):
    """What a command line says. others: words that are no options, and flags of a verb's own without a value.
    notes: one for each flag that was dropped. problems: one for each mistake."""

    settings: list[Setting]
    others: list[str]
    notes: list[str]
    typed: list[Typed]
    problems: list[str]


class Translated(NamedTuple):
    """A command line as Typer reads it, a note for each flag that was dropped, and every option as it was typed."""

    arguments: list[str]
    notes: list[str]
    typed: list[Typed]


def meanings(
    configured: Sequence[Entry],
    extra: Mapping[str, Meaning],
    obsolete: Mapping[str, Drops | Refuses],
    stated_by: str | None = None,
) -> dict[str, Meaning]:
    """Every spelling that a command with these options answers to; `extra` are the command's own flags.

    obsolete: flags of other programs that are no options here; `--moe-*` is every flag that begins with `--moe-` and
    has no meaning of its own.
    stated_by: what says the rest of a run, such as a checkpoint that is read: its options are dropped; None: they are
    refused.
    """
    known: dict[str, Meaning] = dict(_of_elsewhere(configured, extra, stated_by))
    known |= obsolete
    spelled: dict[str, list[Sets]] = {}
    for entry in configured:
        for spelling, meaning in _spellings(entry):
            spelled.setdefault(spelling, []).append(meaning)
    known |= {name: parts[0] if len(parts) == 1 else Several(tuple(parts)) for name, parts in spelled.items()}
    for entry in configured:
        known |= dict(_flags(entry))
    known |= extra
    own = {name.replace("_", "-") for name, meaning in known.items() if isinstance(meaning, Sets | Several)}
    # A flag of the verb's own counts, however it is written.
    return {
        name: meaning
        for name, meaning in known.items()
        if isinstance(meaning, Sets | Several) or name.replace("_", "-") not in own
    }


def _of_elsewhere(
    configured: Sequence[Entry], extra: Mapping[str, Meaning], stated_by: str | None
) -> Iterator[tuple[str, Meaning]]:
    """Spellings of a run's options that a command does not have, or has as a flag of its own of the same name."""
    here = {entry.name: entry for entry in configured}
    for entry in entries().values():
        if here.get(entry.name) is entry:
            continue
        if entry.flag in extra or entry.name in here:
            yield from _spellings(entry)
            continue
        for spelling, meaning in (*_spellings(entry), *_flags(entry)):
            if stated_by is None:
                yield spelling, Refuses("is an option of mega pretrain, and not of this verb")
            else:
                yield spelling, Drops(meaning.values, stated_by)


def _spellings(entry: Entry) -> Iterator[tuple[str, Sets]]:
    """Megatron-LM's."""
    for spelling, stands_for in entry.option.megatron.items():
        families = entry.option.spelling_families.get(spelling, ())
        yield spelling, replace(_of_spelling(entry, stands_for), families=families)


def _flags(entry: Entry) -> Iterator[tuple[str, Sets]]:
    if entry.kind is bool:
        yield entry.flag, Sets(entry.flag, 0, constant="true")
        yield _no(entry.flag), Sets(entry.flag, 0, constant="false")
    else:
        own = _of_spelling(entry, entry.option.megatron.get(entry.flag, VALUE))
        yield entry.flag, replace(own, synonyms=entry.option.synonyms)
    for spelling, flag in entry.option.synonyms.items():
        if flag == entry.flag:
            yield spelling, _of_spelling(entry, VALUE)


def _of_spelling(entry: Entry, stands_for: object) -> Sets:
    values = MANY if entry.many else 1
    if isinstance(stands_for, Renamed):
        return Sets(
            *(entry.flag, values, None, True, stands_for.values, entry.kind, entry.choices), refused=stands_for.refused
        )
    if stands_for is VALUE or isinstance(stands_for, Mapping):
        renames = stands_for if isinstance(stands_for, Mapping) else {}
        return Sets(entry.flag, values, renames=renames, kind=entry.kind, choices=entry.choices)
    gives_way = isinstance(stands_for, weak)
    constant = stands_for.value if isinstance(stands_for, weak) else stands_for
    shown = str(constant).lower() if isinstance(constant, bool) else str(constant)
    return Sets(entry.flag, 0, constant=shown, gives_way=gives_way)


def translate(argv: Sequence[str], known: Mapping[str, Meaning]) -> Translated:
    """The canonical argument list, one note for each flag that was dropped, and what was typed.

    ValueError for an unknown, ambiguous, refused or contradictory flag, and for a value of the wrong kind.

    >>> from mega.core.config.run import entries
    >>> known = meanings(list(entries().values()), {}, {})
    >>> translate(["--num-layers", "2", "--swiglu", "--seq=8"], known)
    Traceback (most recent call last):
    ...
    ValueError: --seq: is short for several flags: --seq-length, --sequence-parallel
    >>> translate(["--num-layers", "2", "--swiglu", "--data-path", "0.2", "a", "0.8", "b", "--bf"], known).arguments
    ... # doctest: +NORMALIZE_WHITESPACE
    ['--layers=2', '--activation=swiglu', '--data-path=0.2', '--data-path=a', '--data-path=0.8',
     '--data-path=b', '--dtype=bf16']
    """
    found = read(argv, known)
    if found.problems:
        raise ValueError("\n".join(found.problems))
    return Translated([*_words(found.settings, known), *found.others], found.notes, found.typed)


def read(argv: Sequence[str], known: Mapping[str, Meaning]) -> ReadLine:
    """What a command line says, and what is wrong with it."""
    line, words = _Line(known), list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            line.others += [word, *words]
            break
        if not word.startswith("--"):
            line.others.append(word)
            continue
        try:
            line.take(word, words)
        except ValueError as error:
            line.problems.append(str(error))
    settings = _as_core_reads({setting.flag: setting for setting in line.settings()}, line)
    return ReadLine(settings, line.others, line.notes, line.typed, line.problems)


def _as_core_reads(settings: dict[str, Setting], line: _Line) -> list[Setting]:
    """Flags of Megatron core's mixtures that mean something else next to another flag, or without it.

    >>> from mega.core.config.run import entries
    >>> known = meanings(list(entries().values()), {}, {})
    >>> read("--moe-router-pre-softmax --moe-router-score-function sigmoid".split(), known).settings[0].flag
    '--router-score'
    """
    kind, coefficient, before = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-router-pre-softmax"
    typed = {each.spelling: each.values for each in line.typed}
    score = settings.get("--router-score")
    if before in typed and score is not None and score.values != ["softmax"] and "--no-router-normalize" not in typed:
        settings.pop("--router-normalize", None)
        line.note(before, f"scores of {score.values[0]} are no softmax")
    if typed.get(kind) == ("none",) and coefficient in typed and "--balance-loss" not in typed:
        settings.pop("--balance-loss", None)
        line.note(coefficient, f"{kind} none has no loss")
    elif coefficient in typed and kind not in typed and "--balance" not in settings:
        settings["--balance"] = Setting("--balance", ["microbatch"], False)  # core's own
    return list(settings.values())


class _Line:
    """A command line while it is read, flag by flag."""

    def __init__(self, known: Mapping[str, Meaning]):
        self.known = known
        self.others: list[str] = []
        self.notes: list[str] = []
        self.typed: list[Typed] = []
        self.problems: list[str] = []
        self._spelled: dict[str, dict[str, tuple[bool, list[str]]]] = {}
        """Flag -> spelling -> whether it gives way, and its values."""

    def take(self, word: str, rest: list[str]) -> None:
        """A flag, and its values from the front of `rest`. Errors: ValueError."""
        try:
            spelling, meaning = _look_up(word.partition("=")[0], self.known)
        except ValueError:
            _following(rest, MANY)
            raise
        values = _values(word, spelling, meaning, rest)
        self.typed.append(_typed(spelling, meaning, values))
        if isinstance(meaning, Drops):
            self.note(spelling, meaning.reason)
        elif isinstance(meaning, Sets) and meaning.values == 0 and meaning.constant is None:
            self.others.append(meaning.flag)
        elif isinstance(meaning, Sets | Several):
            parts = meaning.parts if isinstance(meaning, Several) else (meaning,)
            if not any([self._set(spelling, part, values) for part in parts]):
                self.note(" ".join((spelling, *values)), "the files say it")

    def note(self, what: str, reason: str) -> None:
        self.notes.append(f"{what} is accepted and changes nothing: {reason}")

    def _set(self, spelling: str, meaning: Sets, values: Sequence[str]) -> bool:
        """Whether anything is set. Errors: ValueError for a value that it cannot take."""
        if meaning.constant is not None:
            renamed, gives_way = [meaning.constant], meaning.gives_way
        else:
            checked = [_checked(spelling, value, meaning) for value in values]
            renamed = [value for value in checked if value is not None]
            gives_way = meaning.gives_way and checked != list(values)
        spelled = self._spelled.setdefault(meaning.flag, {})
        # A switch and its negation are one spelling, of which the last counts.
        spelling = spelling.replace("--no-", "--") if spelling == _no(meaning.flag) else spelling
        before = spelled[spelling][1] if meaning.values == MANY and spelling in spelled else []
        if renamed:
            spelled[spelling] = (gives_way, before + renamed)
        return bool(renamed)

    def settings(self) -> Iterator[Setting]:
        """What is set, in the order in which it was first named."""
        for flag, spelled in self._spelled.items():
            if not spelled:
                continue
            meaning = self.known.get(flag)
            try:
                yield Setting(flag, _agreed(spelled), isinstance(meaning, Sets) and meaning.values == 0)
            except ValueError as error:
                self.problems.append(str(error))


def _words(settings: Sequence[Setting], known: Mapping[str, Meaning]) -> Iterator[str]:
    for setting in settings:
        meaning = known.get(setting.flag)
        if isinstance(meaning, Sets) and meaning.values > 1:
            yield from (setting.flag, *setting.values)
        else:
            yield from setting.words


def _typed(spelling: str, meaning: Meaning, values: Sequence[str]) -> Typed:
    """What stands for `values` in messages: nothing after a switch."""
    first = meaning.parts[0] if isinstance(meaning, Several) else meaning
    families = () if isinstance(meaning, Refuses) else meaning.families
    return Typed(spelling, first.flag if isinstance(first, Sets) else "", tuple(values), families)


def _look_up(typed: str, known: Mapping[str, Meaning]) -> tuple[str, Meaning]:
    """The known spelling that `typed` is, or the only prefix of; hyphens and underscores are alike.

    What is dropped or refused counts by its whole name only, which Megatron-LM asks for too.
    """
    if typed in known:
        return typed, known[typed]
    hyphened = typed.replace("_", "-")
    exact = [name for name in known if name.replace("_", "-") == hyphened]
    if exact:
        return exact[0], known[exact[0]]
    valid = {name: meaning for name, meaning in known.items() if isinstance(meaning, Sets | Several)}
    found = {name: meaning for name, meaning in valid.items() if name.replace("_", "-").startswith(hyphened)}
    if not found:
        for name, meaning in known.items():
            if name.endswith("*") and hyphened.startswith(name[:-1]):
                return typed, meaning
        every = "--help-all" if "--help-all" in known else "--help"
        raise ValueError(f"{typed}: is not an option{nearest_flag(typed, valid)}; {every} lists all")
    first = next(iter(found))
    if any(meaning != found[first] for meaning in found.values()):
        raise ValueError(f"{typed}: is short for several flags: {', '.join(sorted(found))}")
    return first, found[first]


def _following(rest: list[str], most: int) -> list[str]:
    """Takes the values of a flag, at most so many, from the front of `rest`."""
    taken: list[str] = []
    while len(taken) != most and rest and not _is_flag(rest[0]):
        taken.append(rest.pop(0))
    return taken


def _values(word: str, spelling: str, meaning: Meaning, rest: list[str]) -> list[str]:
    """Takes the values of a flag from after its `=` or from the front of `rest`, as they are typed."""
    _, attached, value = word.partition("=")
    taken = [value] if attached else _following(rest, meaning.values)
    if isinstance(meaning, Refuses):
        raise ValueError(f"{spelling}: {meaning.reason}")
    if isinstance(meaning, Drops):
        if meaning.only and (wrong := next((value for value in taken if value not in meaning.only), None)) is not None:
            valid = ", ".join(meaning.only)
            raise ValueError(f"{spelling} {wrong}: is not supported: {meaning.reason}; valid: {valid}")
        if not taken and meaning.values == 1:
            raise ValueError(f"{spelling}: needs a value")
        return taken
    if meaning.values == 0 and taken:
        raise ValueError(f"{word}: {spelling} takes no value")
    if meaning.values != 0 and not taken:
        raise ValueError(f"{spelling}: needs a value")
    return taken


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


def _checked(spelling: str, value: str, meaning: Sets) -> str | None:
    """`value` under our name for it; ValueError where it is not such a number or choice."""
    closed = () if meaning.gives_way else tuple(meaning.renames)
    choices = closed or meaning.choices
    value = meaning.synonyms.get(value, value)
    if choices and value not in choices and value not in meaning.renames:
        if value in meaning.choices:
            return value
        hint = meaning.refused.get(value, f"is not a choice{nearest(value, choices)}")
        raise ValueError(f"{spelling} {value}: {hint}; valid: {', '.join(choices)}")
    if meaning.kind in (int, float) and value not in meaning.renames and not _reads_as(meaning.kind, value):
        whole = "whole " if meaning.kind is int else ""
        several = ", or several with blanks between them" if meaning.values == MANY else ""
        raise ValueError(f"{spelling} {value}: must be a {whole}number{several}")
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


def _no(flag: str) -> str:
    """
    >>> _no("--bias")
    '--no-bias'
    """
    return "--no-" + flag.removeprefix("--")
