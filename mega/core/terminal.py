"""stdout and stderr that may fail while the program runs, because the reader of a pipe has exited, a terminal was
closed, or a disk is full. The program continues without output and keeps its exit code. This module does not depend on
the content of the output.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def discard_output(stream: TextIO) -> None:
    """Discard the buffer of `stream` and all later output.

    Python flushes stdout and stderr at exit; a flush that fails changes the exit code to 120.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    except (OSError, ValueError):
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is stream:
                setattr(sys, name, os.fdopen(os.dup(nowhere), "w"))
    finally:
        os.close(nowhere)


class TolerantStream:
    """stderr for progress bars: output is discarded once stderr has failed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            discard_output(self._stream)

    def isatty(self) -> bool:
        with contextlib.suppress(ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


def stderr_console() -> Console:
    """Return a Rich console on stderr, for progress bars of jobs that must survive the closing of their terminal."""
    from rich.console import Console

    return Console(file=TolerantStream(sys.stderr))  # type: ignore[arg-type]


LEAST_FOLDED = 16
"""Least width of a column that folds long words."""


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting any value. If the console is too narrow, lines become longer: columns with
    no_wrap=True keep each value on one line, columns with overflow="fold" break words, and others break between words.
    """
    from rich.measure import Measurement

    wide = console.options.update_width(100_000)
    naturals, leasts = list[int](), list[int]()
    for column in table.columns:
        sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
        natural, word = max(size.maximum for size in sizes), max(size.minimum for size in sizes)
        naturals.append(natural)
        leasts.append(natural if column.no_wrap else min(word, LEAST_FOLDED) if column.overflow == "fold" else word)
    borders = Measurement.get(console, wide, table).maximum - sum(naturals)
    width, least = console.width, borders + sum(leasts)
    missing = sum(naturals) - sum(leasts)
    spare = min(max(width - least, 0), missing)
    for column, column_least, natural in zip(table.columns, leasts, naturals, strict=True):
        column.width = column_least + spare * (natural - column_least) // max(missing, 1)
    console.width = max(width, least)
    console.print(table)
    console.width = width


class BrokenStdout(Exception):
    """Raised if writing to stdout failed. After a large text the buffer is empty, so a later flush would not report the
    error. This class is not a subclass of OSError, because Typer ends the process at an OSError from a closed pipe.
    """

    def __init__(self, reason: OSError):
        super().__init__(str(reason))
        self.reason = reason


def discard(line: str) -> None:
    """Print nothing; used in place of a function that prints messages for the user."""


def print_whole(text: str) -> None:
    """Print a text of any length. Errors: BrokenStdout if stdout cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise BrokenStdout(error) from None
