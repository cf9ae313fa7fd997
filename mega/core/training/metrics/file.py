"""The metrics file of a run: JSON lines, one row per step and one per evaluation.

A run that resumes from a step removes the rows of later steps, so the file has each step once. This module does not
depend on the content of a row, except its step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from mega.core.files import whole_file

Row = Mapping[str, float | str]
"""A row of the file: "step", and values by name. NaN and infinity are written as null."""


class MetricsFile:
    """An open metrics file. start, resumes: see `open_rows`. fail: function that is called with the error if the file
    cannot be written; afterwards nothing more is written. If None, the error is raised."""

    def __init__(self, path: str, start: int, resumes: bool, fail: Callable[[OSError], None] | None = None):
        self._path, self._fail = path, fail
        self._rows: TextIO | None = open_rows(Path(path), start, resumes)

    def write(self, row: Row) -> bool:
        """Append a row, and return True."""
        if self._rows is not None:
            try:
                self._rows.write(_json_line(row) + "\n")
                self._rows.flush()
            except OSError as error:
                self._stop(error)
        return True

    def replace(self, row: Row) -> bool:
        """Write a row, replacing all rows of the same step with the same names. Return False, without writing, if the
        file has a single such row and it is identical."""
        path = Path(os.path.realpath(self._path))
        if self._rows is None or not path.is_file():
            return self.write(row)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            former = [line for line in lines if _step_and_names(line) == (row["step"], [*row])]
            if former == [_json_line(row)]:
                return False
            if former:
                self._rows.close()
                with whole_file(path) as out:
                    out.write("".join(f"{line}\n" for line in lines if line not in former).encode())
                self._rows = path.open("a", encoding="utf-8")
        except OSError as error:
            self._stop(error)
        return self.write(row)

    def close(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            with contextlib.suppress(OSError):  # every row was flushed, or an error was reported
                rows.close()

    def _stop(self, error: OSError) -> None:
        failure = OSError(f"--metrics {self._path}: {error.strerror or error}")
        self.close()
        if self._fail is None:
            raise failure from None
        self._fail(failure)


def open_rows(path: Path, start: int, resumes: bool) -> TextIO:
    """Open the metrics file, and remove the rows after step `start` and a partial last row that a killed process left.

    The file of an earlier run is renamed to `.previous`. If `path` is a symbolic link, its target is rewritten and the
    link is kept.
    """
    if path.is_file() or not path.exists():
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not resumes:
        os.replace(path, path.with_suffix(path.suffix + ".previous"))
    elif path.is_file():
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if json.loads(line)["step"] <= start:
                    rows.append(line)
        with whole_file(path) as out:
            out.write("".join(f"{line}\n" for line in rows).encode())
    return path.open("a", encoding="utf-8")


def _json_line(row: Mapping[str, float | str]) -> str:
    """Format a row of the metrics file."""
    return json.dumps({name: _plain(value) for name, value in row.items()})


def _step_and_names(line: str) -> tuple[float, list[str]] | None:
    """Return the step and the names in a row of the metrics file; None if the line is not a row.

    >>> _step_and_names('{"step": 3, "valid_loss": 2.5}')
    (3, ['step', 'valid_loss'])
    """
    with contextlib.suppress(ValueError, TypeError, KeyError):
        row = json.loads(line)
        return row["step"], [*row]
    return None


def _plain(value: float | str) -> float | str | None:
    """Return a value that JSON can represent: None for NaN or infinity, such as the gradient norm of a skipped step."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
