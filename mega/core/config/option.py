"""One definition per option: all properties of a field of a config section.

A section is a frozen, keyword-only dataclass whose fields are made by `option`. The field *is* the command-line flag,
the TOML key, the line of help and the Megatron-LM spelling, and records whether it may change on resume, belongs to a
layout, and is read by `mega bench`. No fact about an option is written twice. This module does not depend on Typer or
TOML, and names no option; command_line/options.py and toml.py read `Option`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

OnResume = Literal["must match", "schedule", "noted", "free"]
"""What happens if a run resumes with a value that differs from the checkpoint's:

    must match   the new value is refused
    schedule     the new value is refused, unless --override-schedule or --use-checkpoint-schedule chooses one of both
    noted        the new value is accepted, and both are reported, because later steps depend on the new value
    free         the new value is accepted
"""

Bench = Literal["read", "unused", "host"]
"""How `mega bench` treats an option: `read` is part of the measured run; `unused` is dropped, with a note; `host`
selects the hardware that is measured, and --calibrate takes only these options."""


Families = tuple[str, ...] | Mapping[object, tuple[str, ...]]
"""Names of model families, implemented or not; or a mapping from values of the option to such names."""


class Section:
    """A panel of flags and a table of the TOML file. `on_resume`, `bench`, `evaluated` and `common` are the defaults of
    its options."""

    title: ClassVar[str]
    on_resume: ClassVar[OnResume] = "free"
    bench: ClassVar[Bench] = "read"
    evaluated: ClassVar[bool] = False
    common: ClassVar[bool] = False


class VerbSection(Section):
    """A section of a verb that does not take a whole run. Help shows all its options."""

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
    """The Megatron-LM flag carries the value itself. `values` maps former names of values to today's.

    A renamed value gives way to any other flag of the same option; None leaves the option unset. refused: values
    without a counterpart -> what they did in Megatron-LM.
    """

    values: Mapping[str, str | None]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """The numbers that an option may hold: the words that follow "must be" in a message, and the test."""

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
    """What `option` stores in a field's metadata."""

    help: str
    """One sentence without a full stop."""
    megatron: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Megatron-LM spelling -> `VALUE` if it carries the value, a mapping if it carries the value under another name
    (`{"--normalization": {"RMSNorm": "rmsnorm"}}`), else the constant that it sets (`{"--swiglu": "swiglu"}`,
    `{"--disable-bias-linear": False}`). Several options may have the same spelling."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other words that users type for the flag ("--learning-rate"), or for a value ("gpu" -> "cuda")."""
    short: str | None = None
    """A one-letter flag such as "-o"."""
    metavar: str | None = None
    """Placeholder of the value in help; None means the type of the value."""
    common: bool | None = None
    """Whether the short `--help` shows the option; the others appear under `--help-all`. None means the section's
    default."""
    unit: str | None = None
    """Unit of a number, for help and messages ("samples", "minutes")."""
    within: Range | None = None
    """Valid range of a number, or of each number in a tuple."""
    most: int = 2**63 - 1
    """Largest valid whole number: the bound of a tensor's dimension, or of what can be planned within seconds."""
    choices: Collection[str] | None = None
    """Valid values that are registered while the program runs; fixed ones are a `Literal` type."""
    needs: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    """Other option -> its values, or their range, that are required if this option differs from its default; () means
    any value except None and off."""
    read_with: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    """Other option -> its values, as in `needs`. If no entry holds, this option has no effect, and a message says
    so."""
    families: Families = ()
    """Model families whose runs read the option, or a mapping from its values to families; () means all families. A
    family that sets a default for the option reads it too."""
    usual_in: Families = ()
    """Families whose scripts set the option, or a mapping from its values to such families; runs of other families must
    give --family."""
    spelling_families: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Megatron-LM spelling -> the only families whose scripts have it."""
    formerly: str | None = None
    """The option's table in TOML files of an earlier version."""
    on_resume: OnResume | None = None
    """See `OnResume`; None means the section's default."""
    bench: Bench | None = None
    """See `Bench`; None means the section's default."""
    evaluated: bool | None = None
    """Whether `mega eval` reads the option. (Options of the model's shape are only compared with the model.) None means
    the section's default."""
    layout: bool = False
    """Whether the option sets how ranks share the work and in what order. Such an option changes results only by
    rounding, so `memory-estimate --fit` chooses it."""
    hub: Literal["model", "tokenizer", "dataset"] | None = None
    """Kind of repository that a name of the Hugging Face Hub, given instead of a path, refers to."""


def option(default: Any, help: str, *, megatron: str | Mapping[str, Any] | None = None, **properties: Any) -> Any:
    """A dataclass field that is also a flag. megatron: a plain string is a flag that carries the value. properties: the
    other fields of `Option`."""
    spellings = {megatron: VALUE} if isinstance(megatron, str) else dict(megatron or {})
    record = Option(help=help, megatron=spellings, **properties)
    return dataclasses.field(default=default, metadata={"option": record})


REQUIRED: object = dataclasses.MISSING
"""The default of an option that must be given."""


def like(section: type[Section], name: str, default: Any = REQUIRED, **properties: Any) -> Any:
    """A copy of a field of another section, with its default and properties, except for those given here."""
    field: dataclasses.Field[object] = next(
        each
        for each in dataclasses.fields(section)  # type: ignore[arg-type]
        if each.name == name
    )
    record = dataclasses.replace(field.metadata["option"], **properties)
    return dataclasses.field(default=field.default if default is REQUIRED else default, metadata={"option": record})


def describe(field: dataclasses.Field[object], section: type[Section]) -> Option:
    """The `Option` of a field, in which the section's defaults replace None."""
    record: Option = field.metadata["option"]
    return dataclasses.replace(
        record,
        on_resume=record.on_resume or section.on_resume,
        bench=record.bench or section.bench,
        evaluated=section.evaluated if record.evaluated is None else record.evaluated,
        common=section.common if record.common is None else record.common,
    )


def changed(section: Section) -> list[str]:
    """Names of a section's options whose values differ from the defaults."""
    return [
        field.name
        for field in dataclasses.fields(section)  # type: ignore[arg-type]
        if "option" in field.metadata and getattr(section, field.name) != field.default
    ]
