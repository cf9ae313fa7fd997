"""Apply a step to files: part by part, in any number of processes, resumable, with the same bytes however it is run.

    OUT/00000-000000.jsonl ...    what is left of each part; a part of which nothing is left has no file
    OUT/.00000-000000.json ...    its counts, until all are done: a part that has them is done
    OUT/.corpus.json              the counts of all, when all is done, and of what work

A file appears whole or not at all: first the lines of a part, then its counts. Work that was interrupted, in any way,
is resumed by the same call; other work is refused. With an output that is one file the parts are joined at the end.
It knows no step.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from mega.core.corpus.documents import CorpusDocument, CorpusStep, Result, Work, check_readable
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.parts import PART_BYTES, InputPart, UnreadLine, parts
from mega.core.data.made import stamps
from mega.core.data.sources import STDIN, BadLine, find
from mega.core.data.workers import Buffer, Workers
from mega.core.files import check_folder, locked_alone, whole_file
from mega.core.untrusted import parse_json, read_limited

VERSION = 1
"""Of what steps do; work of another version is not resumed."""
RECORD = ".corpus.json"
UNREADABLE = "not a document"
"""Why a line is dropped that holds no document, with --on-error skip."""

_WORK = ".work.json"
_MOST_BYTES = 1 << 28
_LOCK_SECONDS = 3.0
_PART_NAME = re.compile(r"\.?\d{5}-\d{6}\.")
_SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}

Packing = Literal["none", "gz", "zst"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a step is run. Of these only `packing`, `on_error` and `part_bytes` change what it writes.

    output: a folder, or a file if its name ends in .jsonl, .json, .txt, .gz or .zst; dropped: a folder for the dropped
    documents; show_dropped: samples of each reason that are kept for the report; shard: (i, n), i of 0 .. n - 1.
    """

    output: Path
    dropped: Path | None = None
    packing: Packing = "none"
    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    on_error: Literal["stop", "skip"] = "stop"
    overwrite: bool = False
    show_dropped: int = 5
    part_bytes: int = PART_BYTES
    progress: Callable[[StepCounts, int, int], None] | None = None
    """Called after every part with the counts so far, and the stored bytes that are done and that there are."""

    @property
    def one_file(self) -> bool:
        return self.output.suffix.lower() in (".jsonl", ".json", ".txt", ".gz", ".zst")

    @property
    def folder(self) -> Path:
        """Where the parts are written."""
        return self.output.with_name(f".{self.output.name}.parts") if self.one_file else self.output

    @property
    def record(self) -> Path:
        """The file of all counts."""
        return self.output.with_name(f".{self.output.name}{RECORD}") if self.one_file else self.output / RECORD

    @property
    def packed(self) -> Packing:
        """How the lines are packed: as the name of the output says, if it is one file."""
        ends: dict[str, Packing] = {".gz": "gz", ".zst": "zst"}
        return ends.get(self.output.suffix.lower(), "none") if self.one_file else self.packing


class StepOutcome(NamedTuple):
    """complete: whether all shards are done; repeated: whether it was done before, and nothing was written."""

    counts: StepCounts
    complete: bool = True
    repeated: bool = False


def process(inputs: Sequence[str | Path], step: CorpusStep, options: RunOptions) -> StepOutcome:
    """Apply a step to all documents of `inputs`: files, folders, globs, see `sources.find`.

    JSON lines, also in .gz .zst .xz .bz2; parquet; arrow; of .txt each line is a document.
    Errors: ValueError naming flag, or file and line; OSError of the machine. Parts that are done stay done.
    """
    paths = find(inputs)
    _check(paths, options)
    identity = _identity(step, paths, options)
    if (record := _read(options.record)) is not None and not options.overwrite:
        if record.get("identity") == identity:
            _join_remains(options)
            return StepOutcome(StepCounts.from_json(record["counts"]), repeated=True)
        raise ValueError(
            f"--output {options.output}: holds the result of other inputs or settings; name another place, or give "
            "--overwrite to replace it"
        )
    step.load()  # what is wrong with its files or libraries is reported before anything is written
    with _locked_folder(options, identity) as stale:
        done = _process_parts(paths, step, options, stale)
        return _finish(step, paths, options, identity, done)


def _check(paths: Sequence[Path], options: RunOptions) -> None:
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
    written = {options.output.resolve(), options.folder.resolve()}
    for path in paths:
        if written & {path.resolve(), *path.resolve().parents}:
            raise ValueError(f"--output {options.output}: would replace the input {path}; name another place")


def _identity(step: CorpusStep, paths: Sequence[Path], options: RunOptions) -> str:
    """A hash of all that the output depends on."""
    settings = {name: value for name, value in asdict(step).items()}  # type: ignore[call-overload]
    work = [VERSION, step.name, settings, options.packed, options.on_error, options.part_bytes, options.show_dropped]
    work += [options.dropped is not None, stamps(paths)]
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object that this file wrote; None where it is not there."""
    if not path.is_file():
        return None
    found = parse_json(read_limited(path, _MOST_BYTES, str(path)), str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is not a record of a corpus step; remove it to start over")
    return found


def _write(path: Path, content: object) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _locked_folder(options: RunOptions, identity: str) -> Iterator[dict[str, list[Path]]]:
    """The folder of the parts, for this process alone among those of its shard, with this work noted in it.

    Gives the half-written files of killed processes, by part. Errors: ValueError where the folder holds other things.
    """
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.dropped is not None:
        options.dropped.mkdir(parents=True, exist_ok=True)
    index, count = options.shard
    with open(folder / f".lock-{index + 1}-of-{count}", "wb") as lock:
        if not _locked_soon(lock.fileno()):
            raise ValueError(f"--output {options.output}: another process writes into it; wait, or name another place")
        names = [path for path in folder.iterdir() if not path.name.startswith(".lock-")]
        work = _read(folder / _WORK)
        if not all(map(_is_ours, names)):
            raise ValueError(
                f"--output {options.output}: is not empty, and holds no corpus that mega wrote; name another place"
            )
        if options.overwrite and (work is None or work.get("identity") != identity or (folder / RECORD).exists()):
            for path in names:
                path.unlink()
            names, work = [], None
        if work is not None and work.get("identity") != identity:
            raise ValueError(
                f"--output {options.output}: belongs to unfinished work with other inputs or settings; repeat its "
                "command line, or give --overwrite to start over"
            )
        if work is None:
            _write(folder / _WORK, {"identity": identity})
        stale: dict[str, list[Path]] = {}
        for path in names:
            if path.name.endswith(".tmp"):
                stale.setdefault(path.name.lstrip(".")[:12], []).append(path)
        yield stale
    with contextlib.suppress(OSError):
        (folder / f".lock-{index + 1}-of-{count}").unlink()


def _locked_soon(descriptor: int) -> bool:
    """Whether the lock is ours: the workers of a process that was killed hold it until they notice."""
    until = time.monotonic() + _LOCK_SECONDS
    while not locked_alone(descriptor):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _is_ours(path: Path) -> bool:
    """Whether `process` wrote a file of a folder."""
    return path.name.startswith((_WORK, RECORD, ".shard-")) or _PART_NAME.match(path.name) is not None


# --- the parts ------------------------------------------------------------------------------------------------------


def _process_parts(
    paths: Sequence[Path], step: CorpusStep, options: RunOptions, stale: dict[str, list[Path]]
) -> StepCounts:
    """Write every part of the shard that is not done; the counts of all of them."""
    total = sum(path.stat().st_size for path in paths)
    counts = StepCounts()

    def left() -> Iterator[InputPart]:
        for part in parts(paths, options.shard, options.part_bytes):
            for path in stale.get(part.name, ()):
                path.unlink(missing_ok=True)
            if (done := _read(options.folder / f".{part.name}.json")) is None:
                yield part
            else:
                counts.add(StepCounts.from_json(done), options.show_dropped)

    for part, found in _answers(left(), step, options):
        counts.add(found, options.show_dropped)
        if options.progress is not None:
            options.progress(counts, part.end, total)
    return counts


def _answers(
    asked: Iterator[InputPart], step: CorpusStep, options: RunOptions
) -> Iterator[tuple[InputPart, StepCounts]]:
    plain = _PartOptions(options.folder, options.dropped, options.packed, options.on_error, options.show_dropped)
    if options.workers == 1:
        work = step.load()
        yield from ((part, write_part(part, step.key, work, plain)) for part in asked)
        return
    pool: Workers[InputPart, StepCounts] = Workers(
        options.workers, here=lambda: partial(_answer, step, step.load(), plain), there=partial(_loaded, step, plain)
    )
    with pool:
        for part, counts, _ in pool.answers(asked):
            yield part, counts


class _PartOptions(NamedTuple):
    folder: Path
    dropped: Path | None
    packing: Packing
    on_error: str
    samples: int


def _loaded(step: CorpusStep, options: _PartOptions) -> Callable[[InputPart, Buffer], StepCounts]:
    return partial(_answer, step, step.load(), options)


def _answer(step: CorpusStep, work: Work, options: _PartOptions, part: InputPart, buffer: Buffer) -> StepCounts:
    return write_part(part, step.key, work, options)


def write_part(part: InputPart, key: str | None, work: Work, options: _PartOptions) -> StepCounts:
    """In a worker: do the work on one part and write its files. Errors: BadLine naming file and line."""
    counts = StepCounts()
    suffix = (".txt" if part.plain else ".jsonl") + _SUFFIXES[options.packing]
    with contextlib.ExitStack() as files:
        kept = files.enter_context(_LineFile.open(options.folder / f"{part.name}{suffix}", options.packing))
        lost = None
        if options.dropped is not None:
            lost = files.enter_context(_LineFile.open(options.dropped / f"{part.name}{suffix}", options.packing))
        documents = _Readable(part, key, options, counts)
        for result in work(documents):
            _record(result, documents.last(), part, counts, kept, lost, options.samples)
        assert not documents.waiting, "a step gives one result for each document"
    _write(options.folder / f".{part.name}.json", counts.as_json())
    return counts


class _Readable:
    """The documents of a part that can be read, and those of them that have no result yet."""

    def __init__(self, part: InputPart, key: str | None, options: _PartOptions, counts: StepCounts) -> None:
        self._part, self._key, self._options, self._counts = part, key, options, counts
        self.waiting: deque[CorpusDocument] = deque()

    def last(self) -> CorpusDocument:
        """The first document without a result."""
        return self.waiting.popleft()

    def __iter__(self) -> Iterator[CorpusDocument]:
        for document in self._part.documents("text" if self._key is None else self._key):
            self._counts.documents += 1
            try:
                if isinstance(document, UnreadLine):
                    raise BadLine(f"{document.where}: {document.problem}")
                if self._key is not None:
                    check_readable(document)
            except BadLine as error:
                if self._options.on_error == "stop":
                    raise
                self._counts.dropped[UNREADABLE] += 1
                self._counts.sample(
                    UNREADABLE, "", self._part.name, self._counts.documents, str(error), self._options.samples
                )
                continue
            self.waiting.append(document)
            yield document


def _record(
    result: Result,
    document: CorpusDocument,
    part: InputPart,
    counts: StepCounts,
    kept: _LineFile,
    lost: _LineFile | None,
    samples: int,
) -> None:
    """Write what a step has made of a document, and count it."""
    for line in result.lines:
        kept.write(line)
    counts.written += len(result.lines)
    counts.bytes += sum(map(len, result.lines)) + len(result.lines)
    counts.other.update(result.counts)
    if result.reason is None:
        counts.kept += 1
        counts.measure(result.measures)
        return
    counts.dropped[result.reason] += 1
    if lost is not None:
        lost.write(document.line if document.plain else document.with_fields(dropped=result.reason))
    if samples:
        where = part.near(document.number)
        counts.sample(result.reason, where, part.name, document.index, document.shown, samples)


class _LineFile:
    """A file of lines that appears whole, with the first line, or not at all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.lines = file, 0

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.write(b"\n")
        self.lines += 1

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, packing: Packing) -> Iterator[_LineFile]:
        with contextlib.suppress(_Empty), whole_file(path) as file, packed(file, packing) as inner:
            found = cls(inner)
            yield found
            if not found.lines:
                raise _Empty


class _Empty(Exception):
    """Nothing was written, so no file is to appear."""


@contextlib.contextmanager
def packed(file: BinaryIO, packing: Packing) -> Iterator[BinaryIO]:
    """A file that packs what is written into another. Equal content gives equal bytes."""
    if packing == "none":
        yield file
    elif packing == "gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as inner:
            yield inner  # type: ignore[misc]
    else:
        with _zstandard().ZstdCompressor(level=6, write_checksum=True).stream_writer(file, closefd=False) as inner:
            yield inner


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ValueError("--compress zst: needs zstandard; pip install 'mega[corpus]'") from None
    return zstandard


# --- the end --------------------------------------------------------------------------------------------------------


def _finish(
    step: CorpusStep, paths: Sequence[Path], options: RunOptions, identity: str, done: StepCounts
) -> StepOutcome:
    """When the parts of all shards are done: sum up their counts, join them if one file is asked for, and tidy up."""
    total = StepCounts()
    records: list[Path] = []
    if options.shard[1] > 1:
        _write(options.folder / f".shard-{options.shard[0] + 1}-of-{options.shard[1]}.json", done.as_json())
        shards = [options.folder / f".shard-{i + 1}-of-{options.shard[1]}.json" for i in range(options.shard[1])]
        if not all(shard.is_file() for shard in shards):
            return StepOutcome(done, complete=False)
        records += shards
    sidecars = sorted(path for path in options.folder.glob(".*.json") if path.name[1:6].isdigit())
    for path in sidecars:
        found = _read(path)
        assert found is not None
        total.add(StepCounts.from_json(found), options.show_dropped)
    if options.one_file:
        _join(options.folder, options.output, plain=_all_plain(paths))
    settings = asdict(step)  # type: ignore[call-overload]
    record = {"identity": identity, "step": step.name, "settings": settings, "inputs": [str(path) for path in paths]}
    _write(options.record, json.loads(json.dumps(record | {"counts": total.as_json()}, default=str)))
    for path in [*sidecars, *records, options.folder / _WORK]:
        path.unlink(missing_ok=True)
    _join_remains(options)
    return StepOutcome(total)


def _all_plain(paths: Sequence[Path]) -> bool:
    return all(".txt" in (path.suffix.lower(), Path(path.stem).suffix.lower()) for path in paths)


def _join(folder: Path, output: Path, *, plain: bool) -> None:
    """Concatenate the files of all parts: packed ones are packed as a whole by that, too."""
    names = sorted(path for path in folder.iterdir() if path.name[:5].isdigit() and not path.name.endswith(".tmp"))
    with whole_file(output) as whole:
        for name in names:
            with open(name, "rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)


def _join_remains(options: RunOptions) -> None:
    """Take away the parts of an output that is one file and is there."""
    if options.one_file and options.folder.is_dir() and options.output.is_file():
        shutil.rmtree(options.folder, ignore_errors=True)


def folder_files(folder: Path) -> list[Path]:
    """The files of documents of a folder that `process` wrote, in order."""
    return sorted(Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith("."))
