"""Config sections as command-line options: the signature of a subcommand defines its configuration.

A subcommand is a plain function. A parameter annotated `Options` becomes all options of a run, with `--model`; a
parameter annotated with another section becomes that section's options, and its name becomes their TOML table. Both add
`--config` and `--print-config`. A parameter annotated `GivenOptions` receives the options that were given; all other
parameters are passed to Typer unchanged. Only options given on the command line override presets and the TOML file.
This module builds signatures, and does not depend on particular subcommands or options.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
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
from mega.core.config.run import Options, entries, run_schema, sections, updated
from mega.core.config.schema import Entry, Schema, schema_of
from mega.core.files import url_of
from mega.core.hub import folders
from mega.core.processes.world import is_first_rank, note
from mega.core.terminal import print_whole

if TYPE_CHECKING:  # Typer's own copy of click
    from typer._click.core import Command as AnyCommand
    from typer._click.core import Context
    from typer._click.shell_completion import CompletionItem

Result = TypeVar("Result")

_TYPED = "mega.typed"
"""Key under which the metadata of Typer's context contains the flags as they were typed."""


ENTRIES = "entries"
"""Attribute of a subcommand's function in which `command` stores the options of its sections."""

LEAST_TYPED = 4
"""Minimum length of a word, with its hyphens, for which a shell also completes spellings that `--help` does not
show."""


class Reads(NamedTuple):
    """Annotation of an `Options` parameter: all options are accepted, but help shows only those with this property."""

    property: str


class Without(NamedTuple):
    """Annotation of a section parameter: names of options that the subcommand does not have."""

    names: tuple[str, ...]


def without(*names: str) -> Without:
    """Return the annotation for `Annotated[SomeSection, without("option", ...)]`."""
    return Without(names)


class Command(TyperCommand):
    """A Typer command that accepts argparse's syntax.

    stated_by: reason why training options have no effect, for a subcommand that reads a trained model.
    whole_line: whether the arguments are the command line of another program, with that program's flags.
    loads_model: whether the subcommand's model is the one at --load, if --load is given; None if this depends on
    --use-checkpoint-config.
    `load` sets these three attributes.
    """

    stated_by: str | None = None
    whole_line: bool = False
    loads_model: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: Mapping[str, Entry] = getattr(self.callback, ENTRIES, {})
        """The options of the subcommand's sections, by name."""
        self._meanings: Mapping[str, Meaning] | None = None
        for param in self.params:
            # Escape brackets: rich would read `[text]` as markup and drop it.
            if getattr(param, "help", None):
                param.help = param.help.replace("[", "\\[")  # type: ignore[attr-defined]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Translate `args` before Typer reads them, and print a message on stderr for every flag without effect."""
        if ctx.resilient_parsing:  # the line that a shell completes is unfinished and may be invalid
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

    def meanings(self, ctx: Context) -> Mapping[str, Meaning]:
        """Every spelling that the subcommand accepts. Computed only once, because there are about a thousand spellings,
        most of them from other programs."""
        if self._meanings is None:
            self._meanings = self._all_meanings(ctx)
        return self._meanings

    def _all_meanings(self, ctx: Context) -> Mapping[str, Meaning]:
        typer_flags: dict[str, Meaning] = {}
        configured: list[Entry] = []
        for param in self.get_params(ctx):
            if (entry := self.entries.get(param.name or "")) is not None:
                configured.append(entry)
            elif param.param_type_name == "option":
                typer_flags |= _own_flags(param)
        return meanings(configured, typer_flags, obsolete_flags(), self.stated_by)

    def get_help(self, ctx: Context) -> str:
        """Help as plain text, in which no flag is cut."""
        return help_text(self, ctx, self.entries)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Complete common flags; if no common flag matches, also flags that `--help` hides, and Megatron-LM's
        spellings."""
        completions = super().shell_complete(ctx, incomplete)
        if completions or len(incomplete) < LEAST_TYPED or not incomplete.startswith("--"):
            return completions
        help_of: dict[str, str] = {}
        for param in self.get_params(ctx):
            entry = self.entries.get(param.name or "")
            names = [*param.opts, *param.secondary_opts, *(entry.option.megatron if entry is not None else ())]
            if param.param_type_name == "option":
                help_of |= dict.fromkeys(names, getattr(param, "help", None) or "")
        return [
            typer.core.CompletionItem(name, help=help) for name, help in help_of.items() if name.startswith(incomplete)
        ]


def load(verb: str) -> TyperCommand | TyperGroup:
    """Load the Typer command of a subcommand from its file, mega/commands/VERB.py."""
    module = importlib.import_module("mega.commands." + verb.replace("-", "_"))
    app = getattr(module, "app", None)
    choices = tuple(entry.choices for entry in entries().values())
    return _group(verb, app, choices) if app is not None else _command(verb, module.__name__, module.run, choices)


Choices = tuple[tuple[str, ...], ...]
"""The choices of all options, which determine a command's help and checks. User code may register more choices, so a
cached command is valid only for these choices."""


@functools.cache
def _group(verb: str, app: typer.Typer, _: Choices) -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    group.name = verb
    return group


@functools.cache
def _command(verb: str, module_name: str, run: Callable[..., object], _: Choices) -> Command:
    """The command that calls `run`. The result is cached, because building its several hundred options is slow."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name=verb, cls=Command)(command(run))
    loaded, module = typer.main.get_command(app), sys.modules[module_name]
    assert isinstance(loaded, Command)
    loaded.name = verb
    loaded.stated_by = getattr(module, "STATED_BY", None)
    loaded.whole_line = getattr(module, "WHOLE_LINE", False)
    loaded.loads_model = getattr(module, "LOADS_MODEL", None)
    return loaded


@functools.cache
def spellings_of(words: str) -> Mapping[str, Meaning]:
    """Every spelling that a command such as `pretrain` or `data merge` accepts."""
    verb, *rest = words.split()
    command: AnyCommand = load(verb)
    for name in rest:
        if not isinstance(command, TyperGroup) or name not in command.commands:
            raise ValueError(f"mega {words}: there is no such verb")
        command = command.commands[name]
    return command.meanings(typer.Context(command)) if isinstance(command, Command) else {}


def _own_flags(param: Any) -> Mapping[str, Meaning]:
    """Meanings of the long spellings of an option that belongs to Typer only."""
    flags: dict[str, Meaning] = {}
    for spellings in (param.opts, param.secondary_opts):
        long = [spelling for spelling in spellings if spelling.startswith("--")]
        values = 0 if param.is_flag or param.count else MANY if param.multiple else param.nargs
        for spelling in long:
            # the option of a run that has the same name
            same = entries().get(spelling.removeprefix("--").replace("-", "_"))
            flags[spelling] = Sets(long[0], values, synonyms={} if same is None else same.option.synonyms)
    return flags


def command(function: Callable[..., Result]) -> Callable[..., Result | int]:
    """`function` with a signature for Typer, in which each config parameter is replaced with its options."""
    takes = _verb_parameters(function)
    parameters = list(takes.others)
    if takes.run is not None:
        parameters += _parameters_of(_of_run)
    elif takes.own.entries:
        parameters += _parameters_of(_of_sections)
    own_entries, run_entries = list(takes.own.entries.values()), _run_entries(takes, parameters)
    parameters += [_parameter(entry, None, takes.spelled(entry)) for entry in own_entries]
    parameters += [_parameter(entry, takes.reads) for entry in run_entries]
    if any(not entry.option.common for entry in (*own_entries, *run_entries)):
        parameters += _parameters_of(_of_help)

    @functools.wraps(function)
    def verb(**typed: Any) -> Result | int:
        typed.pop("help_all", None)
        flags, own_flags = _typed_options(typed, run_entries), _typed_options(typed, own_entries)
        config = typed.pop("config", None) if takes.run is not None or own_entries else None
        print_config = typed.pop("print_config", False)
        file: Mapping[str, object]
        file, own_file = toml.read_schemas(config, takes.schema, takes.own) if config is not None else ({}, {})
        values, preset = {**own_file, **own_flags}, None
        _check_ranges(values, {**file, **flags}, takes)
        if takes.run is not None:
            preset, ctx = (typed.pop(name) for name in ("model", "ctx"))
            file = _above_deepspeed(file, typed.pop("deepspeed_config"), typed.pop("deepspeed_lenient"), flags)
            typed[takes.run] = _composed(preset, file, flags, ctx)
        if print_config:
            documents = [toml.write(_as_used(typed[takes.run], ctx))] if takes.run is not None else []
            text = "\n".join([*documents, *([toml.write_values(takes.own, values)] if own_entries else [])])
            print_whole(text)
            return 0
        _check_given(values, own_entries)
        # A name on the Hub is downloaded only after the command line has been checked, and only if no other layer
        # overrides it.
        values, above = folders.with_folders(values, own_entries, note), {**file, **flags}
        if (fetched := folders.with_folders(above, run_entries, note)) != above:
            file, flags = ({name: fetched[name] for name in each} for each in (file, flags))
            typed[str(takes.run)] = _composed(preset, file, flags, ctx)
        if takes.given is not None:
            typed[takes.given] = GivenOptions(preset, {**file, **flags}, values)
        return function(**typed, **{table: takes.own.value(table, values) for table in takes.own.tables})

    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(verb, ENTRIES, {entry.name: entry for entry in (*own_entries, *run_entries)})
    # Otherwise inspect would follow this attribute to the signature of `function`.
    del verb.__wrapped__
    return verb


class _VerbParameters(NamedTuple):
    """The parameters of a subcommand, by kind."""

    run: str | None
    """Name of the parameter that receives a whole run."""
    given: str | None
    """Name of the parameter that receives the given options."""
    reads: Reads | None
    """Annotation of `run`."""
    own: Schema
    """The other sections."""
    others: tuple[inspect.Parameter, ...]
    """Parameters that are passed to Typer unchanged."""

    def spelled(self, entry: Entry) -> str:
        """Label of the other spellings of an option, in help."""
        return "also" if issubclass(self.own.tables[entry.section], VerbSection) else "Megatron-LM"

    @property
    def schema(self) -> Schema:
        """The schema of the run; empty if the subcommand does not accept a run."""
        return run_schema() if self.run is not None else Schema({}, {})


def _verb_parameters(function: Callable[..., object]) -> _VerbParameters:
    hints = get_type_hints(function, include_extras=True)
    run = given_name = reads = None
    tables: dict[str, type[Section]] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    typer_parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint, note = hints[name], None
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if kind is Options or (inspect.isclass(kind) and issubclass(kind, Section)):
            note = next(iter(get_args(hint)[1:]), None)
        if kind is GivenOptions:
            given_name = name
        elif kind is Options:
            run, reads = name, note
        elif inspect.isclass(kind) and issubclass(kind, Section):
            tables[name] = kind
            left_out[name] = note.names if isinstance(note, Without) else ()
        else:
            typer_parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    assert run is None or not set(tables) & set(sections()), f"{function.__name__}: a table of a run has that name"
    typer_names = tuple(
        parameter.name for parameter in typer_parameters
    )  # a run's option of the same name would mean something else
    schema = schema_of(tables, {table: (*names, *typer_names) for table, names in left_out.items()})
    return _VerbParameters(run, given_name, reads, schema, tuple(typer_parameters))


def _run_entries(takes: _VerbParameters, others: Sequence[inspect.Parameter]) -> list[Entry]:
    """The options of a run, without those whose names belong to the subcommand's own options."""
    used_names = {parameter.name for parameter in others} | set(takes.own.entries)
    return [entry for entry in takes.schema.entries.values() if entry.name not in used_names]


def _check_ranges(own: Mapping[str, object], run: Mapping[str, object], takes: _VerbParameters) -> None:
    """Check the ranges of the subcommand's own options, and of the options of a run if the subcommand derives its run
    from only some of them. Errors: ValueError with one line for each option that is out of range."""
    run = run if takes.reads is not None else {}
    if own or run:
        from mega.core.config.check import out_of_range

        if problems := [*out_of_range(own, takes.own), *out_of_range(run, takes.schema)]:
            raise ValueError("\n".join(problems))


def _check_given(values: Mapping[str, object], own: Sequence[Entry]) -> None:
    """Check that all required options are given. Errors: ValueError naming the first option that is missing."""
    for entry in own:
        if entry.required and values.get(entry.name) in (None, (), []):
            raise ValueError(f"{entry.flag} is missing: give {entry.option.help}")


def local_place(flag: str, place: str) -> str:
    """The local folder of a model on the Hub; a path is returned unchanged. Errors: ValueError or OSError if the
    download fails."""
    return folders.local_place(flag, place, report=note)


def _above_deepspeed(
    file: Mapping[str, object], ds_json: str | None, lenient: bool, options: Mapping[str, object]
) -> Mapping[str, object]:
    """The options of a DeepSpeed JSON, overridden by those of a TOML file. Errors: ValueError."""
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
    """Compose the run from all layers. Errors: ValueError, also for flags of another model family if the family is
    known."""
    run, named_options = compose(preset, file, options), {**file, **options}
    if "family" in named_options or _model_source(run, ctx) is None:
        check_typed(run, named_options, ctx.meta.get(_TYPED, ()))
    return run


def _model_source(run: Options, ctx: typer.Context) -> str | None:
    """The checkpoint whose model the subcommand uses instead of the options of `run`; None if there is no
    checkpoint."""
    checkpoint, verb = run.checkpoint, ctx.command
    if isinstance(verb, Command) and verb.loads_model is not None:
        if not verb.loads_model:
            return None
        if (load := checkpoint.pretrained_checkpoint or checkpoint.load) is not None:
            return load
    if not checkpoint.use_checkpoint_config:
        return None
    from mega.core.training.start.inputs import model_place

    place = model_place(run)
    return None if place is None else place[1]


def _as_used(run: Options, ctx: typer.Context) -> Options:
    """The run with the model that the subcommand would use, for --print-config. If the checkpoint is not on this
    machine, report this, and return the run as it was given. Errors: ValueError for a damaged checkpoint."""
    source = _model_source(run, ctx)
    if source is None:
        return run
    if url_of(source) is None and not os.path.exists(source):
        note(f"{source}: does not exist here, so the printed model is not the checkpoint's, which counts in a run")
        return run
    from mega.core.training.start.inputs import with_checkpoint_model

    notes: list[str] = []
    used = with_checkpoint_model(updated(run, {"load": source, "use_checkpoint_config": True}), notes)
    for line in notes:
        note(line)
    checkpoint = run.checkpoint
    return updated(used, {"load": checkpoint.load, "use_checkpoint_config": checkpoint.use_checkpoint_config})


def _typed_options(typed: dict[str, Any], chosen: Sequence[Entry]) -> dict[str, object]:
    """Remove the options `chosen` from Typer's arguments, and return those that were given on the command line."""
    typed_values: dict[str, object] = {}
    for entry in chosen:
        value = typed.pop(entry.name)
        if value is not None and not (entry.many and not value):
            typed_values[entry.name] = tuple(value) if entry.many else value
    return typed_values


def _parameter(entry: Entry, reads: Reads | None, others: str = "Megatron-LM") -> inspect.Parameter:
    """A config option as a parameter, whose value is None if the option was not given. others: label of its other
    spellings."""
    in_help = entry.option.common and (reads is None or getattr(entry.option, reads.property))
    item_type: Any = Literal[entry.choices] if entry.choices else entry.kind
    kind = list[item_type] if entry.many else item_type
    flag = f"{entry.flag}/{entry.off}" if entry.kind is bool else entry.flag
    declared = typer.Option(
        *((flag, entry.option.short) if entry.option.short else (flag,)),
        help=_help(entry, others),
        rich_help_panel=entry.title,
        metavar=entry.option.metavar,
        show_default=False,
        hidden=not in_help,
    )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], declared],  # noqa: UP045 - `|` cannot join a runtime Literal here
    )


def _help(entry: Entry, whose: str) -> str:
    """The help text of an option: description, default, other spellings."""
    default = "" if entry.default in (None, (), "") else f" [default: {_shown(entry.default)}]"
    default = " [required]" if entry.required else default
    other_spellings = [spelling for spelling in entry.option.megatron if spelling != entry.flag]
    spellings = f" ({whose}: {', '.join(other_spellings)})" if other_spellings else ""
    return entry.option.help + default + spellings


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def _show_everything(ctx: typer.Context, asked: bool) -> None:
    """Print the help of every option of the command."""
    if asked:
        print(help_text(ctx.command, ctx, getattr(ctx.command, ENTRIES, {}), everything=True))
        raise typer.Exit()


def _parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function, made keyword-only."""
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
    """Parameters of a subcommand with more options than its help shows."""


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
        typer.Option("--deepspeed-lenient", help="leave out options of a DeepSpeed JSON that are not supported"),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the run as TOML, ready for --config, and exit")
    ] = False,
) -> None:
    """Parameters of a subcommand that reads a whole run, in addition to the options of its sections."""


def _of_sections(
    config: Annotated[str | None, _CONFIG] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the options as TOML, ready for --config, and exit")
    ] = False,
) -> None:
    """Parameters of a subcommand with its own sections and no run."""
