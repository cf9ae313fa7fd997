"""Lines on stdout, which may break: a pipe whose reader has left, a terminal that was closed, a full disk.

Training continues without it. The content of the lines is not looked at here.
"""

from __future__ import annotations

import sys

from mega.core.processes.exit_reports import printable, write_error
from mega.core.terminal import leave


def print_line(line: str) -> None:
    """Print a line on stdout. Where that fails, say so on stderr, once, and leave stdout alone from then on."""
    try:
        print(printable(line, sys.stdout.encoding), flush=True)
    except (OSError, ValueError) as error:  # the latter of a stream that is closed
        leave(sys.stdout)
        complain(f"stdout: {getattr(error, 'strerror', None) or error}; the run continues without it")


def complain(line: str) -> None:
    """A line on stderr, if that still takes one."""
    write_error(f"mega: {line}\n")
