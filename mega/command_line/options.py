"""Config sections as command-line options: the signature of a verb is its configuration.

A verb is a plain function. A parameter annotated `Options` becomes every option of a run with `--model`; one
annotated with another section becomes that section's options, and its name is their TOML table. Both bring `--config`
and `--print-config`. A parameter annotated `GivenOptions` gets the options that were given; the others are Typer's as
they stand. Only what the user typed overrides presets and the TOML file. This file builds signatures and knows no
verb and no option by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Optional,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperCommand, TyperGroup

from mega.command_line.argv import MANY, Meaning, Sets, meanings, translate
from mega.command_line.help import help_text
from mega.command_line.legacy import deepspeed
from mega.command_line.legacy.flags import obsolete_flags
from mega.core.config import toml
from mega.core.config.compose import GivenOptions, compose
from mega.core.config.families import check_typed
from mega.core.config.option import Section, VerbSection
from mega.core.config.presets import PRESETS
from mega.core.config.run import Options, entries, run_schema, sections
from mega.core.config.schema import Entry, Schema, schema_of
from mega.core.hub import folders
from mega.core.processes.world import is_first_rank, note
from mega.core.terminal import print_whole

if TYPE_CHECKING:  # Typer's own copy of click
    from typer._click.core import Command as AnyCommand
    from typer._click.core import Context
    from typer._click.shell_completion import CompletionItem

Result = TypeVar("Result")

_TYPED = "mega.typed"
"""Where the flags of a command line are kept as they were typed."""


ENTRIES = "entries"
"""The attribute of a verb's function that `command` keeps the options of its sections in."""

LEAST_TYPED = 4
"""Letters of a flag, hyphens included, from which on a shell offers spellings that `--help` does not show."""


class Reads(NamedTuple):
    """Next to `Options` in an `Annotated`: all options are taken, and help shows those that have a property."""

    property: str


class Without(NamedTuple):
    """Next to a section in an `Annotated`: options of it that the verb does not have, by name."""

    names: tuple[str, ...]


def without(*names: str) -> Without:
    """For `Annotated[SomeSection, without("option", ...)]`."""
    return Without(names)


class Command(TyperCommand):
    """A Typer command that answers to argparse's habits.

    stated_by: of a verb that reads a model where it lies, why options of its training change nothing; set by `load`.
    whole_line: of a verb that is given the command line of another program, whose flags are not ours; set by `load`.
    loads_model: of a verb whose model is the one at --load, where that is given; set by `load`.
    """

    stated_by: str | None = None
    whole_line: bool = False
    loads_model: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: Mapping[str, Entry] = getattr(self.callback, ENTRIES, {})
        """The options of its sections, by name."""
        for param in self.params:
            # A help text is text: rich would read `[text]` as markup and drop it.
            if getattr(param, "help", None):
                param.help = param.help.replace("[", "\\[")  # type: ignore[attr-defined]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Translates `args` before Typer reads them; a note on stderr for every flag that means nothing."""
        if ctx.resilient_parsing:  # a shell completes a line that is not finished and need not be right
            return super().parse_args(ctx, args)
        if self.whole_line and args and not args[0].startswith("-"):
            args = ["--", *args]
        canonical, notes, ctx.meta[_TYPED] = translate(args, self.meanings(ctx))
        if notes and is_first_rank():
            print("\n".join(notes), file=sys.stderr)
        rest = super().parse_args(ctx, canonical)
        if not ctx.params.get("config") and not ctx.params.get("print_config"):
            _check_given(ctx.params, list(self.entries.values()))
        return rest

    def meanings(self, ctx: Context) -> dict[str, Meaning]:
        """Every spelling that the verb answers to."""
        own: dict[str, Meaning] = {}
        configured: list[Entry] = []
        for param in self.get_params(ctx):
            if (entry := self.entries.get(param.name or "")) is not None:
                configured.append(entry)
            elif param.param_type_name == "option":
                own |= _own_flags(param)
        return meanings(configured, own, obsolete_flags(), self.stated_by)

    def get_help(self, ctx: Context) -> str:
        """As plain text, in which no flag is cut."""
        return help_text(self, ctx, self.entries)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Common flags first; where none is meant, those that `--help` hides, and Megatron-LM's spellings."""
        found = super().shell_complete(ctx, incomplete)
        if found or len(incomplete) < LEAST_TYPED or not incomplete.startswith("--"):
            return found
        spelled: dict[str, str] = {}
        for param in self.get_params(ctx):
            entry = self.entries.get(param.name or "")
            names = [*param.opts, *param.secondary_opts, *(entry.option.megatron if entry is not None else ())]
            if param.param_type_name == "option":
                spelled |= dict.fromkeys(names, getattr(param, "help", None) or "")
        return [
            typer.core.CompletionItem(name, help=help) for name, help in spelled.items() if name.startswith(incomplete)
        ]


def load(verb: str) -> TyperCommand | TyperGroup:
    """The Typer command of a verb; imports its file, mega/commands/VERB.py."""
    module = importlib.import_module("mega.commands." + verb.replace("-", "_"))
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        app.command(name=verb, cls=Command)(command(module.run))
    loaded = typer.main.get_command(app)
    assert isinstance(loaded, TyperCommand | TyperGroup)
    loaded.name = verb
    if isinstance(loaded, Command):
        loaded.stated_by = getattr(module, "STATED_BY", None)
        loaded.whole_line = getattr(module, "WHOLE_LINE", False)
        loaded.loads_model = getattr(module, "LOADS_MODEL", False)
    return loaded


@functools.cache
def spellings_of(words: str) -> Mapping[str, Meaning]:
    """Every spelling that a verb answers to, or a verb of a verb's such as `data merge`."""
    verb, *rest = words.split()
    found: AnyCommand = load(verb)
    for name in rest:
        if not isinstance(found, TyperGroup) or name not in found.commands:
            raise ValueError(f"mega {words}: there is no such verb")
        found = found.commands[name]
    return found.meanings(typer.Context(found)) if isinstance(found, Command) else {}


def _own_flags(param: Any) -> Mapping[str, Meaning]:
    """What the long spellings of an option mean that is Typer's alone."""
    found: dict[str, Meaning] = {}
    for spellings in (param.opts, param.secondary_opts):
        long = [spelling for spelling in spellings if spelling.startswith("--")]
        values = 0 if param.is_flag or param.count else MANY if param.multiple else param.nargs
        for spelling in long:
            same = entries().get(spelling.removeprefix("--").replace("-", "_"))  # an option of a run, by its name
            found[spelling] = Sets(long[0], values, synonyms={} if same is None else same.option.synonyms)
    return found


def command(function: Callable[..., Result]) -> Callable[..., Result | int]:
    """`function` with a signature that Typer reads: its config parameters spread out into options."""
    takes = _takes(function)
    parameters = list(takes.others)
    if takes.run is not None:
        parameters += _parameters_of(_of_run)
    elif takes.own.entries:
        parameters += _parameters_of(_of_sections)
    own, chosen = list(takes.own.entries.values()), _chosen(takes, parameters)
    parameters += [_parameter(entry, None, takes.spelled(entry)) for entry in own]
    parameters += [_parameter(entry, takes.reads) for entry in chosen]
    if any(not entry.option.common for entry in (*own, *chosen)):
        parameters += _parameters_of(_of_help)

    @functools.wraps(function)
    def verb(**typed: Any) -> Result | int:
        typed.pop("help_all", None)
        flags, own_flags = _typed_options(typed, chosen), _typed_options(typed, own)
        config = typed.pop("config", None) if takes.run is not None or own else None
        print_config = typed.pop("print_config", False)
        file: Mapping[str, object]
        file, own_file = toml.read_schemas(config, takes.schema, takes.own) if config is not None else ({}, {})
        values, preset = {**own_file, **own_flags}, None
        _check_ranges(values, takes.own)
        if takes.run is not None:
            preset, ctx = (typed.pop(name) for name in ("model", "ctx"))
            file = _above_deepspeed(file, typed.pop("deepspeed_config"), typed.pop("deepspeed_lenient"), flags)
            typed[takes.run] = _composed(preset, file, flags, ctx)
        if print_config:
            shown = [toml.write(typed[takes.run])] if takes.run is not None else []
            text = "\n".join([*shown, *([toml.write_values(takes.own, values)] if own else [])])
            print_whole(text)
            return 0
        _check_given(values, own)
        # A name of the Hub is fetched when the line has been checked, and only where nothing stands above it.
        values, above = folders.with_folders(values, own, note), {**file, **flags}
        if (found := folders.with_folders(above, chosen, note)) != above:
            file, flags = ({name: found[name] for name in each} for each in (file, flags))
            typed[str(takes.run)] = _composed(preset, file, flags, ctx)
        if takes.given is not None:
            typed[takes.given] = GivenOptions(preset, {**file, **flags}, values)
        return function(**typed, **{table: takes.own.value(table, values) for table in takes.own.tables})

    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(verb, ENTRIES, {entry.name: entry for entry in (*own, *chosen)})
    # Without this, inspect would look through to the function and its config parameters.
    del verb.__wrapped__
    return verb


class _Takes(NamedTuple):
    """What a verb's parameters are. run, given: names of those of a whole run, and of what was given, or None. reads:
    of the run. own: other sections. others: parameters that are Typer's."""

    run: str | None
    given: str | None
    reads: Reads | None
    own: Schema
    others: tuple[inspect.Parameter, ...]

    def spelled(self, entry: Entry) -> str:
        """Whose other spellings of an own option are."""
        return "also" if issubclass(self.own.tables[entry.section], VerbSection) else "Megatron-LM"

    @property
    def schema(self) -> Schema:
        """Of the run; empty without one."""
        return run_schema() if self.run is not None else Schema({}, {})


def _takes(function: Callable[..., object]) -> _Takes:
    hints = get_type_hints(function, include_extras=True)
    run = given = reads = None
    tables: dict[str, type[Section]] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    others: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint, note = hints[name], None
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if kind is Options or (inspect.isclass(kind) and issubclass(kind, Section)):
            note = next(iter(get_args(hint)[1:]), None)
        if kind is GivenOptions:
            given = name
        elif kind is Options:
            run, reads = name, note
        elif inspect.isclass(kind) and issubclass(kind, Section):
            tables[name] = kind
            left_out[name] = note.names if isinstance(note, Without) else ()
        else:
            others.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    assert run is None or not set(tables) & set(sections()), f"{function.__name__}: a table of a run has that name"
    named = tuple(parameter.name for parameter in others)  # which mean something else
    own = schema_of(tables, {table: (*names, *named) for table, names in left_out.items()})
    return _Takes(run, given, reads, own, tuple(others))


def _chosen(takes: _Takes, others: Sequence[inspect.Parameter]) -> list[Entry]:
    """The options of a run, but for those whose names the verb's own options have, which mean others."""
    taken = {parameter.name for parameter in others} | set(takes.own.entries)
    return [entry for entry in takes.schema.entries.values() if entry.name not in taken]


def _check_ranges(values: Mapping[str, object], schema: Schema) -> None:
    """Errors: ValueError with a line for each number of a verb's own that is out of its range."""
    if values:
        from mega.core.config.check import out_of_range

        if problems := list(out_of_range(values, schema)):
            raise ValueError("\n".join(problems))


def _check_given(values: Mapping[str, object], own: Sequence[Entry]) -> None:
    """Errors: ValueError naming the first option that must be given and is not."""
    for entry in own:
        if entry.required and values.get(entry.name) in (None, (), []):
            raise ValueError(f"{entry.flag} is missing: give {entry.option.help}")


def local_place(flag: str, place: str) -> str:
    """The folder of the model that a name of the Hub names; any other place as it is. Errors: ValueError, OSError."""
    return folders.local_place(flag, place, report=note)


def _above_deepspeed(
    file: Mapping[str, object], ds_json: str | None, lenient: bool, options: Mapping[str, object]
) -> Mapping[str, object]:
    """The options of a TOML file above those of a DeepSpeed JSON. Errors: ValueError."""
    if ds_json is None:
        return file
    left_out: list[str] | None = [] if lenient else None
    file = deepspeed.above(file, ds_json, options, left_out)
    if left_out and is_first_rank():
        print("\n".join(f"left out: {line}" for line in left_out), file=sys.stderr)
    return file


def _composed(
    preset: str | None, file: Mapping[str, object], options: Mapping[str, object], ctx: typer.Context
) -> Options:
    """The run of all layers. Errors: ValueError, as of flags of another model family than its, where it is known."""
    run, given = compose(preset, file, options), {**file, **options}
    checkpoint, verb = run.checkpoint, ctx.command
    loads = checkpoint.use_checkpoint_config or (isinstance(verb, Command) and verb.loads_model)
    if "family" in given or not (loads and (checkpoint.load or checkpoint.pretrained_checkpoint)):
        check_typed(run, given, ctx.meta.get(_TYPED, ()))
    return run


def _typed_options(typed: dict[str, Any], chosen: Sequence[Entry]) -> dict[str, object]:
    """Takes the options of a config out of what Typer hands over, without those that were not typed."""
    found: dict[str, object] = {}
    for entry in chosen:
        value = typed.pop(entry.name)
        if value is not None and not (entry.many and not value):
            found[entry.name] = tuple(value) if entry.many else value
    return found


def _parameter(entry: Entry, reads: Reads | None, others: str = "Megatron-LM") -> inspect.Parameter:
    """An option of a config as a parameter; None where it was not typed. others: what its other spellings are."""
    shown = entry.option.common and (reads is None or getattr(entry.option, reads.property))
    one: Any = Literal[entry.choices] if entry.choices else entry.kind
    kind = list[one] if entry.many else one
    flag = f"{entry.flag}/{entry.off}" if entry.kind is bool else entry.flag
    declared = typer.Option(
        *((flag, entry.option.short) if entry.option.short else (flag,)),
        help=_help(entry, others),
        rich_help_panel=entry.title,
        metavar=entry.option.metavar,
        show_default=False,
        hidden=not shown,
    )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], declared],  # noqa: UP045 - `|` cannot join a runtime Literal here
    )


def _help(entry: Entry, whose: str) -> str:
    """The line of help: what it is, its default, other spellings."""
    default = "" if entry.default in (None, (), "") else f" [default: {_shown(entry.default)}]"
    default = " [required]" if entry.required else default
    others = [spelling for spelling in entry.option.megatron if spelling != entry.flag]
    spellings = f" ({whose}: {', '.join(others)})" if others else ""
    return entry.option.help + default + spellings


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def _show_everything(ctx: typer.Context, asked: bool) -> None:
    """Prints the help of every option of the command."""
    if asked:
        print(help_text(ctx.command, ctx, getattr(ctx.command, ENTRIES, {}), everything=True))
        raise typer.Exit()


def _parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function, by name alone."""
    signature = inspect.signature(function, eval_str=True)
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]


def _of_help(
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="Show every option, not only the common ones, and exit.",
            callback=_show_everything,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """What a verb takes that has more options than its help shows."""


_CONFIG = typer.Option("--config", "-c", help="a TOML file of options; flags override it")


def _of_run(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="a preset, such as llama2-7b (mega presets lists all); --config overrides it",
            autocompletion=lambda incomplete: [name for name in PRESETS if name.startswith(incomplete)],
        ),
    ] = None,
    config: Annotated[str | None, _CONFIG] = None,
    deepspeed_config: Annotated[
        str | None, typer.Option("--deepspeed-config", help="a DeepSpeed JSON of options; flags override it")
    ] = None,
    deepspeed_lenient: Annotated[
        bool,
        typer.Option("--deepspeed-lenient", help="leave out what a DeepSpeed JSON asks for and cannot be had here"),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the run as TOML, ready for --config, and exit")
    ] = False,
) -> None:
    """What a verb takes that reads a whole run, along with the options of its sections."""


def _of_sections(
    config: Annotated[str | None, _CONFIG] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the options as TOML, ready for --config, and exit")
    ] = False,
) -> None:
    """What a verb takes that has sections of its own and no run."""
