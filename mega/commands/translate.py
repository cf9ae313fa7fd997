"""`mega translate`: translate a command line or a script of another program to commands of `mega`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

WHOLE_LINE = True
MOST_BYTES = 1 << 20
"""Maximum size of a script, in bytes."""


def run(
    line: Annotated[
        list[str] | None,
        typer.Argument(help="a script, - for stdin, or a whole command line", metavar="FILE | LINE"),
    ] = None,
) -> int:
    """Translate a command line of Megatron-LM (2019 to 2026), its forks, DeepSpeed or fairseq to mega.

    The command line must include the program, whose name determines what is trained, and the launcher, if any, as in
    mega translate torchrun pretrain_bert.py --num-layers 24. The output is a script with the new commands, and with
    comments about flags that have no effect or no equivalent. Nothing is started, and files that a command names are
    not opened.

    Exit codes: 0 if everything was translated; 1 if something has no equivalent.
    """
    from mega.command_line.legacy.lines import translated
    from mega.command_line.legacy.scripts import command_lines, split_command
    from mega.command_line.legacy.translation import Translation
    from mega.command_line.options import spellings_of

    words = line or []
    # os.path.isfile is used because Path.is_file raises an error for a quoted line that is too long for a file name.
    if len(words) == 1 and (" " not in words[0] or os.path.isfile(words[0])):
        source = words[0]
        commands = list(command_lines(_text(source)))
    else:
        source = "LINE"
        commands = list(command_lines(words[0])) if len(words) == 1 else [*filter(None, [split_command(words)])]
    if not commands:
        raise ValueError(f"{source}: names no program, such as pretrain_gpt.py; give the whole line, or a script")
    results: list[Translation] = []
    unknown: list[ValueError] = []
    for each in commands:
        try:
            results.append(translated(each, spellings_of))
        except ValueError as error:  # other lines of the script may still be translated
            unknown.append(error)
    if not results:
        raise unknown[0]
    results = [*(Translation("", lacking=[str(error)]) for error in unknown), *results]
    print("\n\n".join(result.text() for result in results))
    return int(any(result.lacking for result in results))


def _text(what: str) -> str:
    """Return the text of a script. Errors: ValueError if the script cannot be read."""
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
