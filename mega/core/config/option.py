"""Define options: each field of a config section records all properties of one option.

A section is a frozen, keyword-only dataclass whose fields are made by `option`. A field defines the command-line flag,
the TOML key, the help text and the Megatron-LM spelling, and records whether the option may change on resume, belongs
to a layout, and is read by `mega bench`. Each property is written only once. This module does not depend on Typer, TOML
or the names of options; `command_line/options.py` and `toml.py` read `Option`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

OnResume = Literal["must match", "schedule", "noted", "rounding", "free"]
"""What happens if a run resumes with a value that differs from the checkpoint's:

    must match   the new value is refused
    schedule     the new value is refused, unless --override-schedule or --use-checkpoint-schedule selects a value
    noted        the new value is accepted, and both values are reported, because the new value affects later steps
    rounding     the new value is accepted, and both values are reported if the new value changes the order of sums
                 (`Option.rounds_over`), so that results differ by rounding
    free         the new value is accepted
"""

Bench = Literal["read", "unused", "host"]
"""How `mega bench` treats an option: a `read` option affects the measured run; an `unused` option is dropped, with a
message; a `host` option selects the hardware to measure. --calibrate accepts only `host` options."""


Families = tuple[str, ...] | Mapping[object, tuple[str, ...]]
"""Names of model families, implemented or not; or a mapping from values of an option to tuples of family names."""


class Section:
    """Base class of a section: a panel of flags and a table of the TOML file. `on_resume`, `bench`, `evaluated` and
    `common` are the defaults for the section's options."""

    title: ClassVar[str]
    on_resume: ClassVar[OnResume] = "free"
    bench: ClassVar[Bench] = "read"
    evaluated: ClassVar[bool] = False
    common: ClassVar[bool] = False


class VerbSection(Section):
    """A section of a subcommand that does not accept all options of a run. `--help` shows all options of such a
    section."""

    common: ClassVar[bool] = True


class _TakesValue:
    """Type of `VALUE`, for a Megatron-LM flag that is followed by the value, such as `--num-layers 24`."""

    def __repr__(self) -> str:
        return "VALUE"


VALUE = _TakesValue()


@dataclass(frozen=True)
class weak:
    """A constant set by a Megatron-LM flag, which any other flag of the same option overrides.

    For example, `--recompute-activations` means "selective", unless `--recompute-granularity full` is also given.
    """

    value: object


@dataclass(frozen=True)
class Renamed:
    """A Megatron-LM flag that is followed by the value. values: Megatron-LM's name of a value -> mega's name, if the
    names differ; None leaves the option unset.

    Any other flag of the same option overrides a renamed value. refused: value without a counterpart -> a description
    of its effect in Megatron-LM.
    """

    values: Mapping[str, str | None]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """The valid numbers of an option. rule: text that follows "must be" in a message. holds: whether a number is
    valid."""

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
    """Properties of an option, which `option` stores in the metadata of a field."""

    help: str
    """The help text, one sentence without a full stop."""
    megatron: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Megatron-LM spelling -> `VALUE` if the flag is followed by the value, a mapping if the flag is followed by a
    different name for the value (`{"--normalization": {"RMSNorm": "rmsnorm"}}`), otherwise the constant that the flag
    sets (`{"--swiglu": "swiglu"}`, `{"--disable-bias-linear": False}`). Several options may have the same spelling."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Synonym that users may type -> the flag ("--learning-rate" -> "--lr") or the value ("gpu" -> "cuda")."""
    short: str | None = None
    """A one-letter flag such as "-o"."""
    metavar: str | None = None
    """Placeholder for the value in the help; None for the type of the value."""
    common: bool | None = None
    """Whether `--help` shows the option; `--help-all` shows all options. None for the section's default."""
    unit: str | None = None
    """Unit of a number, for help and messages ("samples", "minutes")."""
    within: Range | None = None
    """Valid range of a number, or of each number in a tuple."""
    most: int = 2**63 - 1
    """Maximum valid integer, which limits the dimensions of tensors and the time to plan a run."""
    choices: Collection[str] | None = None
    """Valid values that are registered at run time; fixed values are given by a `Literal` type."""
    needs: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    """Name of another option -> the values, or the range of values, that the other option must have if this option
    differs from its default; () means any value except None and off."""
    read_with: Mapping[str, tuple[str, ...] | Range] = dataclasses.field(default_factory=dict)
    """Name of another option -> values of the other option, as in `needs`. If no entry is satisfied, this option has no
    effect, and a message is printed."""
    families: Families = ()
    """Model families whose runs read the option, or a mapping from its values to families; () means all families. A
    family that sets a default for the option also reads the option."""
    usual_in: Families = ()
    """Families whose Megatron-LM scripts set the option, or a mapping from its values to such families; for any other
    family --family must be given."""
    spelling_families: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Megatron-LM spelling -> the only families whose Megatron-LM scripts accept this spelling."""
    text: bool = False
    """Whether a string may be empty, such as a prompt. Other strings are names or paths: an empty one comes from an
    unset variable of a shell, and as a path it would be the current directory."""
    formerly: str | None = None
    """Name of the option's table in TOML files of an earlier version."""
    on_resume: OnResume | None = None
    """What happens on resume if the value differs (`OnResume`); None for the section's default."""
    rounds_over: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Conditions under which another value changes the order of sums, if `on_resume` is "rounding": "tp", "cp", "ep" or
    "data" (dp and cp) -> minimum number of ranks; {"gpu": 1} for an option that has an effect only on GPUs."""
    bench: Bench | None = None
    """How `mega bench` treats the option (`Bench`); None for the section's default."""
    evaluated: bool | None = None
    """Whether `mega eval` reads the option. (Options of the model's shape are only compared with the model.) None for
    the section's default."""
    layout: bool = False
    """Whether the option determines how ranks divide the work and in what order they do it. `memory-estimate --fit` may
    change such options, because they affect results only by rounding."""
    once: bool = False
    """Whether the option applies to only one start of a run, such as the step at which the process stops. The run.toml
    of a checkpoint does not contain such options."""
    hub: Literal["model", "tokenizer", "dataset"] | None = None
    """Type of the Hugging Face Hub repository whose name may be given instead of a path; None if no such name is
    accepted."""


EMPTY = "must not be empty; leave it out, or set the variable that it comes from"
"""The rule for strings that are not `Option.text`."""


def option(default: Any, help: str, *, megatron: str | Mapping[str, Any] | None = None, **properties: Any) -> Any:
    """Return a dataclass field that is also a flag. megatron: value of `Option.megatron`, or a string, which is a flag
    followed by the value. properties: the other fields of `Option`."""
    spellings = {megatron: VALUE} if isinstance(megatron, str) else dict(megatron or {})
    record = Option(help=help, megatron=spellings, **properties)
    return dataclasses.field(default=default, metadata={"option": record})


REQUIRED: object = dataclasses.MISSING
"""The default of an option that must be given."""


def like(section: type[Section], name: str, default: Any = REQUIRED, **properties: Any) -> Any:
    """Return a copy of the field `name` of another section, in which the given properties replace the original ones.
    default: replaces the default, if given."""
    field: dataclasses.Field[object] = next(
        each
        for each in dataclasses.fields(section)  # type: ignore[arg-type]
        if each.name == name
    )
    record = dataclasses.replace(field.metadata["option"], **properties)
    return dataclasses.field(default=field.default if default is REQUIRED else default, metadata={"option": record})


def describe(field: dataclasses.Field[object], section: type[Section]) -> Option:
    """Return the `Option` of a field, with None replaced with the section's defaults."""
    record: Option = field.metadata["option"]
    return dataclasses.replace(
        record,
        on_resume=record.on_resume or section.on_resume,
        bench=record.bench or section.bench,
        evaluated=section.evaluated if record.evaluated is None else record.evaluated,
        common=section.common if record.common is None else record.common,
    )


def changed(section: Section) -> list[str]:
    """Return the names of a section's options whose values differ from the defaults."""
    return [
        field.name
        for field in dataclasses.fields(section)  # type: ignore[arg-type]
        if "option" in field.metadata and getattr(section, field.name) != field.default
    ]
