"""Processes one part of a step's input in a worker, and writes the part's output files."""

from __future__ import annotations

import contextlib
import gzip
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

from mega.core.corpus.documents import Check, CorpusDocument, Result, Work, check_readable
from mega.core.corpus.folder import Packing, write_record
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.parts import InputPart, UnreadLine
from mega.core.data.sources import BadLine
from mega.core.files import whole_file

UNREADABLE = "not a document"
"""Reason recorded for a line that --on-error skip drops because it is not a document."""

_SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}


class PartOptions(NamedTuple):
    """Options for writing the output of an input part."""

    folder: Path  # Folder for the kept documents
    dropped: Path | None  # Folder for the dropped documents, or None
    packing: Packing  # Compression of the files
    on_error: str  # "stop" or "skip": what to do with a line that is not a document
    samples: int  # Maximum number of dropped documents to record per reason


def write_part(part: InputPart, key: str, check: Check, work: Work, options: PartOptions) -> StepCounts:
    """Process one part in a worker, and write its files. Errors: BadLine naming file and line."""
    counts = StepCounts()
    with contextlib.ExitStack() as files:
        kept_file = files.enter_context(line_file(options.folder, part.name, part.plain, options.packing))
        dropped_file = None
        if options.dropped is not None:
            dropped_file = files.enter_context(line_file(options.dropped, part.name, part.plain, options.packing))
        stop = options.on_error == "stop"
        documents = ReadableDocuments(part, key, check, counts, stop=stop, samples=options.samples)
        for result in work(documents):
            _record(result, documents.last(), part, key, counts, kept_file, dropped_file, options.samples)
        assert not documents.waiting, "a step gives one result for each document"
    write_record(options.folder / f".{part.name}.json", counts.as_json())
    return counts


class ReadableDocuments:
    """Iterates over the readable documents of an input part, and keeps a queue of the documents that have no result
    yet.

    stop: whether to raise BadLine at the first line that is not a document. If False, such lines are counted as
    dropped.
    """

    def __init__(
        self, part: InputPart, key: str, check: Check, counts: StepCounts, *, stop: bool, samples: int
    ) -> None:
        self._part, self._key, self._check = part, key, check
        self._counts, self._stop, self._samples = counts, stop, samples
        self.waiting: deque[CorpusDocument] = deque()

    def last(self) -> CorpusDocument:
        """Remove and return the first document that has no result."""
        return self.waiting.popleft()

    def __iter__(self) -> Iterator[CorpusDocument]:
        for number, document in enumerate(self._part.documents(self._key)):
            self._counts.documents += 1
            try:
                if isinstance(document, UnreadLine):
                    raise BadLine(f"{document.where}: {document.problem}")
                check_readable(document, self._check)
            except BadLine as error:
                if self._stop:
                    raise
                self._counts.dropped[UNREADABLE] += 1
                self._counts.sample(UNREADABLE, "", self._part.name, number, str(error), self._samples)
                continue
            self.waiting.append(document)
            yield document


def _record(
    result: Result,
    document: CorpusDocument,
    part: InputPart,
    key: str,
    counts: StepCounts,
    kept_file: _LineFile,
    dropped_file: _LineFile | None,
    samples: int,
) -> None:
    """Write the result of a document to the files, and add it to the counts."""
    for line in result.lines:
        kept_file.write(line)
    counts.written += len(result.lines)
    counts.bytes += sum(map(len, result.lines)) + len(result.lines)
    counts.other.update(result.counts)
    if result.reason is None:
        counts.kept += 1
        counts.measure(result.measures)
        if key:
            counts.measure(_measures(document))
        return
    counts.dropped[result.reason] += 1
    if dropped_file is not None:
        dropped_file.write(document.line if document.plain else document.with_fields(dropped=result.reason))
    if samples:
        location = part.near(document.number)
        counts.sample(result.reason, location, part.name, document.index, document.shown, samples)


def _measures(document: CorpusDocument) -> dict[str, str]:
    """Return the length of a document, rounded up to a power of two, and the domain of its URL."""
    length = len(document.text)
    measures = {"characters": str(1 << (length - 1).bit_length() if length else 0)}
    url = document.fields.get("url")
    if isinstance(url, str) and "://" in url:
        measures["domain"] = url.split("/", 3)[2].lower().removeprefix("www.")[:80]
    return measures


class _LineFile:
    """A file of lines that is created atomically when it is complete, and only if it has at least one line."""

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
            line_file = cls(inner)
            yield line_file
            if not line_file.lines:
                raise _Empty


def line_file(folder: Path, name: str, plain: bool, packing: Packing) -> contextlib.AbstractContextManager[_LineFile]:
    """Open the file to which an input part's lines of text or JSON are written."""
    return _LineFile.open(folder / f"{name}{'.txt' if plain else '.jsonl'}{_SUFFIXES[packing]}", packing)


class _Empty(Exception):
    """Raised if nothing was written, so that no file is created."""


@contextlib.contextmanager
def packed(file: BinaryIO, packing: Packing) -> Iterator[BinaryIO]:
    """Yield a writable file that compresses its input into `file`. Equal content produces identical bytes."""
    if packing == "none":
        yield file
    elif packing == "gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as inner:
            yield inner  # type: ignore[misc]
    else:
        with _zstandard().ZstdCompressor(level=6, write_checksum=True).stream_writer(file, closefd=False) as inner:
            yield inner


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise ValueError("--compress zst: needs zstandard; pip install '.[corpus]' in a clone") from None
    return zstandard
