"""Lines on stdout, which may break: a pipe whose reader has left, a terminal that was closed, a full disk.

Training continues without it. The content of the lines is not looked at here.
"""

from __future__ import annotations

import os
import sys

from mega.core.parallel.exit_reports import printable, write_error


def print_line(line: str) -> None:
    """Print a line on stdout. Where that fails, say so on stderr, once, and leave stdout alone from then on."""
    try:
        print(printable(line, sys.stdout.encoding), flush=True)
    except (OSError, ValueError) as error:  # the latter of a stream that is closed
        _leave_stdout()
        complain(f"stdout: {getattr(error, 'strerror', None) or error}; the run continues without it")


def complain(line: str) -> None:
    """A line on stderr, if that still takes one."""
    write_error(f"mega: {line}\n")


def _leave_stdout() -> None:
    """What is still buffered, and all that follows, goes nowhere; Python's own last flush succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = os.fdopen(os.dup(nowhere), "w")
    finally:
        os.close(nowhere)
