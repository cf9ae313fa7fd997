"""Print lines to a stdout that may fail because the reader of a pipe has exited, a terminal was closed, or a disk is
full. Training continues without stdout after such an error. This module does not depend on the content of the output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from mega.core.activity import ACTIVITY
from mega.core.processes.exit_reports import printable, write_error
from mega.core.terminal import discard_output


def print_line(line: str) -> None:
    """Print a line to stdout. At the first error, print a message to stderr, and discard all later lines."""
    try:
        print(printable(line, sys.stdout.encoding), flush=True)
    except (OSError, ValueError) as error:  # ValueError if the stream is closed
        discard_output(sys.stdout)
        warn(f"stdout: {getattr(error, 'strerror', None) or error}; the run continues without it")


SLOW_S = 5.0
"""Seconds after which a slow phase of a run's start is reported."""

PROGRESS_S = 10.0
"""Seconds between reports of how far a slow phase is."""


@contextlib.contextmanager
def report_if_slow(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """Report on stderr if the block takes longer than SLOW_S seconds, and then, every PROGRESS_S seconds, how far it
    is, if the block sets `ACTIVITY.progress`. Used for the start of a run. quiet: report nothing; true on all ranks
    except the first."""
    ended = threading.Event()

    def report() -> None:
        if not ended.wait(SLOW_S):
            warn(f"{doing} ...")
        while not ended.wait(PROGRESS_S):
            if progress := ACTIVITY.progress:
                warn(f"{doing}: {progress}")

    if not quiet:
        threading.Thread(target=report, name="slow start", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def warn(line: str) -> None:
    """Print a line to stderr, if possible."""
    write_error(f"mega: {line}\n")
