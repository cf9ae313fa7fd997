"""stdout and stderr, which may break under a program that must not: a pipe whose reader has left, a terminal that was
closed, a full disk. The program continues without them and keeps its exit code.

The content of what is written is not looked at here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def leave(stream: TextIO) -> None:
    """Let what is still buffered in `stream`, and all that follows, go nowhere, so that Python's own last flush
    succeeds: if that fails, a process ends with 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    except (OSError, ValueError):
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is stream:
                setattr(sys, name, os.fdopen(os.dup(nowhere), "w"))
    finally:
        os.close(nowhere)


class Steady:
    """stderr for what draws on it while something else runs: what it does not take any more is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            leave(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            leave(self._stream)

    def isatty(self) -> bool:
        with contextlib.suppress(ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()


def stderr_console() -> Console:
    """Rich's, on stderr, for bars of jobs that go on when their terminal has gone."""
    from rich.console import Console

    return Console(file=Steady(sys.stderr))  # type: ignore[arg-type]


class BrokenStdout(Exception):
    """Stdout takes no more. Of one large text it keeps nothing, so a later flush would not show it.

    No OSError, at which Typer would end the process by itself.
    """

    def __init__(self, reason: OSError):
        super().__init__(str(reason))
        self.reason = reason


def print_whole(text: str) -> None:
    """Print a text of any length. Errors: BrokenStdout."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise BrokenStdout(error) from None
