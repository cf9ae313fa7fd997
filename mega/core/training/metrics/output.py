"""Lines on stdout, which may break: a pipe whose reader has left, a terminal that was closed, a full disk.

Training continues without it. The content of the lines is not looked at here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from mega.core.processes.exit_reports import printable, write_error
from mega.core.terminal import leave


def print_line(line: str) -> None:
    """Print a line on stdout. Where that fails, say so on stderr, once, and leave stdout alone from then on."""
    try:
        print(printable(line, sys.stdout.encoding), flush=True)
    except (OSError, ValueError) as error:  # the latter of a stream that is closed
        leave(sys.stdout)
        complain(f"stdout: {getattr(error, 'strerror', None) or error}; the run continues without it")


SLOW_S = 5.0
"""Seconds after which a part of a run's start says what it does."""


@contextlib.contextmanager
def slowly(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """Around what may take long before the first line of a run: says on stderr what it does, once it takes long.
    quiet: says nothing, as all ranks but the first."""
    timer = threading.Timer(SLOW_S, complain, [f"{doing} ..."])
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def complain(line: str) -> None:
    """A line on stderr, if that still takes one."""
    write_error(f"mega: {line}\n")
