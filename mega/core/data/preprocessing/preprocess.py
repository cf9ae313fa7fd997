"""Convert text to token files, for `mega preprocess`.

    1 read    the parent cuts the input into blocks of whole lines
    2 encode  each worker parses and tokenizes a block into arrays
    3 write   the parent writes the blocks in input order, so that the files do not depend on the number of workers
    4 save    with `resume`, progress is saved every few seconds, and a later call continues from it

Only a few blocks per worker are in flight, so memory does not grow with the input. This module does not depend on the
command line.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset, bin_path, exists, token_dtype
from mega.core.data.preprocessing.provenance import existing_pairs, stamps, work_of
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.data.sources import (
    STDIN,
    BadLine,
    LineBlock,
    SourcePiece,
    blocks,
    describe_keys,
    describe_value,
    find,
    parsed,
    pieces,
)
from mega.core.data.workers import Buffer, Workers
from mega.core.files import check_folder, whole_file
from mega.core.text.build import build, made_by
from mega.core.text.sentences import splitter
from mega.core.text.special import Spelled
from mega.core.text.tokenizer import Tokenizer, flatten
from mega.core.untrusted import Json, parse_json, read_limited

OnError = Literal["stop", "skip"]

_LISTED = 100  # number of skipped lines to report in detail; further lines are only counted
_BATCH_BYTES = 1 << 17  # size in bytes of the lines that are parsed and tokenized together
_NOTES_BYTES = 1 << 24
_EMPTY_LINES = re.compile(rb"\n+")


NO_END = (
    "documents have no end (no --append-eod): a model that is trained on them neither learns where a text ends nor "
    "sees where another begins"
)


class Documents(NamedTuple):
    """Tokenized documents: the arguments of `IndexedWriter.extend`."""

    ids: NDArray[np.integer]
    """Concatenated ids of all documents."""
    lengths: NDArray[np.int64]
    """Number of tokens in each sequence."""
    counts: NDArray[np.int64]
    """Number of sequences in each document."""


@dataclass
class Report:
    """Statistics of the work so far. documents + skipped is the number of input lines that are not blank."""

    documents: int = 0  # Number of documents written
    tokens: int = 0  # Number of tokens written
    bytes: int = 0  # Size in bytes of the processed lines
    skipped: int = 0  # Number of lines without a document
    kept: bool = False  # Whether the work was already done, so that nothing was written
    reasons: list[str] = field(default_factory=list)  # Location and reason of the first skipped lines
    outputs: list[str] = field(default_factory=list)  # Prefixes of the output pairs
    notes: list[str] = field(default_factory=list)  # Messages for the user
    spelled: int = 0  # Number of documents whose text contains the name of a special token
    spells: str | None = None  # Name of such a special token, as an example

    def add(self, block: EncodedBlock, reasons: Sequence[str], size: int) -> None:
        """Add a block of `size` bytes to all counts except the count of tokens."""
        self.documents += len(block.documents[0].counts)
        self.bytes += size
        self.skipped += block.skipped
        self.spelled += block.spelled
        self.spells = self.spells or block.spells
        self.reasons += reasons[: _LISTED - len(self.reasons)]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Options for splitting documents into sentences; see `text.sentences.splitter`."""

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
    parse_special_tokens: bool = False,
    workers: int = 1,
    on_error: OnError = "stop",
    text_lines: bool = False,
    sentences: Sentences | None = None,
    shard: tuple[int, int] = (0, 1),
    resume: bool = False,
    overwrite: bool = False,
    save_every: float = 5.0,
    progress: Callable[[Report, int], None] | None = None,
) -> Report:
    """Tokenize `inputs` into `<output_prefix>_<key>_document.bin/.idx`, a pair of files per key.

    inputs: files, folders, globs or "-" (see `sources.find`) with JSON lines (also .gz .zst .xz .bz2), parquet or
        arrow. A .txt file is one document under the key "text"; with `text_lines`, each of its lines is a document.
    tokenizer: the fields of the configuration's tokenizer section, as arguments of `text.build.build`.
    append_eod: append the end-of-document id to every document that has at least one token.
    parse_special_tokens: parse names of special tokens in texts as these tokens. If False, the names are plain text.
    sentences: split texts into sentences first. The files are then `<output_prefix>_<key>_sentence`.
    shard: (i, n) with i in 0 .. n - 1: process only shard i of n of the input. `merge` joins the output of all shards.
    resume: save the state every `save_every` seconds, and continue from the state of an earlier call, if any.
    overwrite: replace token files made from other inputs or settings; if False, raise ValueError.
    progress: called after every block with the report so far and the number of bytes read from the input files.
    Raises ValueError naming the flag, or file and line, in which case no output file is created.
    """
    check_folder("--output-prefix", output_prefix, Path(output_prefix).parent)
    built_tokenizer = build(**tokenizer)
    eod = _checked_eod(built_tokenizer, append_eod)
    built_tokenizer.encode("")  # load the tokenizer here first, so that problems with its files are reported once
    paths = find(inputs)
    _check(workers, json_keys, sentences, in_parts=STDIN in paths and (resume or shard != (0, 1)))
    level = "document" if sentences is None else "sentence"
    report = Report(
        outputs=[f"{output_prefix}_{key}_{level}" for key in json_keys],
        notes=_warnings(built_tokenizer, tokenizer, eod, sentences),
    )
    dtype = token_dtype(built_tokenizer.vocab_size)
    job = _Job(tuple(json_keys), eod, dtype, sentences, parse_special_tokens)
    work = job.described | {"dtype": str(dtype), "shard": shard, "text_lines": text_lines, "on_error": on_error}
    identity = [work, built_tokenizer.fingerprint(), stamps(paths)]
    provenance: dict[str, Any] = {**made_by(built_tokenizer, tokenizer), "work": work_of(identity[:2], paths)}
    notes = _Notes(Path(f"{output_prefix}.resume.json"), identity, save_every) if resume else None
    saved = notes.load() if notes else None
    if saved and saved["finished"] and all(_published(prefix) for prefix in report.outputs):
        assert notes is not None
        notes.drop()
        return Report(**saved["report"])
    if not saved and (kept_outputs := existing_pairs(output_prefix, report.outputs, provenance["work"], overwrite)):
        return existing_report(report, kept_outputs)
    states = saved["writers"] if saved else [None] * len(report.outputs)
    begin, line = (Begin(**saved["begin"]), saved["line"]) if saved else (Begin(), 0)
    if saved:
        report = Report(**saved["report"])

    with contextlib.ExitStack() as open_files:
        encoded = open_files.enter_context(_encoders(built_tokenizer, tokenizer, job, workers))
        writers = [
            open_files.enter_context(IndexedWriter(prefix, dtype, keep=resume, state=state, noted=provenance))
            for prefix, state in zip(report.outputs, states, strict=True)
        ]
        read = _blocks(pieces(paths, shard, text_lines=text_lines), json_keys, text_lines, begin)
        for (block, after), encoded_block in encoded(read):
            if after.piece != begin.piece:
                line = 0
            reasons = [f"{block.name}:{line + number}: {reason}" for number, reason in encoded_block.reasons]
            if reasons and on_error == "stop":
                raise BadLine(reasons[0])
            for writer, part in zip(writers, encoded_block.documents, strict=True):
                writer.extend(*part)
            report.add(encoded_block, reasons, block.size)
            report.tokens = sum(writer.tokens for writer in writers)
            begin, line = after, line + encoded_block.lines
            if notes and notes.due():
                notes.save(writers, begin, line, report)
            if progress:
                progress(report, block.read)
        if not report.documents and shard == (0, 1):
            raise ValueError(f"--input {' '.join(map(str, inputs))}: holds no document")
        if notes:
            notes.save(writers, begin, line, report, finished=True)
        _complete(report, built_tokenizer, writers)
    if notes:
        notes.drop()
    return report


def _warnings(
    tokenizer: Tokenizer, options: Mapping[str, Any], eod: int | None, sentences: Sentences | None
) -> list[str]:
    """Return warnings about a tokenizer whose type its files determine, missing end-of-document tokens, a --vocab-size
    without effect, a tokenizer that may be of the wrong type, and a tokenizer that loses text."""
    warnings = [NO_END] if eod is None and tokenizer.eod is not None and sentences is None else []
    if options.get("tokenizer") is None:
        warnings.insert(0, f"without --tokenizer, the given files are read as {tokenizer.kind}")
    if (size := options.get("vocab_size")) is not None and tokenizer.kind != "NullTokenizer":
        warnings.append(f"--vocab-size {size}: changes nothing, {tokenizer.kind} has {tokenizer.vocab_size} tokens")
    return [*warnings, *(note for note in (tokenizer.doubt(), tokenizer.text_loss()) if note is not None)]


def _complete(report: Report, tokenizer: Tokenizer, writers: Sequence[IndexedWriter]) -> None:
    """Record the number of skipped lines, and report ids that are too large for the vocabulary (for example, the
    vocabulary of a NullTokenizer with a small `vocab_size`)."""
    for writer in writers:
        writer.noted["skipped"] = report.skipped
    largest, size = max((writer.largest for writer in writers), default=0), tokenizer.vocab_size
    if largest >= size:
        report.notes.append(
            f"ids go up to {largest}, {tokenizer.kind} has {size}: a model of that size is refused them"
        )


def existing_report(report: Report, pairs: Sequence[IndexedDataset]) -> Report:
    """Fill `report` from existing pairs of files, for work that is already done."""
    report.documents, report.tokens = pairs[0].documents, sum(len(data.tokens) for data in pairs)
    report.skipped, report.kept = int(pairs[0].note.get("skipped", 0)), True
    return report


def _check(workers: int, json_keys: Sequence[str], sentences: Sentences | None, *, in_parts: bool) -> None:
    """Check the arguments. in_parts: whether --resume or --shard is given for standard input, which is an error."""
    if workers < 1:
        raise ValueError(f"--workers {workers}: must be at least 1")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise ValueError(f"--json-keys {' '.join(json_keys)}: must be one or more different keys")
    if in_parts:
        raise ValueError("--input -: standard input cannot be combined with --resume or --shard")
    if sentences is not None:
        splitter(sentences.splitter, sentences.language)  # raises ValueError if the splitter is not installed


def _checked_eod(tokenizer: Tokenizer, append_eod: bool) -> int | None:
    if append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: {tokenizer.kind} has no end-of-document token")
    return tokenizer.eod if append_eod else None


# --- 1 read ---------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """A position in the input."""

    piece: int = 0
    """Index of the current piece of the input (see `sources.pieces`)."""
    done: int = 0
    """Number of finished units in the piece; see `sources.blocks`."""


class Read(NamedTuple):
    """A block, and the input position after the block."""

    block: LineBlock
    after: Begin

    @property
    def size(self) -> int:
        return self.block.size


def _blocks(inputs: Sequence[SourcePiece], keys: Sequence[str], text_lines: bool, begin: Begin) -> Iterator[Read]:
    """Yield the blocks of every piece in order, starting at `begin`."""
    units_done = begin.done
    for number, piece in enumerate(inputs[begin.piece :], begin.piece):
        for block in blocks(piece, keys, text_lines=text_lines, done=units_done):
            yield Read(block, Begin(number, block.done))
        units_done = 0


# --- 2 encode -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """The settings with which workers encode blocks."""

    keys: tuple[str, ...]  # Keys of the texts
    eod: int | None  # Id to append to documents, or None
    dtype: np.dtype[np.integer]  # Type of the stored ids
    sentences: Sentences | None  # Sentence splitting, or None
    parse: bool = False  # Whether to parse names of special tokens

    @property
    def described(self) -> dict[str, Json]:
        """Return the settings to record for `resume`. `parse` is omitted if False, so that records of earlier versions
        stay valid."""
        return {name: value for name, value in asdict(self).items() if name != "parse" or value}

    def worker(self, tokenizer: Tokenizer) -> _Worker:
        options = self.sentences
        split = splitter(options.splitter, options.language, options.keep_newlines) if options else None
        return _Worker(self, tokenizer, split, Spelled(tokenizer.special_tokens()))


class EncodedBlock(NamedTuple):
    """The result of encoding a block."""

    documents: list[Documents]  # One `Documents` per key
    lines: int  # Number of lines in the block
    skipped: int  # Number of lines without a document
    reasons: list[tuple[int, str]]  # Line number within the block and reason, for the first skipped lines
    spelled: int = 0  # Number of documents that contain the name of a special token
    spells: str | None = None  # Name of such a special token, as an example

    def with_ids(self, ids: Sequence[NDArray[np.integer]]) -> EncodedBlock:
        """Return the same block with new ids, one array per key."""
        documents = [part._replace(ids=key_ids) for part, key_ids in zip(self.documents, ids, strict=True)]
        return self._replace(documents=documents)


class _Batch(NamedTuple):
    """Consecutive documents for one call of the tokenizer."""

    lines: list[int]
    """Line number of each document."""
    texts: list[list[list[str]]]
    """[document][key][sentence]."""


@dataclass(frozen=True)
class _Worker:
    """An encoding job with its tokenizer and sentence splitter."""

    job: _Job  # Settings
    tokenizer: Tokenizer  # The tokenizer
    split: Callable[[str], list[str]] | None  # Function that splits a text into sentences, or None
    special: Spelled  # Finds names of special tokens

    def load(self) -> _Worker:
        """Load the tokenizer's library by encoding a text."""
        self.tokenizer.encode_batch([""])
        return self

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode a block. Raises ValueError if the file of the block cannot be read."""
        text = block.lines()
        lines = text.count(b"\n") + (not text.endswith(b"\n") and bool(text))
        bad: list[tuple[int, str]] = []
        spelled_names: list[str] = []
        parts = [part for batch in self._batches(text, lines, bad, spelled_names) for part in self._parts(batch, bad)]
        if block.problem:
            lines += 1
            bad.append((lines, block.problem))
        documents = [self._finished([part[k] for part in parts]) for k in range(len(self.job.keys))]
        return EncodedBlock(
            documents, lines, len(bad), sorted(bad)[:_LISTED], len(spelled_names), next(iter(spelled_names), None)
        )

    def _batches(self, text: bytes, lines: int, bad: list[tuple[int, str]], names: list[str]) -> Iterator[_Batch]:
        """Yield the documents in batches that are small enough for the processor's cache."""
        view, begin, stop, batch = memoryview(text), 0, _BATCH_BYTES, _Batch([], [])
        number = 0
        while number < lines:
            number += 1
            if empty := _EMPTY_LINES.match(text, begin):  # a file may contain millions of empty lines
                number, begin = number + len(empty[0]) - 1, empty.end()
                continue
            end = text.find(b"\n", begin)
            line = view[begin : end if end >= 0 else None]
            try:
                texts = self._texts(parsed(line))
                batch.texts.append(texts)
                batch.lines.append(number)
                names += islice(filter(None, (self.special.first_in(each) for column in texts for each in column)), 1)
            except ValueError as error:
                if line and not bytes(line).isspace():
                    bad.append((number, str(error)))
            begin = end + 1
            if begin >= stop:
                yield batch
                batch, stop = _Batch([], []), begin + _BATCH_BYTES
        yield batch

    def _texts(self, document: object) -> list[list[str]]:
        """Return the sentences under each key of a line. Without a sentence splitter, each string is one sentence."""
        if not isinstance(document, dict):
            raise ValueError(f"not a JSON object; {describe_value(document)}")
        columns = [_sentences(document, key) for key in self.job.keys]
        if self.split is None:
            return columns
        return [[part for sentence in column for part in self.split(sentence)] for column in columns]

    def _parts(self, batch: _Batch, bad: list[tuple[int, str]]) -> list[list[Documents]]:
        """Tokenize a batch in one call. If the tokenizer rejects a text, tokenize each document separately instead."""
        try:
            return [[self._documents([texts[k] for texts in batch.texts]) for k in range(len(self.job.keys))]]
        except ValueError as error:
            if len(batch.lines) == 1:
                bad.append((batch.lines[0], str(error)))
                return []
        singly = (_Batch([line], [texts]) for line, texts in zip(*batch, strict=True))
        return [part for one in singly for part in self._parts(one, bad)]

    def _documents(self, documents: Sequence[Sequence[str]]) -> Documents:
        """Tokenize documents, each a list of sentences."""
        texts = [text for sentences in documents for text in sentences]
        ids, offsets = (
            flatten(list(map(self.tokenizer.encode_special, texts)))
            if self.job.parse
            else (self.tokenizer.encode_batch(texts))
        )
        limit = np.iinfo(self.job.dtype).max
        if len(ids) and (largest := int(ids.max())) > limit:
            raise ValueError(f"token id {largest} is above {limit}, the largest that {self.job.dtype} holds")
        counts = np.array([len(sentences) for sentences in documents], np.int64)
        return Documents(ids, np.diff(offsets), counts)

    def _finished(self, parts: Sequence[Documents]) -> Documents:
        """Concatenate all parts in order. Empty sentences are dropped before eod is appended."""
        empty_part = Documents(np.zeros(0, self.job.dtype), np.zeros(0, np.int64), np.zeros(0, np.int64))
        columns = zip(empty_part, *parts, strict=True)
        ids, lengths, counts = (np.concatenate(c, dtype=c[0].dtype, casting="unsafe") for c in columns)
        owners = np.repeat(np.arange(len(counts)), counts)
        lengths, owners = lengths[lengths > 0], owners[lengths > 0]
        counts = np.bincount(owners, minlength=len(counts))
        if self.job.eod is not None and len(lengths):
            lasts = np.flatnonzero(np.diff(owners, append=-1))  # the last sentence of each document that has sentences
            ids = np.insert(ids, np.cumsum(lengths)[lasts], self.job.eod)
            lengths[lasts] += 1
        return Documents(ids, lengths, counts)


def encoder(tokenizer: Tokenizer, *, append_eod: bool) -> Callable[[Sequence[str]], Documents]:
    """Return a function that converts texts to documents like those of `preprocess`, for other programs' pipelines."""
    job = _Job(("text",), _checked_eod(tokenizer, append_eod), token_dtype(tokenizer.vocab_size), None)
    worker = job.worker(tokenizer)
    return lambda texts: worker._finished([worker._documents([[text] for text in texts])])


def _sentences(document: dict[str, object], key: str) -> list[str]:
    value = document.get(key)
    if isinstance(value, str):
        return [value]
    if key not in document:
        raise ValueError(f'no key "{key}"; {describe_keys(document, "--json-keys")}')
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise ValueError(f'"{key}" is neither a string nor a list of strings')
    return value


class WorkerResult(NamedTuple):
    """The result that a worker sends to the parent."""

    found: EncodedBlock
    """The encoded block, without ids if the ids are in the shared buffer."""
    inside: list[int]
    """Number of ids per key in the shared buffer, which contains the concatenated ids of all keys. The list is empty if
    the buffer is too small; `found` then contains the ids."""


def _encode_into(worker: _Worker, read: Read, buffer: Buffer) -> WorkerResult:
    """Encode a block in a worker, and put the block's ids into the buffer."""
    encoded = worker.encode(read.block)
    ids = [part.ids for part in encoded.documents]
    if not buffer or sum(part.nbytes for part in ids) > len(buffer):
        return WorkerResult(encoded, [])
    id_counts = [len(part) for part in ids]
    np.concatenate(ids, out=np.frombuffer(buffer, ids[0].dtype)[: sum(id_counts)])
    return WorkerResult(encoded.with_ids([part[:0] for part in ids]), id_counts)


def _ids_from_buffer(handed: WorkerResult, buffer: Buffer) -> EncodedBlock:
    """Restore, in the parent, the result that `_encode_into` returned in a worker. The ids are valid only until the
    buffer is overwritten."""
    encoded, id_counts = handed
    if not id_counts:
        return encoded
    ids = np.frombuffer(buffer, encoded.documents[0].ids.dtype)
    return encoded.with_ids(np.split(ids[: sum(id_counts)], np.cumsum(id_counts)[:-1]))


def _spawned_worker(tokenizer: Mapping[str, Any], job: _Job) -> Callable[[Read, Buffer], WorkerResult]:
    return partial(_encode_into, job.worker(build(**tokenizer)))


@contextlib.contextmanager
def _encoders(
    local_tokenizer: Tokenizer, tokenizer: Mapping[str, object], job: _Job, workers: int
) -> Iterator[Callable[[Iterator[Read]], Iterator[tuple[Read, EncodedBlock]]]]:
    """Context manager that provides a function. The function yields every block with its result, in input order."""
    local_worker = job.worker(local_tokenizer)
    if workers == 1:
        local_worker.load()
        yield lambda read: ((block_read, local_worker.encode(block_read.block)) for block_read in read)
        return
    pool = Workers(
        workers, here=lambda: partial(_encode_into, local_worker.load()), there=partial(_spawned_worker, tokenizer, job)
    )
    with pool:
        yield lambda read: (
            (block_read, _ids_from_buffer(handed, buffer)) for block_read, handed, buffer in pool.answers(read)
        )


# --- 4 save ---------------------------------------------------------------------------------------------------------


class _Notes:
    """Saved progress, in one file next to the output. The file is replaced atomically.

    identity: all inputs and settings on which the output depends. Saved progress with a different identity is rejected.
    """

    def __init__(self, path: Path, identity: object, every: float) -> None:
        self._path, self._every = path, every
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        if not os.path.lexists(self._path):
            return None
        try:
            state = parse_json(read_limited(self._path, _NOTES_BYTES, str(self._path)), str(self._path))
        except ValueError as error:
            raise ValueError(f"{error}; remove it to start over") from None
        if not isinstance(state, dict) or state.get("identity") != self._identity:
            raise ValueError(
                f"--resume: {self._path} belongs to work with other inputs, options or tokenizer; "
                "repeat its command line, or remove the file to start over"
            )
        if not _is_note(state):
            raise ValueError(f"{self._path}: is not a note of how far the work has come; remove it to start over")
        return dict(state)

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._every

    def save(
        self, writers: Sequence[IndexedWriter], begin: Begin, line: int, report: Report, *, finished: bool = False
    ) -> None:
        """Save the progress. line: number of finished lines in the piece."""
        state = {
            "identity": self._identity,
            "finished": finished,
            "begin": begin._asdict(),
            "line": line,
            "report": asdict(report),
            "writers": [writer.state() for writer in writers],
        }
        with whole_file(self._path) as file:
            file.write(json.dumps(state).encode())
        self._last = time.monotonic()

    def drop(self) -> None:
        """Remove the saved progress, and temporary files of killed processes."""
        self._path.unlink(missing_ok=True)
        for stale in self._path.parent.glob(f"{glob.escape(self._path.name)}.*.tmp"):
            stale.unlink(missing_ok=True)


def _is_note(state: dict[str, Any]) -> bool:
    """Whether an object has the structure that `_Notes.save` writes."""
    try:
        report, begin = Report(**state["report"]), Begin(**state["begin"])
        counts = [*begin, state["line"], report.documents, report.tokens, report.bytes, report.skipped]
        for writer in state["writers"]:
            counts += [writer["tokens"], writer["sequences"], writer["documents"], *(writer["range"] or ())]
    except (KeyError, TypeError):
        return False
    are_valid = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
    return are_valid and type(state.get("finished")) is bool and len(state["writers"]) == len(report.outputs)


def _published(prefix: str) -> bool:
    """Whether the pair at `prefix` is finished: it exists, and its temporary files, which are removed last, do not."""
    return exists(prefix) and not Path(f"{bin_path(prefix)}.tmp").exists()
