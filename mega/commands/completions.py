"""`mega completions`: write files with which shells complete mega's subcommands and flags.

A file calls `mega` to get the completions, so new subcommands and flags do not change the file. A new version of Typer
may change the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega import COMPLETE_VARIABLE
from mega.core.files import check_folder

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the content of the completion file for a shell."""
    from typer.completion import get_completion_script

    text = get_completion_script(prog_name="mega", complete_var=COMPLETE_VARIABLE, shell=shell)
    return text.strip() + "\n"


def run(
    directory: Annotated[Path, typer.Argument(help="directory for mega.bash, mega.zsh and mega.fish")],
) -> int:
    """Write the shell completions into a directory.

    Afterwards, source the file for your shell in the shell's start-up file.
    """
    check_folder("directory", directory, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for shell in SHELLS:
        path = directory / f"mega.{shell}"
        path.write_text(script(shell), encoding="utf-8")
        print(path)
    return 0
