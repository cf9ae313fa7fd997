"""Command lines as runs."""

from __future__ import annotations

import shlex

from mega.command_line.options import command
from mega.core.config.run import Options


def parsed(line: str) -> Options:
    """The run of a command line, read as `mega pretrain` reads it."""
    from typer.main import Typer, get_command

    from mega.command_line.options import Command

    seen: list[Options] = []

    def run(run: Options) -> None:
        seen.append(run)

    app = Typer(add_completion=False)
    app.command(cls=Command)(command(run))
    get_command(app)(args=shlex.split(line), standalone_mode=False)
    return seen[0]
