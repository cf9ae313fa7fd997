"""Check whether outputs already exist. Outputs from the same inputs and settings are kept; any other output is replaced
only with --overwrite.

The "work" of an output is a hash of the settings and of the inputs' names, sizes and modification times. The work is
recorded next to the output. This module does not interpret the settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mega.core.data.indexed import IndexedDataset, exists
from mega.core.data.sources import STDIN
from mega.core.files import whole_file
from mega.core.untrusted import Json


def work_of(settings: object, inputs: Sequence[Path]) -> str | None:
    """Return the hash of settings (JSON values) and inputs; None if an input cannot be read twice."""
    if STDIN in inputs:
        return None
    return hashlib.sha256(json.dumps([settings, stamps(inputs)], sort_keys=True).encode()).hexdigest()


def stamps(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of every input. Two files for which all three are equal are assumed to
    have identical content."""
    statuses = [(path, path.stat()) for path in paths if path != STDIN]
    return [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path, status in statuses]


def check_absent(flag: str, value: object, paths: Iterable[Path], overwrite: bool) -> None:
    """Raise ValueError if a file in `paths` exists and --overwrite was not given."""
    if (existing := next((path for path in paths if path.is_file()), None)) is not None and not overwrite:
        raise ValueError(f"{flag} {value}: {existing} exists; name another place, or give --overwrite to replace it")


def existing_pairs(value: str, prefixes: Sequence[str], work: str | None, overwrite: bool) -> list[IndexedDataset]:
    """Return the token files at all `prefixes` if all of them were made from the same inputs and settings; otherwise
    [], which means that the caller must make them.

    An interrupted call may have written only some of the files. work: the result of `work_of`. value: value of
    --output-prefix.
    Errors: ValueError if a pair made from other inputs or settings would be replaced.
    """
    if overwrite:
        return []
    pairs = []
    for prefix in filter(exists, prefixes):
        with contextlib.suppress(ValueError):  # a damaged pair is treated as made from other inputs
            pairs.append(IndexedDataset(prefix))
        if work is None or not pairs or pairs[-1].prefix != prefix or pairs[-1].note.get("work") != work:
            raise ValueError(
                f"--output-prefix {value}: {prefix}.bin exists, and was not made of these inputs with these settings; "
                "name another place, or give --overwrite to replace it"
            )
    return pairs if len(pairs) == len(prefixes) else []


class WorkRecord:
    """The record stored next to output files of any format, as `.made.json`. It contains the hash of inputs and
    settings, and the hashes of the output files."""

    def __init__(self, paths: Sequence[Path], work: str | None) -> None:
        self._paths, self._work = paths, work
        self._path = paths[0].with_suffix(".made.json")

    def is_current(self, flag: str, value: object, overwrite: bool) -> bool:
        """Whether the existing files were made from the same inputs and settings, and are unchanged. Errors: ValueError
        if files made from other inputs or settings would be replaced."""
        if overwrite:
            return False
        record = {}
        with contextlib.suppress(OSError, ValueError):
            record = dict(json.loads(self._path.read_bytes()))
        if self._work is not None and record == self._content():
            return True
        check_absent(flag, value, self._paths, overwrite)
        return False

    def write(self) -> None:
        """Write the record. The files must exist."""
        with whole_file(self._path) as file:
            file.write(json.dumps(self._content()).encode() + b"\n")

    def _content(self) -> dict[str, Json]:
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None for path in self._paths]
        return {"work": self._work, "sha256": hashes}
