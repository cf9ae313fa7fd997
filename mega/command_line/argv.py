"""Translate argparse's syntax to Typer's, so that Megatron-LM's command lines work unchanged.

Megatron-LM's spellings and constants (`--swiglu`), values that follow one flag (`--data-path 0.2 a 0.3 b`), unique
prefixes (`--train-it`), `--flag=value` and underscores all become the canonical `--flag=value`. Obsolete flags are
dropped with a message; unknown flags are refused, and the error names the nearest valid flag. `read` lists the mistakes
in a command line; `translate` refuses a command line with mistakes. This module depends on the meanings of flags, but
not on Typer or on what a run does with an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mega.command_line.layer_frequency import layers_with_experts
from mega.core.config.compose import nearest, nearest_flag
from mega.core.config.families import Typed
from mega.core.config.option import EMPTY, VALUE, Renamed, weak
from mega.core.config.run import entries
from mega.core.config.schema import Entry

MANY = -1
"""A number of values that means "all words up to the next flag"."""


_LAYERS = "--moe-layer-freq"
"""Megatron-core's flag for the layers with experts: a number, or an expression for a list."""


@dataclass(frozen=True)
class Sets:
    """A spelling that sets an option."""

    flag: str
    """The canonical flag."""
    values: int
    """Number of values that follow: 0, 1 or `MANY`."""
    constant: str | None = None
    """The value to set if `values` is 0; None emits only the flag."""
    gives_way: bool = False
    """Whether any other spelling of the same option overrides the constant or a renamed value."""
    renames: Mapping[str, str | None] = field(default_factory=dict)
    """Megatron-LM's name for a value -> mega's name; None if the value sets nothing."""
    kind: type = str
    """Type of each value."""
    choices: tuple[str, ...] = ()
    """Valid values; () means any."""
    families: tuple[str, ...] = ()
    """The only model families whose Megatron-LM scripts have this spelling; () means all."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Synonym of a value -> mega's name for the value."""
    may_be_empty: bool = True
    """Whether the empty string is a valid value."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Invalid value -> an explanation, for values that need more than a list of the valid ones."""


@dataclass(frozen=True)
class Several:
    """A spelling that sets several options, each to the same values or to a constant."""

    parts: tuple[Sets, ...]

    @property
    def values(self) -> int:
        """The number of values that follow the flag, as in `Sets.values`: several if any of `parts` takes several."""
        numbers = [part.values for part in self.parts]
        return MANY if MANY in numbers else max(numbers)

    @property
    def families(self) -> tuple[str, ...]:
        return self.parts[0].families


@dataclass(frozen=True)
class Drops:
    """An obsolete spelling, which is accepted and has no effect."""

    values: int
    """Number of values that follow, as in `Sets.values`."""
    reason: str
    families: tuple[str, ...] = ()
    """The only model families whose Megatron-LM scripts have this spelling, as in `Sets.families`."""
    only: tuple[str, ...] = ()
    """The values that are accepted without effect; other values are refused. () means that all values are accepted."""


@dataclass(frozen=True)
class Refuses:
    """A spelling that exists in Megatron-LM but not here; its values are skipped."""

    reason: str
    values: int = MANY


Meaning = Sets | Several | Drops | Refuses


class Setting(NamedTuple):
    """An option that a command line sets."""

    flag: str
    values: list[str]
    """Canonical values; "true" or "false" for a switch."""
    switch: bool
    """Whether the option is a switch, which takes no value."""

    @property
    def words(self) -> list[str]:
        """The words for Typer: `--flag=value` for each value, `--flag` or `--no-flag` for a switch."""
        if self.switch:
            return [self.flag if self.values == ["true"] else _no(self.flag)]
        return [f"{self.flag}={value}" for value in self.values]


class ReadLine(NamedTuple):
    """A parsed command line."""

    settings: list[Setting]
    others: list[str]
    """Words that are not options, and flags of the subcommand itself without a value."""
    notes: list[str]
    """A message for each flag that was dropped."""
    typed: list[Typed]
    """Every flag as it was typed."""
    problems: list[str]
    """A message for each mistake."""


class Translated(NamedTuple):
    """A command line in Typer's syntax."""

    arguments: list[str]
    notes: list[str]
    """A message for each flag that was dropped."""
    typed: list[Typed]
    """Every option as it was typed."""


def meanings(
    configured: Sequence[Entry],
    extra: Mapping[str, Meaning],
    obsolete: Mapping[str, Drops | Refuses],
    stated_by: str | None = None,
) -> dict[str, Meaning]:
    """Every spelling that a command with the options `configured` accepts. extra: flags of the command itself.

    obsolete: flags of other programs that are not options here; `--moe-*` matches every flag that begins with `--moe-`
    and has no other meaning. stated_by: the reason why the other options of a run have no effect, such as a checkpoint
    that determines them. These options are then dropped; if stated_by is None, they are refused.
    """
    meaning_of: dict[str, Meaning] = dict(_foreign_spellings(configured, extra, stated_by))
    meaning_of |= obsolete
    options_by_spelling: dict[str, list[Sets]] = {}
    for entry in configured:
        for spelling, meaning in _spellings(entry):
            options_by_spelling.setdefault(spelling, []).append(meaning)
    meaning_of |= {
        name: parts[0] if len(parts) == 1 else Several(tuple(parts)) for name, parts in options_by_spelling.items()
    }
    for entry in configured:
        meaning_of |= dict(_flags(entry))
    meaning_of |= extra
    current = {name.replace("_", "-") for name, meaning in meaning_of.items() if isinstance(meaning, Sets | Several)}
    # A flag of the subcommand takes precedence, with hyphens or underscores.
    return {
        name: meaning
        for name, meaning in meaning_of.items()
        if isinstance(meaning, Sets | Several) or name.replace("_", "-") not in current
    }


def _foreign_spellings(
    configured: Sequence[Entry], extra: Mapping[str, Meaning], stated_by: str | None
) -> Iterator[tuple[str, Meaning]]:
    """Spellings of a run's options that the command does not have, or that have a different meaning in the command."""
    own_entries = {entry.name: entry for entry in configured}
    for entry in entries().values():
        if own_entries.get(entry.name) is entry:
            continue
        if entry.flag in extra or entry.name in own_entries:
            yield from _spellings(entry)
            continue
        for spelling, meaning in (*_spellings(entry), *_flags(entry)):
            if stated_by is None:
                yield spelling, Refuses("is an option of mega pretrain, and not of this verb")
            else:
                yield spelling, Drops(meaning.values, stated_by)


def _spellings(entry: Entry) -> Iterator[tuple[str, Sets]]:
    """The Megatron-LM spellings of an option."""
    for spelling, stands_for in entry.option.megatron.items():
        families = entry.option.spelling_families.get(spelling, ())
        yield spelling, replace(_meaning_of(entry, stands_for), families=families)


def _flags(entry: Entry) -> Iterator[tuple[str, Sets]]:
    if entry.kind is bool:
        yield entry.flag, Sets(entry.flag, 0, constant="true")
        yield _no(entry.flag), Sets(entry.flag, 0, constant="false")
    else:
        meaning = _meaning_of(entry, entry.option.megatron.get(entry.flag, VALUE))
        yield entry.flag, replace(meaning, synonyms=entry.option.synonyms)
    for spelling, flag in entry.option.synonyms.items():
        if flag == entry.flag:
            yield spelling, _meaning_of(entry, VALUE)


def _meaning_of(entry: Entry, stands_for: object) -> Sets:
    values = MANY if entry.many else 1
    if isinstance(stands_for, Renamed):
        return Sets(
            *(entry.flag, values, None, True, stands_for.values, entry.kind, entry.choices), refused=stands_for.refused
        )
    if stands_for is VALUE or isinstance(stands_for, Mapping):
        named = stands_for if isinstance(stands_for, Mapping) else {}
        renames = {name: None if value is None else _text(value) for name, value in named.items()}
        empty = entry.may_be_empty
        return Sets(entry.flag, values, renames=renames, kind=entry.kind, choices=entry.choices, may_be_empty=empty)
    gives_way = isinstance(stands_for, weak)
    constant = stands_for.value if isinstance(stands_for, weak) else stands_for
    return Sets(entry.flag, 0, constant=_text(constant), gives_way=gives_way)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def translate(argv: Sequence[str], known: Mapping[str, Meaning]) -> Translated:
    """Translate a command line to canonical arguments.

    Errors: ValueError for an unknown, ambiguous, refused or contradictory flag, and for a value of the wrong type.

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
    line = read(argv, known)
    if line.problems:
        raise ValueError("\n".join(line.problems))
    return Translated([*_words(line.settings, known), *line.others], line.notes, line.typed)


def read(argv: Sequence[str], known: Mapping[str, Meaning]) -> ReadLine:
    """Read a command line, and collect its mistakes."""
    line, words = _Line(known), list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            line.others += [word, *words]
            break
        if not word.startswith("--"):
            line.others.append(word)
            if not word:
                line.problems.append(f"argument '': {EMPTY}")
            continue
        try:
            line.take(word, words)
        except ValueError as error:
            line.problems.append(str(error))
    settings = _as_core_reads({setting.flag: setting for setting in line.settings()}, line)
    return ReadLine(settings, line.others, line.notes, line.typed, line.problems)


def _as_core_reads(settings: dict[str, Setting], line: _Line) -> list[Setting]:
    """Correct Megatron-core's MoE flags whose meaning depends on another flag.

    >>> from mega.core.config.run import entries
    >>> known = meanings(list(entries().values()), {}, {})
    >>> read("--moe-router-pre-softmax --moe-router-score-function sigmoid".split(), known).settings[0].flag
    '--router-score'
    """
    layers = settings.get("--layers")
    if layers is not None and line.expected_layers not in (None, int(layers.values[-1])):
        rule = f"must have as many numbers as --layers {layers.values[-1]}"
        line.problems.append(f"{_LAYERS}: has {line.expected_layers} numbers; {rule}")
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
        settings["--balance"] = Setting("--balance", ["microbatch"], False)  # the default of Megatron-core
    return list(settings.values())


class _Line:
    """State of `read`: collects settings, notes and problems flag by flag."""

    def __init__(self, known: Mapping[str, Meaning]):
        self.known = known
        self.others: list[str] = []
        self.notes: list[str] = []
        self.typed: list[Typed] = []
        self.problems: list[str] = []
        self._spelled: dict[str, dict[str, tuple[bool, list[str]]]] = {}
        """Flag -> spelling -> (whether other spellings override it, values)."""
        self.expected_layers: int | None = None
        """Number of layers in the expression of --moe-layer-freq."""

    def take(self, word: str, rest: list[str]) -> None:
        """Read a flag, and remove its values from the front of `rest`. Errors: ValueError."""
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
        elif spelling == _LAYERS and not _reads_as(int, values[0]):
            self._set_layers(values[0])
        elif isinstance(meaning, Sets | Several):
            parts = meaning.parts if isinstance(meaning, Several) else (meaning,)
            if not any([self._set(spelling, part, values) for part in parts]):
                files = "the files say it" if spelling.startswith("--tokenizer") else "it is the default"
                self.note(" ".join((spelling, *values)), files)

    def note(self, what: str, reason: str) -> None:
        self.notes.append(f"{what} is accepted and changes nothing: {reason}")

    def _set(self, spelling: str, meaning: Sets, values: Sequence[str]) -> bool:
        """Set an option, and return whether anything was set. Errors: ValueError for an invalid value."""
        if meaning.constant is not None:
            renamed, gives_way = [meaning.constant], meaning.gives_way
        else:
            checked = [_checked(spelling, value, meaning) for value in values]
            renamed = [value for value in checked if value is not None]
            gives_way = meaning.gives_way and checked != list(values)
        by_spelling = self._spelled.setdefault(meaning.flag, {})
        # A switch and its negation count as one spelling, so the last one takes effect.
        spelling = spelling.replace("--no-", "--") if spelling == _no(meaning.flag) else spelling
        before = by_spelling[spelling][1] if meaning.values == MANY and spelling in by_spelling else []
        if renamed:
            by_spelling[spelling] = (gives_way, before + renamed)
        return bool(renamed)

    def _set_layers(self, expression: str) -> None:
        """Set the dense layers, which the expression marks by 0. Errors: ValueError if it is not a list of 0 and 1."""
        try:
            layers = layers_with_experts(expression)
        except ValueError as error:
            rule = "must be a whole number, or a list with 0 or 1 for each layer, such as ([0]*3+[1]*58)"
            raise ValueError(f"{_LAYERS} {expression}: {error}; {rule}") from None
        self._set(_LAYERS, Sets("--experts-every", 1), ["1"])
        self._set(_LAYERS, Sets("--dense-layers", MANY), [str(layer) for layer, one in enumerate(layers) if not one])
        self.expected_layers = len(layers)

    def settings(self) -> Iterator[Setting]:
        """Yield the settings, in the order in which they were first given."""
        for flag, by_spelling in self._spelled.items():
            if not by_spelling:
                continue
            meaning = self.known.get(flag)
            try:
                yield Setting(flag, _agreed(by_spelling), isinstance(meaning, Sets) and meaning.values == 0)
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
    """The flag as it was typed; its canonical flag is empty if the spelling sets nothing."""
    first = meaning.parts[0] if isinstance(meaning, Several) else meaning
    families = () if isinstance(meaning, Refuses) else meaning.families
    return Typed(spelling, first.flag if isinstance(first, Sets) else "", tuple(values), families)


def _look_up(typed: str, known: Mapping[str, Meaning]) -> tuple[str, Meaning]:
    """The known spelling that `typed` equals or is a unique prefix of; hyphens and underscores are equivalent.

    Prefixes of dropped and refused flags are not recognised, as in Megatron-LM.
    """
    if typed in known:
        return typed, known[typed]
    hyphened = typed.replace("_", "-")
    exact = [name for name in known if name.replace("_", "-") == hyphened]
    if exact:
        return exact[0], known[exact[0]]
    valid = {name: meaning for name, meaning in known.items() if isinstance(meaning, Sets | Several)}
    completions = {name: meaning for name, meaning in valid.items() if name.replace("_", "-").startswith(hyphened)}
    if not completions:
        for name, meaning in known.items():
            if name.endswith("*") and hyphened.startswith(name[:-1]):
                if isinstance(meaning, Refuses):  # also the flags of this group that are misspelled
                    meaning = replace(meaning, reason=meaning.reason + nearest_flag(typed, valid))
                return typed, meaning
        every = "--help-all" if "--help-all" in known else "--help"
        raise ValueError(f"{typed}: is not an option{nearest_flag(typed, valid)}; {every} lists all")
    first = next(iter(completions))
    if any(meaning != completions[first] for meaning in completions.values()):
        raise ValueError(f"{typed}: is short for several flags: {', '.join(sorted(completions))}")
    return first, completions[first]


def _following(rest: list[str], most: int) -> list[str]:
    """Remove the values of a flag, at most `most`, from the front of `rest`."""
    values: list[str] = []
    while len(values) != most and rest and not _is_flag(rest[0]):
        values.append(rest.pop(0))
    return values


def _values(word: str, spelling: str, meaning: Meaning, rest: list[str]) -> list[str]:
    """Return the unchanged values of a flag: the text after its `=`, or words that are removed from the front of
    `rest`."""
    _, equals_sign, value = word.partition("=")
    values = [value] if equals_sign else _following(rest, meaning.values)
    if isinstance(meaning, Refuses):
        raise ValueError(f"{spelling}: {meaning.reason}")
    if isinstance(meaning, Drops):
        if (
            meaning.only
            and (refused := next((value for value in values if value not in meaning.only), None)) is not None
        ):
            valid = ", ".join(meaning.only)
            raise ValueError(f"{spelling} {refused}: is not supported: {meaning.reason}; valid: {valid}")
        if not values and meaning.values == 1:
            raise ValueError(f"{spelling}: needs a value")
        return values
    if meaning.values == 0 and values:
        raise ValueError(f"{word}: {spelling} takes no value")
    if meaning.values != 0 and not values:
        raise ValueError(f"{spelling}: needs a value")
    return values


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
    """Mega's name of `value`; None if the value sets nothing. Errors: ValueError if it is not a valid number or
    choice."""
    closed = () if meaning.gives_way else tuple(meaning.renames)
    choices = closed or meaning.choices
    value = meaning.synonyms.get(value, value)
    if not value and not choices and not meaning.may_be_empty:
        raise ValueError(f"{spelling} '': {EMPTY}")
    if choices and value not in choices and value not in meaning.renames:
        if value in meaning.choices:
            return value
        hint = meaning.refused.get(value, f"is not a choice{nearest(value, choices)}")
        valid = choices if closed or spelling == meaning.flag else tuple(dict.fromkeys((*meaning.renames, *choices)))
        raise ValueError(f"{spelling} {value}: {hint}; valid: {', '.join(valid)}")
    if meaning.kind in (int, float) and value not in meaning.renames and not _reads_as(meaning.kind, value):
        adjective = "whole " if meaning.kind is int else ""
        hint_of_many = ", or several with blanks between them" if meaning.values == MANY else ""
        raise ValueError(f"{spelling} {value}: must be a {adjective}number{hint_of_many}")
    return meaning.renames.get(value, value)


def _agreed(spelled: Mapping[str, tuple[bool, list[str]]]) -> list[str]:
    """The value on which all spellings of an option agree. Spellings with `gives_way` count only if there are no other
    spellings. Errors: ValueError if two spellings contradict each other."""
    firm = {spelling: values for spelling, (gives_way, values) in spelled.items() if not gives_way}
    candidates = firm or {spelling: values for spelling, (_, values) in spelled.items()}
    (first, agreed), *other_spellings = candidates.items()
    for spelling, values in other_spellings:
        if values != agreed:
            raise ValueError(f"{spelling}: contradicts {first}; give one of them")
    return agreed


def _no(flag: str) -> str:
    """
    >>> _no("--bias")
    '--no-bias'
    """
    return "--no-" + flag.removeprefix("--")
