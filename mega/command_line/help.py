"""`--help` as plain text: usage, what a subcommand does, its options by panel and worked examples, or the subcommands
of a group.

Flags are never shortened or broken, even on a narrow terminal: a flag that is longer than its column gets its own line.
Rich's tables are not used, because they cut flags. This module does not depend on particular subcommands or options.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from mega.command_line.examples import EXAMPLES

if TYPE_CHECKING:  # Typer's own copy of click
    from typer._click.core import Command, Context, Parameter

    from mega.core.config.schema import Entry

COLUMN = 30
"""Column at which the explanation of a flag begins."""

WIDEST = 100
"""Maximum width of help, in columns."""


class Group(TyperGroup):
    """A group of subcommands, with help as plain text."""

    def get_help(self, ctx: Context) -> str:
        return help_text(self, ctx, {})

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Without arguments, print the help and exit with the code for a user's mistake."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(self.get_help(ctx))
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


def group(about: str) -> typer.Typer:
    """A subcommand that itself has subcommands."""
    return typer.Typer(cls=Group, help=about, no_args_is_help=True, add_completion=False)


def help_text(command: Command, ctx: Context, entries: Mapping[str, Entry], *, everything: bool = False) -> str:
    """The help of a subcommand or a group. everything: include hidden options."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    params = command.get_params(ctx)
    arguments = [param for param in params if param.param_type_name == "argument"]
    verbs = _verbs(command, ctx)
    usage = " ".join(
        [ctx.command_path, "[OPTIONS]", *map(_argument, arguments), *(["VERB [WORDS]..."] if verbs else [])]
    )
    blocks = [f"Usage: {usage}", *_paragraphs(inspect.cleandoc(command.help or ""), width)]
    if arguments:
        rows = ((_argument(param), _explained(param)) for param in arguments)
        blocks.append("\n".join(["Arguments:", *(_row(*row, width) for row in rows)]))
    panels: dict[str, list[Parameter]] = {}
    for param in params:
        if param.param_type_name == "option" and (everything or not getattr(param, "hidden", False)):
            panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(param)
    for title, members in panels.items():
        rows = ((_flags(param, entries.get(param.name or "")), _explained(param)) for param in members)
        blocks.append("\n".join([f"{title}:", *(_row(*row, width) for row in rows)]))
    if verbs:
        blocks.append("\n".join(["Verbs:", *(_row(*row, width) for row in verbs)]))
    blocks += _examples(ctx.command_path)
    return "\n\n".join(blocks)


def _verbs(command: Command, ctx: Context) -> list[tuple[str, str]]:
    """Each subcommand of a group, with the first paragraph of its help."""
    if not isinstance(command, TyperGroup):
        return []
    commands = ((name, command.get_command(ctx, name)) for name in command.list_commands(ctx))
    return [
        (name, " ".join(inspect.cleandoc(verb.help or "").partition("\n\n")[0].split()))
        for name, verb in commands
        if verb is not None and not verb.hidden
    ]


def _examples(path: str) -> Iterator[str]:
    examples = EXAMPLES.get(path.removeprefix("mega "), ())
    if examples:
        lines = (f"  {line}\n      {words}" for words, line in examples)
        yield "\n".join(["Examples:", *lines])


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)


def _row(name: str, explanation: str, width: int) -> str:
    """
    >>> print(_row("--steps INT", "optimizer steps to train", 80))
      --steps INT                 optimizer steps to train
    """
    explanation = explanation.replace("[default: ", "[default:\N{NO-BREAK SPACE}")  # keeps the default on one line
    lines = textwrap.wrap(explanation, width - COLUMN, break_long_words=False, break_on_hyphens=False)
    # A long list of choices is broken between two choices.
    head = textwrap.wrap(f"  {name}".replace("|", "| "), width, subsequent_indent=" " * 6, break_on_hyphens=False)
    head = [line.replace("| ", "|") for line in head] if len(name) > width - 2 else [f"  {name}"]
    if len(head[-1]) <= COLUMN - 2 and lines:
        head[-1] = head[-1].ljust(COLUMN) + lines.pop(0)
    text = "\n".join([*head, *(" " * COLUMN + line for line in lines)])
    return text.replace("\N{NO-BREAK SPACE}", " ")


def _argument(param: Parameter) -> str:
    name = str(param.metavar or param.name).removesuffix("...").upper() + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _explained(param: Parameter) -> str:
    """The explanation of a parameter, including the default for parameters that belong to Typer."""
    text = (getattr(param, "help", None) or "").replace("\\[", "[")
    default = param.default if getattr(param, "show_default", False) is True else None
    has_default = default is not None and default is not False and not callable(default)
    return f"{text} [default: {default}]" if has_default else text


def _flags(param: Parameter, entry: Entry | None) -> str:
    """All spellings of a flag and its value: `--lr FLOAT`, `--a / --no-a`."""
    spellings = " / ".join(", ".join(sorted(names, key=len)) for names in (param.opts, param.secondary_opts) if names)
    if getattr(param, "is_flag", False) or getattr(param, "count", False):
        return spellings
    if param.metavar:
        return f"{spellings} {param.metavar}"
    kind = "VALUE" if entry is None else "|".join(entry.choices) or entry.kind.__name__.upper()
    return f"{spellings} {kind}{' ...' if entry is not None and entry.many else ''}"
