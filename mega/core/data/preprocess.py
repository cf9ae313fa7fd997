"""From text to token files: what `mega preprocess` does.

    1 read    the parent cuts the input into blocks of whole lines
    2 encode  workers parse and tokenise a block each, straight into arrays
    3 write   the parent writes the blocks in the order of the input: the bytes do not depend on the workers
    4 note    every few seconds, where asked, how far it has come: `resume` goes on from there after any end

No more than a few blocks per worker are under way, so memory does not grow with the input. It knows no
command line.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import bin_path, exists, token_dtype
from mega.core.data.sources import STDIN, BadLine, Block, Piece, blocks, find, pieces
from mega.core.data.writer import IndexedWriter
from mega.core.files import whole_file
from mega.core.text.build import build
from mega.core.text.sentences import splitter
from mega.core.text.tokenizer import Tokenizer

OnError = Literal["stop", "skip"]

_LISTED = 100  # skipped lines that are named; the others are counted
_BYTES_UNDER_WAY = 64 << 20


class Documents(NamedTuple):
    """Many tokenised documents in the form in which they are written: see `IndexedWriter.extend`."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass
class Report:
    """What was done so far. documents + skipped = lines of the input that are not blank."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """How documents are cut into sentences: see `text.sentences.splitter`."""

    splitter: str = "punkt"
    language: str = "english"
    keep_newlines: bool = False


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str,
    tokenizer: Mapping[str, Any],
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    on_error: OnError = "stop",
    text_lines: bool = False,
    sentences: Sentences | None = None,
    shard: tuple[int, int] = (0, 1),
    resume: bool = False,
    save_every: float = 5.0,
    progress: Callable[[Report, int], None] | None = None,
) -> Report:
    """Tokenise `inputs` into `<output_prefix>_<key>_document.bin/.idx`, a pair of files per key.

    inputs: files, folders, globs or "-", see `sources.find`. JSON lines, also in .gz, .zst or .xz; parquet; arrow;
        a .txt file is one document under the key "text", or with `text_lines` each of its lines is.
    tokenizer: the fields of the configuration's tokenizer section, as `text.tokenizer.build` takes them.
    append_eod: put the end-of-document id behind every document that has a token.
    sentences: cut every text into sentences first; the files are then called `<output_prefix>_<key>_sentence`.
    shard: (i, n), i of 0 .. n - 1: only this part of the input; `merge` of all parts in order is the whole.
    resume: note the state every `save_every` seconds and go on from a former call's, whatever ended it.
    progress: called after every block with the report so far and the bytes read of the input files.
    Raises ValueError naming flag, or file and line; then nothing appears under the output names.
    """
    made = build(**tokenizer)
    eod = _checked_eod(made, append_eod)
    if workers < 1:
        raise ValueError(f"--workers {workers}: must be at least 1")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ValueError(f"--json-keys {' '.join(json_keys)}: must be one or more different keys")
    paths = find(inputs)
    if STDIN in paths and (resume or shard != (0, 1)):
        raise ValueError("--input -: standard input cannot stand beside --resume or --shard")
    if sentences is not None:
        splitter(sentences.splitter, sentences.language)  # is it there?

    level = "document" if sentences is None else "sentence"
    report = Report(outputs=[f"{output_prefix}_{key}_{level}" for key in json_keys])
    dtype = token_dtype(made.vocab_size)
    job = _Job(tuple(json_keys), eod, dtype, on_error == "skip", sentences)
    identity = [asdict(job) | {"dtype": str(dtype)}, made.fingerprint(), _stamps(paths), list(shard), text_lines]
    notes = _Notes(Path(f"{output_prefix}.resume.json"), identity, save_every) if resume else None
    saved = notes.load() if notes else None
    if saved and saved["finished"] and all(_published(prefix) for prefix in report.outputs):
        assert notes is not None
        notes.drop()
        return Report(**saved["report"])
    states = saved["writers"] if saved else [None] * len(report.outputs)
    begin = Begin(**saved["begin"]) if saved else Begin()
    if saved:
        report = Report(**saved["report"])

    with contextlib.ExitStack() as open_now:
        writers = [
            open_now.enter_context(IndexedWriter(prefix, dtype, keep=resume, state=state))
            for prefix, state in zip(report.outputs, states, strict=True)
        ]
        read = _blocks(pieces(paths, shard), json_keys, text_lines, begin)
        encoded = open_now.enter_context(contextlib.closing(_encoded(read, made, tokenizer, job, workers)))
        for (block, begin), documents, reasons in encoded:
            for writer, part in zip(writers, documents, strict=True):
                writer.extend(*part)
            report.documents += len(documents[0].counts)
            report.tokens = sum(writer.tokens for writer in writers)
            report.bytes += len(block.text)
            report.skipped += len(reasons)
            report.reasons += reasons[: _LISTED - len(report.reasons)]
            if notes and notes.due():
                notes.save(writers, begin, report)
            if progress:
                progress(report, block.read)
        if not report.documents and shard == (0, 1):
            raise ValueError(f"--input {' '.join(map(str, inputs))}: holds no document")
        if notes:
            notes.save(writers, begin, report, finished=True)
    if notes:
        notes.drop()
    return report


def _checked_eod(tokenizer: Tokenizer, append_eod: bool) -> int | None:
    if append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: {tokenizer.kind} has no end-of-document token")
    return tokenizer.eod if append_eod else None


# --- 1 read ---------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Where reading begins: the piece, how much of it is done, and the number of its next line."""

    piece: int = 0
    done: int = 0
    line: int = 1


Read = tuple[Block, Begin]
"""A block, and where reading goes on behind it."""


def _blocks(found: Sequence[Piece], keys: Sequence[str], text_lines: bool, begin: Begin) -> Iterator[Read]:
    """The blocks of every piece, in order, from `begin` on."""
    _, done, line = begin
    for number, piece in enumerate(found[begin.piece :], begin.piece):
        for block in blocks(piece, keys, text_lines=text_lines, done=done, line=line):
            next_line = block.first_line + block.lines + (block.problem is not None)
            yield block, Begin(number, block.done, next_line)
        done, line = 0, 1


# --- 2 encode -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What every worker does with every block."""

    keys: tuple[str, ...]
    eod: int | None
    dtype: np.dtype[Any]
    skip: bool
    sentences: Sentences | None

    def worker(self, tokenizer: Tokenizer) -> _Worker:
        cut = self.sentences
        split = splitter(cut.splitter, cut.language, cut.keep_newlines) if cut else _whole
        return _Worker(self, tokenizer, split)


def _whole(text: str) -> list[str]:
    return [text]


@dataclass(frozen=True)
class _Worker:
    """A job and its tools."""

    job: _Job
    tokenizer: Tokenizer
    split: Callable[[str], list[str]]

    def encode(self, block: Block) -> tuple[list[Documents], list[str]]:
        """A `Documents` per key, and why lines were skipped. Raises BadLine where none may be."""
        numbers: list[int] = []
        texts: list[list[list[str]]] = []  # [document][key][sentence]
        reasons: list[str] = []
        for number, line in enumerate(block.text.split(b"\n"), block.first_line):
            if not line or line.isspace():
                continue
            try:
                texts.append(self._texts(line))
                numbers.append(number)
            except ValueError as error:
                reasons.append(self._bad(block, number, error))
        if block.problem:
            reasons.append(self._bad(block, block.first_line + block.lines, ValueError(block.problem)))
        try:
            return self._per_key(texts), reasons
        except ValueError:  # the tokenizer refuses a text: find it, one by one
            parts: list[list[Documents]] = []
            for number, text in zip(numbers, texts, strict=True):
                try:
                    parts.append(self._per_key([text]))
                except ValueError as error:
                    reasons.append(self._bad(block, number, error))
            return [_joined([part[k] for part in parts]) for k in range(len(self.job.keys))], reasons

    def _per_key(self, texts: Sequence[Sequence[Sequence[str]]]) -> list[Documents]:
        return [self._documents([text[k] for text in texts]) for k in range(len(self.job.keys))]

    def _bad(self, block: Block, number: int, error: ValueError) -> str:
        reason = f"{block.name}:{number}: {error}"
        if not self.job.skip:
            raise BadLine(reason) from None
        return reason

    def _texts(self, line: bytes) -> list[list[str]]:
        """The sentences under each key of one JSON object; a plain string is one, unless it is to be cut."""
        import orjson

        found = orjson.loads(line)  # its error is a ValueError, for broken UTF-8 and deep nesting too
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        return [[part for sentence in _sentences(found, key) for part in self.split(sentence)] for key in self.job.keys]

    def _documents(self, documents: Sequence[Sequence[str]]) -> Documents:
        """Tokenise documents of sentences; sentences without a token are dropped, then eod is appended."""
        ids, offsets = self.tokenizer.encode_batch([text for sentences in documents for text in sentences])
        lengths = np.diff(offsets)
        owners = np.repeat(np.arange(len(documents)), [len(sentences) for sentences in documents])
        lengths, owners = lengths[lengths > 0], owners[lengths > 0]
        counts = np.bincount(owners, minlength=len(documents))
        if self.job.eod is not None and len(lengths):
            lasts = np.flatnonzero(np.diff(owners, append=-1))  # the last sentence of each document that has one
            ids = np.insert(ids, np.cumsum(lengths)[lasts], self.job.eod)
            lengths[lasts] += 1
        limit = np.iinfo(self.job.dtype).max
        if ids.max(initial=0) > limit:
            raise ValueError(f"token id {ids.max()} is above {limit}, the largest that {self.job.dtype} holds")
        return Documents(ids.astype(self.job.dtype), lengths, counts)


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


Encoded = tuple[Read, list[Documents], list[str]]

_worker: _Worker  # of this process, if it is a worker


def _start_worker(tokenizer: Mapping[str, Any], job: _Job) -> None:
    global _worker
    _worker = job.worker(build(**tokenizer))


def _encode_in_worker(block: Block) -> tuple[list[Documents], list[str]]:
    return _worker.encode(block)


def _encoded(
    read: Iterator[Read], made: Tokenizer, tokenizer: Mapping[str, Any], job: _Job, workers: int
) -> Generator[Encoded]:
    """Every block with its documents, in the order of the input."""
    if workers == 1:
        alone = job.worker(made)
        for block, after in read:
            yield ((block, after), *alone.encode(block))
        return
    under_way: deque[tuple[Read, Future[tuple[list[Documents], list[str]]]]] = deque()
    held = 0
    with (
        _one_thread_each(),
        ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_start_worker, initargs=(dict(tokenizer), job)
        ) as pool,
    ):
        try:
            for block, after in read:
                under_way.append(((block, after), pool.submit(_encode_in_worker, block)))
                held += len(block.text)
                while len(under_way) > 3 * workers or (held > _BYTES_UNDER_WAY and under_way):
                    done, future = under_way.popleft()
                    held -= len(done[0].text)
                    yield (done, *future.result())
            while under_way:
                done, future = under_way.popleft()
                yield (done, *future.result())
        except BrokenProcessPool:
            raise ChildProcessError("a worker was killed, perhaps for lack of memory; nothing was published") from None
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


# --- 4 note ---------------------------------------------------------------------------------------------------------


class _Notes:
    """How far the work has come, in one file beside the output that is whole at every moment.

    identity: all that the output depends on; another call's notes are refused.
    """

    def __init__(self, path: Path, identity: Any, every: float) -> None:
        self._path, self._every = path, every
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self._path}: damaged ({error}); remove it to start anew") from None
        if found.get("identity") != self._identity:
            raise ValueError(
                f"--resume: {self._path} belongs to work with other inputs, options or tokenizer; "
                "repeat its command line, or remove the file to start anew"
            )
        return found

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._every

    def save(self, writers: Sequence[IndexedWriter], begin: Begin, report: Report, *, finished: bool = False) -> None:
        state = {
            "identity": self._identity,
            "finished": finished,
            "begin": begin._asdict(),
            "report": asdict(report),
            "writers": [writer.state() for writer in writers],
        }
        with whole_file(self._path) as file:
            file.write(json.dumps(state).encode())
        self._last = time.monotonic()

    def drop(self) -> None:
        """The work is done: nothing stays, not even what a killed process had half written."""
        self._path.unlink(missing_ok=True)
        for stale in self._path.parent.glob(f"{glob.escape(self._path.name)}.*.tmp"):
            stale.unlink(missing_ok=True)


def _published(prefix: str) -> bool:
    """Whether a finished writer's pair stands under its name: it takes its own files away last."""
    return exists(prefix) and not Path(f"{bin_path(prefix)}.tmp").exists()


def _stamps(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of every input: if they are equal, so is taken to be the content."""
    found = [(path, path.stat()) for path in paths if path != STDIN]
    return [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path, status in found]


def merge(prefixes: Sequence[str], output_prefix: str) -> Report:
    """The pairs `prefixes`, one behind another, as one pair `output_prefix`: documents keep their order.

    Raises ValueError naming a pair that is damaged, or of another width than the first.
    """
    from mega.core.data.indexed import IndexedDataset

    if not prefixes:
        raise ValueError("--input: must be at least one prefix of a .bin/.idx pair")
    first = IndexedDataset(prefixes[0])
    with IndexedWriter(output_prefix, first.dtype) as writer:
        for prefix in prefixes:
            writer.append(IndexedDataset(prefix))
    return Report(documents=writer.documents, tokens=writer.tokens, outputs=[output_prefix])
