"""Whether an output stands there already, and of which work: the same is kept, another is never replaced unasked.

Work is all that an output depends on: the inputs' names, sizes and times, and the settings. It is noted next to the
output. This file knows no settings.
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
    """A hash of settings (of JSON's kinds) and inputs; None where an input is gone once it is read."""
    if STDIN in inputs:
        return None
    return hashlib.sha256(json.dumps([settings, stamps(inputs)], sort_keys=True).encode()).hexdigest()


def stamps(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of every input: if they are equal, so is taken to be the content."""
    found = [(path, path.stat()) for path in paths if path != STDIN]
    return [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path, status in found]


def check_absent(flag: str, value: object, paths: Iterable[Path], overwrite: bool) -> None:
    """Errors: ValueError where one of `paths` would be replaced."""
    if (there := next((path for path in paths if path.is_file()), None)) is not None and not overwrite:
        raise ValueError(f"{flag} {value}: {there} exists; name another place, or give --overwrite to replace it")


def kept_pairs(value: str, prefixes: Sequence[str], work: str | None, overwrite: bool) -> list[IndexedDataset]:
    """The token files at all `prefixes`, where this very work made them; else nothing, and the work is to be done.

    A part of them may be there, of work that was interrupted. value: of --output-prefix.
    Errors: ValueError where any other pair would be replaced.
    """
    if overwrite:
        return []
    found = []
    for prefix in filter(exists, prefixes):
        with contextlib.suppress(ValueError):  # a damaged pair is not this work's
            found.append(IndexedDataset(prefix))
        if work is None or not found or found[-1].prefix != prefix or found[-1].note.get("work") != work:
            raise ValueError(
                f"--output-prefix {value}: {prefix}.bin exists, and was not made of these inputs with these settings; "
                "name another place, or give --overwrite to replace it"
            )
    return found if len(found) == len(prefixes) else []


class WorkRecord:
    """The note next to files of any kind: the first one's name and `.made.json`, with their hashes."""

    def __init__(self, paths: Sequence[Path], work: str | None) -> None:
        self._paths, self._work = paths, work
        self._path = paths[0].with_suffix(".made.json")

    def kept(self, flag: str, value: object, overwrite: bool) -> bool:
        """Whether this very work made the files. Errors: ValueError where any other's would be replaced."""
        if overwrite:
            return False
        found = {}
        with contextlib.suppress(OSError, ValueError):
            found = dict(json.loads(self._path.read_bytes()))
        if self._work is not None and found == self._content():
            return True
        check_absent(flag, value, self._paths, overwrite)
        return False

    def write(self) -> None:
        """To be called when the files are there."""
        with whole_file(self._path) as file:
            file.write(json.dumps(self._content()).encode() + b"\n")

    def _content(self) -> dict[str, Json]:
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None for path in self._paths]
        return {"work": self._work, "sha256": hashes}
