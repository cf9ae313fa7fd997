"""`mega translate`: an old command line, or a script of them, as the lines of `mega` that do the same."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

WHOLE_LINE = True
MOST_BYTES = 1 << 20
"""Of a script that a person writes."""


def run(
    line: Annotated[
        list[str] | None,
        typer.Argument(help="a script, - for stdin, or a whole line", metavar="FILE | LINE"),
    ] = None,
) -> int:
    """Show an old command line as one of mega's: Megatron-LM's of 2019 to 2026, its forks', DeepSpeed's, fairseq's.

    With launcher and program, since a program's name says what is trained, as in mega translate torchrun
    pretrain_bert.py --num-layers 24. What is printed is a script: the new lines, and comments for what changes nothing
    and for what has no counterpart. Nothing is started, and no file that a line names is opened.

    Exit codes: 0; 1 where something has no counterpart.
    """
    from mega.command_line.legacy.lines import translated
    from mega.command_line.legacy.scripts import command_lines, split_command
    from mega.command_line.legacy.translation import Translation
    from mega.command_line.options import spellings_of

    words = line or []
    # Of a whole line in quotes os.path.isfile is false where it is too long for a name; Path.is_file is an error.
    if len(words) == 1 and (" " not in words[0] or os.path.isfile(words[0])):
        what = words[0]
        found = list(command_lines(_text(what)))
    else:
        what = "LINE"
        found = list(command_lines(words[0])) if len(words) == 1 else [*filter(None, [split_command(words)])]
    if not found:
        raise ValueError(f"{what}: names no program, such as pretrain_gpt.py; give the whole line, or a script")
    results: list[Translation] = []
    unknown: list[ValueError] = []
    for each in found:
        try:
            results.append(translated(each, spellings_of))
        except ValueError as error:  # of a script, another line may be known
            unknown.append(error)
    if not results:
        raise unknown[0]
    results = [*(Translation("", lacking=[str(error)]) for error in unknown), *results]
    print("\n\n".join(result.text() for result in results))
    return int(any(result.lacking for result in results))


def _text(what: str) -> str:
    """The text of a script. Errors: ValueError where it cannot be read."""
    from mega.core.untrusted import read_limited

    try:
        if what != "-":
            return read_limited(what, MOST_BYTES, what).decode()
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{what}: has more than {MOST_BYTES} bytes, which is the most of a script")
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: must be UTF-8 text; byte {error.start} is not") from None
