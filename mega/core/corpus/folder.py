"""Manages the output folder of a step: its files, its lock, the record of the work, and files left by an interrupted
run.

    OUT/00000-000000.jsonl ...    kept documents of each part; no file if no document is kept
    OUT/.00000-000000.json ...    counts of a finished part; removed when all parts are done
    OUT/.survey/                  notes of the first pass of a two-pass step, until all parts are done
    OUT/.work.json                identity of the unfinished work
    OUT/.corpus.json              identity of the finished work and the counts of all parts

If the output is one file, OUT is a hidden folder next to this file until all parts are done. This module does not
depend on documents.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.parts import PART_BYTES
from mega.core.data.sources import STDIN
from mega.core.files import check_folder, locked_alone, name_place, whole_file
from mega.core.untrusted import Json, parse_json, read_limited

RECORD = ".corpus.json"
SURVEY = ".survey"
_WORK = ".work.json"
_MOST_BYTES = 1 << 28
_LOCK_SECONDS = 20.0
"""Maximum time in seconds to wait for the workers of a killed run to exit. On a busy machine, workers take several
seconds to exit."""
_PART_NAME = re.compile(r"\.?\d{5}-\d{6}\.")

Packing = Literal["none", "gz", "zst"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for running any step. Only `packing`, `on_error` and `part_bytes` affect the bytes that are written."""

    output: Path
    """Path of the output: a folder, or a file if its name ends in .jsonl, .json, .txt, .gz or .zst."""
    against: tuple[str, ...] = ()
    """Files, folders and globs of documents that are read before the input but are not written to the output."""
    dropped: Path | None = None
    """Folder for the dropped documents."""
    packing: Packing = "none"
    """Compression of the files in an output folder."""
    workers: int = 1
    """Number of processes."""
    shard: tuple[int, int] = (0, 1)
    """(i, n) with i in 0 .. n - 1: process share i of n."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a line that is not a document."""
    overwrite: bool = False
    """Whether to replace an existing result of different inputs or settings."""
    show_dropped: int = 5
    """Maximum number of dropped documents per reason that are recorded for the report."""
    part_bytes: int = PART_BYTES
    """Number of bytes of text per input part."""
    progress: Callable[[StepCounts, int, int], None] | None = None
    """Function called after every part with the counts so far, the number of stored bytes processed, and the total
    number of stored bytes."""

    @property
    def one_file(self) -> bool:
        return self.output.suffix.lower() in (".jsonl", ".json", ".txt", ".gz", ".zst")

    @property
    def folder(self) -> Path:
        """Folder for the output files of the input parts."""
        return self.output.with_name(f".{self.output.name}.parts") if self.one_file else self.output

    @property
    def record(self) -> Path:
        """File with the counts of all parts."""
        return self.output.with_name(f".{self.output.name}{RECORD}") if self.one_file else self.output / RECORD

    @property
    def packed(self) -> Packing:
        """Compression of the written lines. If the output is one file, the suffix of its name determines the
        compression."""
        ends: dict[str, Packing] = {".gz": "gz", ".zst": "zst"}
        return ends.get(self.output.suffix.lower(), "none") if self.one_file else self.packing


def check_output(paths: Sequence[Path], options: RunOptions) -> None:
    """Check the output options. Errors: ValueError naming the invalid flag."""
    index, count = options.shard
    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: must be at least 1")
    if not 0 <= index < count:
        raise ValueError(f"--shard {index + 1}/{count}: must be i/N with 1 <= i <= N")
    if options.one_file and count > 1:
        raise ValueError(f"--output {options.output}: must be a folder with --shard; join it by `mega corpus merge`")
    if STDIN in paths:
        raise ValueError("--input -: standard input cannot be resumed; give a file")
    check_folder("--output", options.output, options.folder)
    if not options.one_file and options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output {options.output}: exists, and is not a folder; name another place")
    if options.one_file and options.output.is_dir():
        raise ValueError(f"--output {options.output}: is a folder; must be a file, or a folder without such a suffix")
    output_paths = {options.output.resolve(), options.folder.resolve()}
    for path in paths:
        if output_paths & {path.resolve(), *path.resolve().parents}:
            raise ValueError(f"--output {options.output}: would replace the input {path}; name another place")
    is_recorded = options.record.exists() or (options.folder / _WORK).exists()
    if options.one_file and options.output.exists() and not is_recorded and not options.overwrite:
        raise ValueError(f"--output {options.output}: exists; name another, or give --overwrite to replace it")


def read_record(path: Path) -> dict[str, Json] | None:
    """Read a JSON object written by `write_record`, or return None if the file does not exist."""
    if not path.is_file():
        return None
    record = parse_json(read_limited(path, _MOST_BYTES, str(path)), str(path))
    if not isinstance(record, dict):
        raise ValueError(f"{path}: is not a record of a corpus step; remove it to start over")
    return record


def write_record(path: Path, content: object) -> None:
    """Write JSON atomically."""
    with whole_file(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")


@contextlib.contextmanager
def locked_folder(options: RunOptions, accepted: Sequence[str]) -> Iterator[dict[str, list[Path]]]:
    """Lock the folder of the parts for this shard, and record this work in the folder. Yields a dict: part -> temporary
    files.

    accepted: identity of this work, followed by identities of other work that may be resumed.

    Temporary files are files that killed processes left incomplete. Errors: ValueError if the folder contains files of
    other work.
    """
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    index, count = options.shard
    with open(folder / f".lock-{index + 1}-of-{count}", "wb") as lock:
        if not wait_for_lock(lock.fileno()):
            raise ValueError(f"--output {options.output}: another process writes into it; wait, or name another place")
        names = _prepare_folder(options, accepted)
        if options.dropped is not None:
            options.dropped.mkdir(parents=True, exist_ok=True)
        stale: dict[str, list[Path]] = {}
        for path in names:
            if path.name.endswith(".tmp"):
                stale.setdefault(path.name.lstrip(".")[:12], []).append(path)
        try:
            yield stale
        except OSError as error:
            name_place(error, options.output)
            raise
    with contextlib.suppress(OSError):
        (folder / f".lock-{index + 1}-of-{count}").unlink()


def wait_for_lock(descriptor: int) -> bool:
    """Wait for the lock, which workers of a killed process hold until they exit. Returns whether the lock was
    acquired."""
    until = time.monotonic() + _LOCK_SECONDS
    while not locked_alone(descriptor):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _is_step_file(path: Path) -> bool:
    """Whether a file of the folder was written by `process`."""
    return path.name.startswith((_WORK, RECORD, SURVEY, ".shard-")) or _PART_NAME.match(path.name) is not None


def _prepare_folder(options: RunOptions, accepted: Sequence[str]) -> list[Path]:
    """Record this work in the folder, and return the files in the folder. Files of other work are removed if
    --overwrite is given or the other work has no results.

    Errors: ValueError if files of other work may not be removed.
    """
    folder = options.folder
    names = [path for path in folder.iterdir() if not path.name.startswith(".lock-")]
    work = read_record(folder / _WORK)
    if not all(map(_is_step_file, names)):
        raise ValueError(
            f"--output {options.output}: is not empty, and holds no corpus that mega wrote; name another place"
        )
    is_other = work is None or work.get("identity") not in accepted
    if options.overwrite and (is_other or (folder / RECORD).exists()):
        names, work = _removed([*names, *_dropped_parts(options)]), None
    elif work is not None and is_other and not _anything_done(options):
        names, work = _removed(names), None  # the work has no results, for example after an error in line 1
    elif work is not None and is_other:
        raise ValueError(
            f"--output {options.output}: belongs to unfinished work with other inputs or settings; repeat its "
            "command line, or give --overwrite to start over"
        )
    if work is None and _dropped_parts(options):
        raise ValueError(
            f"--dropped {options.dropped}: holds documents of other work; name another place, or give --overwrite "
            "to replace them"
        )
    if work is None or work["identity"] != accepted[0]:
        write_record(folder / _WORK, {"identity": accepted[0]})
    return names


def _removed(paths: Sequence[Path]) -> list[Path]:
    """Remove the paths, and return an empty list."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return []


def _anything_done(options: RunOptions) -> bool:
    """Whether unfinished work has results, or another shard may still be running."""
    folder = options.folder
    other_locks = [path for path in folder.glob(".lock-*") if path.name != ".lock-1-of-1"]
    return bool(other_locks) or any(folder.glob(".0*.json")) or any((folder / SURVEY).rglob("*.*"))


def _dropped_parts(options: RunOptions) -> list[Path]:
    """The part files in the folder of dropped documents."""
    folder = options.dropped
    return [path for path in folder.iterdir() if _PART_NAME.match(path.name)] if folder and folder.is_dir() else []


def remove_work(options: RunOptions, paths: Sequence[Path]) -> None:
    """Remove the files that are needed only to resume: counts of parts, the identity of the work, and incomplete
    files."""
    folder = options.folder
    output_files = [path for path in folder.iterdir() if _is_step_file(path)] + _dropped_parts(options)
    for path in [*paths, folder / _WORK, *(path for path in output_files if path.name.endswith(".tmp"))]:
        path.unlink(missing_ok=True)


def join_parts(folder: Path, output: Path) -> None:
    """Concatenate the files of all parts to the file `output`. A concatenation of .gz or .zst files is a valid file of
    the same format."""
    names = sorted(path for path in folder.iterdir() if path.name[:5].isdigit() and not path.name.endswith(".tmp"))
    with whole_file(output) as whole:
        for name in names:
            with open(name, "rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)


def remove_leftovers(options: RunOptions) -> None:
    """Remove the temporary files of a run that was killed after its output was complete."""
    if not options.one_file:
        locks = options.folder.glob(".lock-*")
        hidden = [*locks, *(path for path in options.folder.glob(".*") if _is_step_file(path) and path.name != RECORD)]
        for path in [*hidden, *(path for path in options.folder.glob("*.tmp") if _is_step_file(path))]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    remove_joined_parts(options)


def remove_joined_parts(options: RunOptions) -> None:
    """Remove the folder of the parts if the output is one file and that file exists."""
    if options.one_file and options.folder.is_dir() and options.output.is_file():
        shutil.rmtree(options.folder, ignore_errors=True)
