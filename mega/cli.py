"""The command line `mega`: find and import the module of a subcommand when the subcommand is called, and report errors.

Each subcommand is a module in mega/commands with a function `run`, or with a Typer `app` for a group of subcommands.
This module contains only the name and a one-line description of each subcommand, and imports neither their modules nor
torch.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mega import COMPLETE_VARIABLE, __version__
from mega.command_line.help import Group
from mega.core.environment import DEBUG, check_switches, is_on
from mega.core.terminal import BrokenStdout

if TYPE_CHECKING:  # Typer's copy of click
    from typer._click.core import Command, Context

VERBS = {
    "quickstart": "Train a small model and generate text with it, in about three minutes",
    "train-tokenizer": "Train a tokenizer on texts",
    "corpus": "Make a corpus from raw text: clean, deduplicate, decontaminate, filter",
    "preprocess": "Convert text to token files",
    "data": "Merge, verify, inspect and split corpora",
    "retro": "Find neighbours of a corpus's chunks, for models with a retriever",
    "pretrain": "Train a model from scratch, or resume",
    "finetune": "Train a pretrained model for a task",
    "launch": "Print a script that starts a run on several hosts",
    "lr-find": "Find a learning rate by a sweep of a few steps",
    "eval": "Score a model on a benchmark",
    "serve": "Serve a model over HTTP",
    "chat": "Chat with a model in the terminal",
    "generate": "Continue a text with a trained model",
    "reshard": "Convert a checkpoint to another layout",
    "checkpoint": "Verify, show, compare and clean up checkpoints",
    "convert-llama": "Convert weights of other programs to a checkpoint, and back",
    "download": "Download a model, a tokenizer or a data set from the Hugging Face Hub",
    "push": "Upload a model to a repository of the Hugging Face Hub",
    "presets": "List the presets of --model: shape, parameters, memory",
    "memory-estimate": "Estimate memory and speed of a run before it is started",
    "preflight": "Measure every rank and link before a run, and report slow ones",
    "parity": "Check that every layout trains the same model",
    "bench": "Measure speed",
    "plot": "Plot metrics of one or several runs",
    "report": "Show a run, an evaluation or a corpus as one HTML page",
    "translate": "Translate another program's command line to mega",
    "doctor": "Report what works on this machine and what does not",
    "completions": "Write the shell completions",
}


def _module(verb: str) -> str:
    """
    >>> _module("convert-llama")
    'mega.commands.convert_llama'
    """
    return "mega.commands." + verb.replace("-", "_")


class Verbs(Group):
    """A group of commands that lists subcommands by name, and imports the module of a subcommand only when the
    subcommand is called."""

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the subcommands whose module exists, in the order of `VERBS`."""
        return [verb for verb in VERBS if importlib.util.find_spec(_module(verb)) is not None]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """Return a placeholder with the one-line description, so that listing the subcommands does not import their
        modules."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=VERBS[cmd_name], rich_markup_mode="rich")

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Import the module of a subcommand, to call the subcommand or to complete its flags."""
        from mega.command_line.options import load

        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and stand_in is not None else stand_in, rest


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"mega {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train large transformers on any tensor x pipeline x data layout.

    For help on a subcommand: mega VERB --help.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 for success, 1 for a failure, 2 for a user error, and 128 + the
    signal number for a run that a signal ended early.

    A user error, a NaN loss, or a machine failure such as a full disk is reported in one line on stderr. A traceback is
    printed only if MEGA_DEBUG=1.
    """
    # torch reads this variable when it is imported. Without it, every rank prints C++ stack frames when the connection
    # to the store is lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _open_streams()
    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init

        completion_init()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        check_switches()
        _check_working_directory()
        outcome = app(args=words, prog_name="mega", standalone_mode=False)
        sys.stdout.flush()
    except Exception as error:
        broken = _broken_stdout() if isinstance(error, OSError) else None
        if isinstance(error, BrokenStdout):
            broken = error.reason
        if broken is not None:
            return (
                _report(OSError(f"stdout: {broken.strerror or broken}"))
                if broken.errno != errno.EPIPE
                else 128 + signal.SIGPIPE
            )
        from mega.core.processes.exit_reports import exit_at_once, names_failed_device

        if names_failed_device(error):
            exit_at_once(_report(error))  # before `error`, and with it the tensors of its frames, is deleted
        if is_on(DEBUG):
            raise
        return _report(error)
    return outcome if isinstance(outcome, int) else 0


def _check_working_directory() -> None:
    """Check that the working directory exists. Otherwise libraries would end the process with unclear messages. Errors:
    ValueError."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("the working directory has been removed; change to one that is there (cd)") from None


def _open_streams() -> None:
    """Open /dev/null for every standard stream that is closed. Otherwise the next file to be opened would get the
    stream's descriptor, and libraries would print into this file."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() uses the lowest free descriptor
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _broken_stdout() -> OSError | None:
    """Flush stdout, and return the error if this fails, or None. After an error, stdout is redirected to /dev/null, so
    that Python's flush at exit does not fail.

    No message is printed if the reader has closed the pipe, as `head` does when it has read enough.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _report(error: Exception) -> int:
    """Report an error on stderr, only once for all ranks, and return the exit code."""
    from mega.core.processes.exit_reports import ExitReport, report_exit, report_of

    # Different versions of Typer contain Click under different module names, so Click's errors are recognised by their
    # attributes.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return report_exit(ExitReport(int(error.exit_code), _format_error(error)))
    if isinstance(error, typer.Abort):
        stopped = isinstance(error.__cause__, KeyboardInterrupt)
        return report_exit(ExitReport(128 + signal.SIGINT, "interrupted") if stopped else ExitReport(1, "aborted"))
    return report_exit(report_of(error))


RULES = {
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "greater_than_equal": "must be at least {ge}",
}
"""Error type of Pydantic -> the rule to print in mega's message. Newer versions of Typer check values with Pydantic."""


def _format_error(error: Any) -> str:
    """Return a message about a mistake that Typer found, in the format of `check`: the flag, its value, the rule."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    param, kind, ctx = getattr(error, "param", None), type(error).__name__, getattr(error, "ctx", None)
    if kind == "MissingParameter" and param is not None:
        name = param.opts[0] if param.param_type_name == "option" else (param.metavar or param.name).upper()
        return f"{name} is missing: give {getattr(param, 'help', None) or 'it'}".replace("\\[", "[")
    if kind == "NoSuchOption":
        return f"{error.option_name}: is not an option; --help lists all"
    if (unknown := re.match("No such command '(.*?)'", error.message)) and ctx is not None:
        return _unknown_verb(unknown[1], ctx)
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message):
        return f"{extra[1]}: belongs to no flag; a value follows its flag, and blanks in it need quotes"
    if param is not None and (choice := re.search(r"'(.*)' is not one of (.*)\.$", error.message)):
        return f"{param.opts[0]} {choice[1]}: is not a choice; valid: {choice[2].replace(chr(39), '')}"
    if not problems or param is None or problems[0]["type"] not in RULES:
        return str(error.format_message())
    rule = RULES[problems[0]["type"]].format(**problems[0].get("ctx", {}))
    return f"{param.opts[0]} {problems[0]['input']}: {rule}"


def _unknown_verb(word: str, ctx: Any) -> str:
    """Return the message about an unknown subcommand, which suggests the most similar subcommand and explains how to
    list all subcommands."""
    from mega.core.config.compose import nearest

    suggestion = nearest(word.removesuffix(".py").replace("_", "-"), ctx.command.list_commands(ctx))
    path = ctx.command_path
    return f"{path} {word}: is not a verb{suggestion}; {path} --help lists all"


if __name__ == "__main__":
    sys.exit(main())
