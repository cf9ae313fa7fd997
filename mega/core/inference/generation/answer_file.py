"""Write rows to a file as they are computed, so that a killed run can resume after the last complete row.

    FILE.partial    a line with a fingerprint of the settings, then the rows so far
    FILE            the rows, after all rows have been written

This module does not depend on the engine, and does not interpret the rows.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mega.core.files import fingerprint, whole_file


class AnswerFile:
    """A file of rows whose writing can be resumed. path: path of the complete file. about: the settings that determine
    the rows. done: number of rows that an earlier process has written."""

    def __init__(self, path: Path, about: Mapping[str, object]) -> None:
        self.path, self._partial = path, Path(f"{path}.partial")
        self._first = json.dumps({"fingerprint": fingerprint(about)}).encode() + b"\n"
        self.done, end = self._read()
        if self.done:
            print(f"{self._partial}: resuming after {self.done} rows", file=sys.stderr)
            os.truncate(self._partial, end)  # remove an incomplete row of a killed process
            return
        with whole_file(self._partial) as file:
            file.write(self._first)

    def _read(self) -> tuple[int, int]:
        """Return the number of complete rows that an earlier process has written, and the offset of the end of the last
        row."""
        if not self._partial.is_file():
            return 0, 0
        with open(self._partial, "rb") as file:
            if file.readline() != self._first:
                print(f"{self._partial}: is of another model or settings; starting from the beginning", file=sys.stderr)
                return 0, 0
            count, end = 0, file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    break
                count, end = count + 1, end + len(line)
        return count, end

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows, and sync them to disk."""
        with open(self._partial, "ab") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Copy all rows to the final file, and remove the partial file."""
        with whole_file(self.path) as whole, open(self._partial, "rb") as file:
            file.readline()
            shutil.copyfileobj(file, whole, 1 << 20)
        self._partial.unlink()
