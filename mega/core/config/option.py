"""One line per option: what a field of a config section is, to every reader of it.

A section is a frozen, keyword-only dataclass whose fields are made by `option`. The field *is* the
command-line flag, the TOML key, the line of help and the Megatron-LM spelling, and records whether it may change on
resume, belongs to a layout, and is read by `mega bench`: nothing about an option is written a second time anywhere.
This file knows neither Typer nor TOML nor any option; they read `Option`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

OnResume = Literal["must match", "schedule", "noted", "free"]
"""What happens where a run resumes with another value than the checkpoint's:

    must match   it is refused
    schedule     it is refused, unless --override-schedule or --use-checkpoint-schedule chooses which one counts
    noted        it is accepted, and reported with both values: the run computes something else from here on
    free         it is accepted
"""

Bench = Literal["read", "unused", "host"]
"""What `mega bench` does with an option: it is part of what is measured; it is dropped, with a note; it chooses where
to measure, which is all that --calibrate takes."""


Families = tuple[str, ...] | Mapping[object, tuple[str, ...]]
"""Names of model families, of those too that are not built; or a value of an option -> such names."""


class Section:
    """A panel of flags and a table of the TOML file; on_resume, bench, evaluated and common hold for options
    that do not set their own."""

    title: ClassVar[str]
    on_resume: ClassVar[OnResume] = "free"
    bench: ClassVar[Bench] = "read"
    evaluated: ClassVar[bool] = False
    common: ClassVar[bool] = False


class VerbSection(Section):
    """A section of a verb other than those that take a whole run: its help shows every option."""

    common: ClassVar[bool] = True


class _TakesValue:
    """The Megatron-LM flag carries the value itself, as `--num-layers 24` does."""

    def __repr__(self) -> str:
        return "VALUE"


VALUE = _TakesValue()


@dataclass(frozen=True)
class weak:
    """A constant that gives way to any other flag of the same option.

    `--recompute-activations` means "selective", unless `--recompute-granularity full` is given as well.
    """

    value: object


@dataclass(frozen=True)
class Renamed:
    """The Megatron-LM flag carries the value itself, of which some once had other names, old -> today's.

    A renamed value gives way to any other flag of the same option; None says nothing of it. refused: values without a
    counterpart -> what they did.
    """

    values: Mapping[str, str | None]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """The numbers that an option may hold: a test, and the words that follow "must be"."""

    rule: str
    holds: Callable[[float], bool]


COUNT = Range("at least 1", lambda value: value >= 1)
SEVERAL = Range("at least 2", lambda value: value >= 2)
FROM_0 = Range("at least 0", lambda value: value >= 0)
MINUTES = Range("greater than 0, at most 35,000", lambda value: 0 < value <= 35_000)
NOT_NEGATIVE = Range("at least 0, and finite", lambda value: 0 <= value < math.inf)
POSITIVE = Range("greater than 0, and finite", lambda value: 0 < value < math.inf)
ABOVE_ONE = Range("greater than 1, and finite", lambda value: 1 < value < math.inf)
SHARE = Range("greater than 0 and at most 1", lambda value: 0 < value <= 1)
CHANCE = Range("at least 0 and at most 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
BELOW_HALF = Range("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)
SEED = Range("0 to 4294967295", lambda value: 0 <= value < 2**32)
ZERO_STAGE = Range("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3))


@dataclass(frozen=True)
class Option:
    """What `option` stores in a field's metadata.

    help: one sentence, no full stop.
    megatron: Megatron-LM spelling -> `VALUE` if it carries the value, a mapping if it carries the value under
        another name (`{"--normalization": {"RMSNorm": "rmsnorm"}}`), else the constant it stands for
        (`{"--swiglu": "swiglu"}`, `{"--disable-bias-linear": False}`). The same spelling may be one of several options.
    synonyms: other words that users have for the flag ("--learning-rate"), or for a value ("gpu" -> "cuda").
    short: a one-letter flag such as "-o", or None.
    metavar: what stands for the value in help; None is its type.
    common: shown in the short `--help`; the rest appears under `--help-all`. None takes the section's.
    unit: what a number counts, for help and messages ("samples", "minutes").
    within: the range of a number, or of each number of a tuple.
    most: the largest whole number: of a tensor's dimension, or what a model can be planned with in seconds.
    choices: valid values that are registered while the program runs; fixed ones are a `Literal` type.
    needs: option -> its values, or their range, with which this one may differ from its default; () is any value but
        none and off.
    read_with: option -> its values, as in `needs`: where none of them holds, this option changes
        nothing, and a line says so.
    families: model families whose runs read it, or a value -> those for which it is; () is all. A family that sets its
        default reads it too.
    usual_in: families whose scripts give it, or a value -> those: with another one --family must be given.
    spelling_families: Megatron-LM spelling -> families whose scripts alone have it.
    formerly: the table under which TOML files of an earlier version have it.
    on_resume, bench: as above; None takes the section's.
    evaluated: whether `mega eval` reads it; the model's shape it only compares. None takes the section's.
    layout: how ranks share the work and in what order. It changes no result by more than rounding, so
        `memory-estimate --fit` chooses it.
    hub: what a name of the Hugging Face Hub, given instead of a path, is fetched as: "model", "tokenizer", "dataset".
    """

    help: str
    megatron: Mapping[str, object] = dataclasses.field(default_factory=dict)
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    short: str | None = None
    metavar: str | None = None
    common: bool | None = None
    unit: str | None = None
    within: Range | None = None
    most: int = 2**63 - 1
    choices: Collection[str] | None = None
    needs: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    read_with: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    families: Families = ()
    usual_in: Families = ()
    spelling_families: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    formerly: str | None = None
    on_resume: OnResume | None = None
    bench: Bench | None = None
    evaluated: bool | None = None
    layout: bool = False
    hub: Literal["model", "tokenizer", "dataset"] | None = None


def option(default: Any, help: str, *, megatron: str | Mapping[str, Any] | None = None, **properties: Any) -> Any:
    """A dataclass field that is also a flag. `megatron` as a plain string means that flag with a value; `properties`
    are the other fields of `Option`."""
    spellings = {megatron: VALUE} if isinstance(megatron, str) else dict(megatron or {})
    described = Option(help=help, megatron=spellings, **properties)
    return dataclasses.field(default=default, metadata={"option": described})


REQUIRED: object = dataclasses.MISSING
"""The default of an option that must be given."""


def like(section: type[Section], name: str, default: Any = REQUIRED, **properties: Any) -> Any:
    """A field as that of another section, with its default, help and spellings, but for what is given here."""
    field: dataclasses.Field[object] = next(
        each
        for each in dataclasses.fields(section)  # type: ignore[arg-type]
        if each.name == name
    )
    described = dataclasses.replace(field.metadata["option"], **properties)
    return dataclasses.field(default=field.default if default is REQUIRED else default, metadata={"option": described})


def describe(field: dataclasses.Field[object], section: type[Section]) -> Option:
    """The `Option` of a field of `section`, with nothing left to the section."""
    described: Option = field.metadata["option"]
    return dataclasses.replace(
        described,
        on_resume=described.on_resume or section.on_resume,
        bench=described.bench or section.bench,
        evaluated=section.evaluated if described.evaluated is None else described.evaluated,
        common=section.common if described.common is None else described.common,
    )


def changed(section: Section) -> list[str]:
    """Names of the options of a section that are not at their defaults."""
    return [
        field.name
        for field in dataclasses.fields(section)  # type: ignore[arg-type]
        if "option" in field.metadata and getattr(section, field.name) != field.default
    ]
