"""From text to token files: what `mega preprocess` does.

    1 read    the parent cuts the input into blocks of whole lines
    2 encode  workers parse and tokenise a block each, straight into arrays
    3 write   the parent writes the blocks in the order of the input: the bytes do not depend on the workers

No more than a few blocks per worker are under way, so memory does not grow with the input. It knows no
command line.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import token_dtype
from mega.core.data.writer import IndexedWriter
from mega.core.text.tokenizer import Tokenizer, build

OnError = Literal["stop", "skip"]

_BLOCK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 28
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LISTED = 100  # skipped lines that are named; the others are counted


class Block(NamedTuple):
    """Neighbouring lines of one file. `read` is how many bytes of the file (as stored) lie before its end."""

    path: Path
    first_line: int
    lines: list[bytes]
    read: int


class Documents(NamedTuple):
    """Many tokenised documents in the form in which they are written: see `IndexedWriter.extend`."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]


class BadLine(ValueError):
    """A line that holds no document; its message names file and line."""


@dataclass
class Report:
    """What was done so far. documents + skipped = lines of the input that are not blank."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    tokenizer: Mapping[str, Any],
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    on_error: OnError = "stop",
    progress: Callable[[Report, int], None] | None = None,
) -> Report:
    """Tokenise `inputs` into `<output_prefix>_<key>_document.bin/.idx`, a pair of files per key.

    inputs: JSON lines, plain or .gz; a .txt (or .txt.gz) file is one document, under the key "text".

    tokenizer: the fields of the configuration's tokenizer section, as `text.tokenizer.build` takes them.
    append_eod: put the end-of-document id behind every document that has a token.
    progress: called after every block with the report so far and the bytes read of the input files.
    Raises ValueError naming flag, or file and line; then nothing appears under the output names.
    """
    made = build(**tokenizer)
    eod = _checked_eod(made, append_eod)
    if workers < 1:
        raise ValueError(f"--workers {workers}: must be at least 1")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ValueError(f"--json-keys {' '.join(json_keys)}: must be one or more different keys")
    for path in inputs:
        if not path.is_file():
            raise ValueError(f"--input {path}: no such file")

    report = Report(outputs=[f"{output_prefix}_{key}_document" for key in json_keys])
    dtype = token_dtype(made.vocab_size)
    job = _Job(tuple(json_keys), eod, dtype, on_error == "skip")
    with contextlib.ExitStack() as open_now:
        writers = [open_now.enter_context(IndexedWriter(prefix, dtype)) for prefix in report.outputs]
        blocks = itertools.chain.from_iterable(_blocks(inputs))
        encoded = open_now.enter_context(contextlib.closing(_encoded(blocks, made, tokenizer, job, workers)))
        for block, documents, reasons in encoded:
            for writer, part in zip(writers, documents, strict=True):
                writer.extend(*part)
            report.documents += len(documents[0].counts)
            report.tokens = sum(writer.tokens for writer in writers)
            report.bytes += sum(map(len, block.lines))
            report.skipped += len(reasons)
            report.reasons += reasons[: _LISTED - len(report.reasons)]
            if progress:
                progress(report, block.read)
        if not report.documents:
            raise ValueError(f"--input {' '.join(map(str, inputs))}: holds no document")
    return report


def _checked_eod(tokenizer: Tokenizer, append_eod: bool) -> int | None:
    if append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: {tokenizer.kind} has no end-of-document token")
    return tokenizer.eod if append_eod else None


# --- 1 read ---------------------------------------------------------------------------------------------


def _blocks(inputs: Sequence[Path]) -> Iterator[Iterator[Block]]:
    """The blocks of every file, in order."""
    before = 0
    for path in inputs:
        yield _file_blocks(path, before)
        before += path.stat().st_size


def _file_blocks(path: Path, before: int) -> Iterator[Block]:
    """Whole lines of one file, about _BLOCK_BYTES at a time. `before`: bytes of the files ahead of it."""
    with open(path, "rb") as stored, contextlib.ExitStack() as inner:
        text: Any = inner.enter_context(gzip.open(stored)) if path.suffix == ".gz" else stored
        number = 1
        read = _one_document if path.name.removesuffix(".gz").endswith(".txt") else _some_lines
        while True:
            try:
                lines = list(read(text, path, number))
            except (OSError, EOFError, ValueError) as error:
                if isinstance(error, BadLine):
                    raise
                raise ValueError(f"{path}: cannot be read behind line {number - 1} ({error})") from None
            if not lines:
                return
            yield Block(path, number, lines, before + stored.tell())
            number += len(lines)


def _some_lines(text: BinaryIO, path: Path, number: int) -> Iterator[bytes]:
    size = 0
    while size < _BLOCK_BYTES and (line := text.readline(_MOST_LINE_BYTES)):
        if len(line) == _MOST_LINE_BYTES:
            raise BadLine(f"{path}:{number}: a line longer than {_MOST_LINE_BYTES >> 20} MiB")
        size += len(line)
        number += 1
        yield line


def _one_document(text: BinaryIO, path: Path, number: int) -> Iterator[bytes]:
    """A .txt file as the one JSON line that it amounts to, under the key "text"."""
    import orjson

    whole = text.read(_MOST_LINE_BYTES)
    if len(whole) == _MOST_LINE_BYTES:
        raise BadLine(f"{path}: a .txt file is one document, and this is more than {_MOST_LINE_BYTES >> 20} MiB")
    if whole:
        yield orjson.dumps({"text": whole.removeprefix(_BYTE_ORDER_MARK).decode()})


# --- 2 encode -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What every worker does with every block."""

    keys: tuple[str, ...]
    eod: int | None
    dtype: np.dtype[Any]
    skip: bool

    def encode(self, block: Block, tokenizer: Tokenizer) -> tuple[list[Documents], list[str]]:
        """A `Documents` per key, and why lines were skipped. Raises BadLine where none may be."""
        numbers: list[int] = []
        texts: list[list[list[str]]] = []  # [document][key][sentence]
        reasons: list[str] = []
        for number, line in enumerate(block.lines, block.first_line):
            if line.isspace():
                continue
            try:
                texts.append(self._texts(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line))
                numbers.append(number)
            except ValueError as error:
                reasons.append(self._bad(block.path, number, error))
        try:
            return self._per_key(texts, tokenizer), reasons
        except ValueError:  # the tokenizer refuses a text: find it, one by one
            parts: list[list[Documents]] = []
            for number, text in zip(numbers, texts, strict=True):
                try:
                    parts.append(self._per_key([text], tokenizer))
                except ValueError as error:
                    reasons.append(self._bad(block.path, number, error))
            return [_joined([part[k] for part in parts]) for k in range(len(self.keys))], reasons

    def _per_key(self, texts: Sequence[Sequence[Sequence[str]]], tokenizer: Tokenizer) -> list[Documents]:
        return [self._documents([text[k] for text in texts], tokenizer) for k in range(len(self.keys))]

    def _bad(self, path: Path, number: int, error: ValueError) -> str:
        reason = f"{path}:{number}: {error}"
        if not self.skip:
            raise BadLine(reason) from None
        return reason

    def _texts(self, line: bytes) -> list[list[str]]:
        """The sentences under each key of one JSON object; a plain string is one sentence."""
        import orjson

        found = orjson.loads(line)  # its error is a ValueError, for broken UTF-8 and deep nesting too
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        return [_sentences(found, key) for key in self.keys]

    def _documents(self, documents: Sequence[Sequence[str]], tokenizer: Tokenizer) -> Documents:
        """Tokenise documents of sentences; sentences without a token are dropped, then eod is appended."""
        ids, offsets = tokenizer.encode_batch([text for sentences in documents for text in sentences])
        lengths = np.diff(offsets)
        owners = np.repeat(np.arange(len(documents)), [len(sentences) for sentences in documents])
        lengths, owners = lengths[lengths > 0], owners[lengths > 0]
        counts = np.bincount(owners, minlength=len(documents))
        if self.eod is not None and len(lengths):
            lasts = np.flatnonzero(np.diff(owners, append=-1))  # the last sentence of each document that has one
            ids = np.insert(ids, np.cumsum(lengths)[lasts], self.eod)
            lengths[lasts] += 1
        limit = np.iinfo(self.dtype).max
        if ids.max(initial=0) > limit:
            raise ValueError(f"token id {ids.max()} is above {limit}, the largest that {self.dtype} holds")
        return Documents(ids.astype(self.dtype), lengths, counts)


def _sentences(found: dict[str, Any], key: str) -> list[str]:
    if key not in found:
        raise ValueError(f'no key "{key}"; there are {", ".join(map(repr, found)) or "none"}')
    value = found[key]
    sentences = [value] if isinstance(value, str) else value
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError(f'"{key}" is neither a string nor a list of strings')
    return sentences


def _joined(parts: Sequence[Documents]) -> Documents:
    """Documents one behind another."""
    columns = zip(*parts, strict=True) if parts else ([], [], [])
    ids, lengths, counts = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
    return Documents(ids, lengths, counts)


Encoded = tuple[Block, list[Documents], list[str]]

_worker: tuple[Tokenizer, _Job]  # of this process, if it is a worker


def _start_worker(tokenizer: Mapping[str, Any], job: _Job) -> None:
    global _worker
    _worker = build(**tokenizer), job


def _encode_in_worker(block: Block) -> tuple[list[Documents], list[str]]:
    tokenizer, job = _worker
    return job.encode(block, tokenizer)


def _encoded(
    blocks: Iterable[Block], made: Tokenizer, tokenizer: Mapping[str, Any], job: _Job, workers: int
) -> Generator[Encoded]:
    """Every block with its documents, in the order of the input."""
    if workers == 1:
        for block in blocks:
            yield (block, *job.encode(block, made))
        return
    under_way: deque[tuple[Block, Future[tuple[list[Documents], list[str]]]]] = deque()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_start_worker, initargs=(dict(tokenizer), job)
        ) as pool,
    ):
        try:
            for block in blocks:
                under_way.append((block, pool.submit(_encode_in_worker, block)))
                if len(under_way) > 2 * workers:
                    done, future = under_way.popleft()
                    yield (done, *future.result())
            while under_way:
                done, future = under_way.popleft()
                yield (done, *future.result())
        except BrokenProcessPool:
            raise ChildProcessError("a worker was killed, perhaps for lack of memory; nothing was written") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers that start inside run their libraries on one thread: the processes are the parallelism."""
    names = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
