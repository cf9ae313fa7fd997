"""Read the input of `mega preprocess`: JSON lines, plain text, parquet, saved Hugging Face datasets, standard input.

Every format is read as blocks of whole JSON lines. The input is split into pieces, so that several hosts can share the
work. Reading can start at any position in a piece, so that interrupted work can be resumed. This module does not depend
on tokenizers.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from mega.core.untrusted import RAW, Confined

STDIN = Path("-")
BLOCK_BYTES = 1 << 22
MOST_LINE_BYTES = 1 << 27
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_TOO_LONG = "a line longer than {} MiB"
_NOT_TEXT = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_COLUMNS_SECONDS, _COLUMNS_BYTES = (
    100,
    2 << 30,
)  # limits on a request: seconds, and bytes of address space (at least four times the file's size)
_WINDOW_BYTES = 1 << 31  # maximum window of a Zstandard frame, as for large corpora compressed with `zstd --long=31`
_FREE_WINDOW_BYTES = 1 << 27  # a larger window is accepted only if the compression ratio is below 1024
_MOST_RATIO = 1 << 10
_XZ_BYTES = 1 << 30  # memory limit for an xz stream's dictionary and tables
_PIECE_BYTES = 1 << 18

Kind = Literal["lines", "packed lines", "text", "parquet", "arrow"]


class BadLine(ValueError):
    """Raised for a line that does not contain a document. The message names file and line."""


class Place(NamedTuple):
    """A byte range of a file."""

    path: Path
    first: int
    size: int

    def read(self) -> bytes:
        """Return the bytes in the range. Raises ValueError naming the file if it was truncated."""
        with open(self.path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.size, self.first)
        if len(data) < self.size:
            raise ValueError(f"{self.path}: has become shorter while it was read")
        return data


class LineBlock(NamedTuple):
    """Consecutive lines and, if the line after these lines is invalid, the reason."""

    name: str  # Name of the file, for use in messages
    text: bytes | Place  # Whole JSON lines, or their byte range in a file
    done: int  # Number of units of the piece (decompressed bytes, or rows) up to the block's end
    read: int  # Number of stored bytes of all files up to the block's end
    problem: str | None = None  # Reason why the line after these lines is invalid, or None

    @property
    def size(self) -> int:
        """Size of the text in bytes."""
        return self.text.size if isinstance(self.text, Place) else len(self.text)

    def lines(self) -> bytes:
        """Return the text. Raises ValueError naming the file if the file cannot be read."""
        return self.text.read() if isinstance(self.text, Place) else self.text


@dataclass(frozen=True)
class SourcePiece:
    """A part of one file: bytes `first` .. `last` of uncompressed lines, row groups of parquet, or a whole file."""

    path: Path  # The file
    kind: Kind  # Its format
    first: int  # Index of the first byte or row group
    last: int  # Index after the last byte or row group
    before: int  # Number of stored bytes of all files before this file

    @property
    def name(self) -> str:
        return f"{self.path} (from byte {self.first})" if self.kind == "lines" and self.first else str(self.path)


def find(words: Sequence[str | Path], flag: str = "--input") -> list[Path]:
    """Return the files specified by `words`, the values of `flag`: paths, globs, folders (searched recursively), or `-`
    for standard input.

    Raises ValueError naming a value that matches no file, or a file that cannot be read.
    """
    files: list[Path] = []
    for word in map(str, words):
        if word and os.path.isdir(word):
            files += _in_folder(flag, Path(word))
        elif glob.has_magic(word) and not os.path.exists(word):
            matches = [match for match in sorted(glob.glob(word, recursive=True)) if not os.path.isdir(match)]
            if not matches:
                raise ValueError(f"{flag} {word}: matches no file")
            files += [_file(flag, match) for match in matches]
        else:
            files.append(_file(flag, word))
    return files


def _file(flag: str, word: str) -> Path:
    """Return `word` as the path of a file. Errors: ValueError if the file does not exist, or is a pipe, a device or a
    linked folder."""
    path = Path(word)
    if path == STDIN or os.path.isfile(word):
        if path != STDIN and kind_of(path) in ("lines", "text"):
            _check_begin(flag, path)
        return path
    if os.path.isdir(word):
        raise ValueError(f"{flag} {word}: a link to a folder; give the folder itself")
    if os.path.exists(word):
        raise ValueError(f"{flag} {word}: a pipe or a device; must be a file, or - for standard input")
    raise ValueError(f"{flag} {word}: no such file" + (", the link leads nowhere" if os.path.islink(word) else ""))


_SIGNATURES = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst"),
    b"\xfd7zXZ": ("xz", ".xz"),
    b"BZh": ("bzip2", ".bz2"),
    b"PAR1": ("parquet", ".parquet"),
}
"""First bytes of a compressed file -> format of the file, and suffix that selects this format."""

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _check_begin(flag: str, path: Path) -> None:
    """Raise ValueError if the first bytes of a file do not match its suffix. A file that cannot be opened is reported
    only when it is read."""
    try:
        with open(path, "rb") as file:
            begin = file.read(5)
    except OSError:
        return
    suffix = path.suffix
    if suffix.lower() not in _PACKED:
        for signature, (data_format, name) in _SIGNATURES.items():
            if begin.startswith(signature):
                correct_name = f"{path}{name}" if name != ".parquet" else path.with_suffix(name)
                raise ValueError(
                    f"{flag} {path}: is {data_format} data under another name; rename it to {correct_name}"
                )
    if begin.startswith(_UTF_16):
        raise ValueError(f"{flag} {path}: is UTF-16; must be UTF-8, such as iconv -f UTF-16 -t UTF-8 makes it")


def _in_folder(flag: str, folder: Path) -> list[Path]:
    """Return the files of a folder: the arrow files of a saved Hugging Face dataset, in its order, or the sorted files
    below any other folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(str(folder / split) for split in _json(flag, folder / "dataset_dict.json")["splits"])
        raise ValueError(f"{flag} {folder}: a dataset of several splits; give one of {splits}")
    if (folder / "state.json").is_file():
        return [folder / file["filename"] for file in _json(flag, folder / "state.json")["_data_files"]]
    inside = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    files = [_file(flag, str(path)) for path in inside if not path.name.startswith(".")]
    if not files:
        raise ValueError(f"{flag} {folder}: a folder without files")
    return files


def _json(flag: str, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{flag} {path}: not JSON ({error})") from None


def kind_of(path: Path, *, text_lines: bool = False) -> Kind:
    """Return the format that a file's suffix selects. For an unknown suffix, the format is JSON lines, or plain text if
    `text_lines`."""
    suffix = path.suffix.lower()
    packed = suffix in _PACKED
    inner = Path(path.stem).suffix.lower() if packed else suffix
    if inner == ".txt" or (text_lines and inner not in _NOT_TEXT):
        return "text"
    if packed or path == STDIN:
        return "packed lines"
    return "parquet" if inner == ".parquet" else "arrow" if inner == ".arrow" else "lines"


def pieces(paths: Sequence[Path], shard: tuple[int, int] = (0, 1), *, text_lines: bool = False) -> list[SourcePiece]:
    """Return the pieces of the files that shard i of n reads. The pieces of all shards, concatenated, are the whole
    input.

    The stored bytes of all files, concatenated, are divided into n equal ranges. Uncompressed line files may be split
    at any byte (a line belongs to the range in which it begins); parquet files only between row groups. Any other file
    is not split, and belongs to the range in which it begins.
    """
    index, count = shard
    sizes = [0 if path == STDIN else path.stat().st_size for path in paths]
    low, high = (sum(sizes) * i // count for i in (index, index + 1))
    if index == count - 1:
        high += 1  # include an empty last file, which begins at the end of the input
    source_pieces: list[SourcePiece] = []
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        kind = kind_of(path, text_lines=text_lines)
        if kind == "lines":
            first, last = max(low - before, 0), min(high - before, size)
        elif kind == "parquet":
            groups = _ask_columns(path, path=str(path), kind="parquet")
            inside = [g for g in range(groups) if low <= before + size * g // groups < high]
            first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
        else:
            first, last = 0, int(low <= before < high)
        if first < last:
            source_pieces.append(SourcePiece(path, kind, first, last, before))
        before += size
    return source_pieces


def blocks(piece: SourcePiece, keys: Sequence[str], *, text_lines: bool, done: int = 0) -> Iterator[LineBlock]:
    """Yield the blocks of a piece, without its first `done` units (see `LineBlock.done`).

    Raises ValueError naming the file if the file cannot be read.
    """
    if piece.kind in ("parquet", "arrow"):
        yield from _row_blocks(piece, keys, done)
        return
    try:
        if piece.kind == "lines":
            yield from _plain_blocks(piece, done)
        elif piece.kind == "text" and not text_lines:
            yield from _document(piece, done)
        else:
            yield from _packed_blocks(piece, done)
    except BadLine:
        raise
    except _read_errors() as error:
        raise ValueError(f"{piece.path}: cannot be read ({error})") from None


# --- lines ----------------------------------------------------------------------------------------------------------


def _plain_blocks(piece: SourcePiece, done: int) -> Iterator[LineBlock]:
    """Yield blocks of lines of an uncompressed file. Each block contains only a byte range, from which the worker reads
    the text."""
    with open(piece.path, "rb") as file:
        offset = piece.first + done
        if piece.first and not done:  # a line that begins before the piece belongs to the previous piece
            offset = _end_of_line(file, offset - 1)
        elif not offset and file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
            offset = len(BYTE_ORDER_MARK)
        while offset < piece.last:
            cut = min(offset + BLOCK_BYTES, piece.last)
            end = _end_of_line(file, cut - 1)
            place, problem = Place(piece.path, offset, end - offset), None
            if end - offset > MOST_LINE_BYTES:
                start = offset + Place(piece.path, offset, cut - 1 - offset).read().rfind(b"\n") + 1
                if end - start > MOST_LINE_BYTES:
                    place, problem = Place(piece.path, offset, start - offset), _TOO_LONG.format(MOST_LINE_BYTES >> 20)
            offset = end
            yield LineBlock(piece.name, place, offset - piece.first, piece.before + offset, problem)


def _end_of_line(file: BinaryIO, offset: int) -> int:
    """Return the offset after the line (or rest of a line) that begins at `offset`."""
    file.seek(offset)
    while part := file.readline(BLOCK_BYTES):
        offset += len(part)
        if part.endswith(b"\n"):
            break
    return offset


def _packed_blocks(piece: SourcePiece, done: int) -> Iterator[LineBlock]:
    """Yield blocks of lines of a file that must be decompressed or converted from plain text, sequentially from the
    beginning."""
    with _stored(piece.path) as stored, _unpacked(piece.path, stored) as text:
        unpacked = _skipped(text, done)
        while True:
            try:
                data = text.read(BLOCK_BYTES)
                if data and not data.endswith(b"\n"):
                    data += text.readline(MOST_LINE_BYTES)
            except _read_errors() as error:
                raise BadLine(f"{piece.path}: cannot be read after byte {unpacked} of its lines ({error})") from None
            if not data:
                return
            first = not unpacked
            unpacked += len(data)
            if first:
                data = data.removeprefix(BYTE_ORDER_MARK)
            problem = None
            start = data.rfind(b"\n", 0, len(data) - 1) + 1  # start of the last line
            if len(data) - start > MOST_LINE_BYTES:
                problem = _TOO_LONG.format(MOST_LINE_BYTES >> 20)
                unpacked += 0 if data.endswith(b"\n") else _rest_of_line(text)
                data = data[:start]
            if piece.kind == "text":
                data = _as_json(data)
            read = piece.before + (0 if piece.path == STDIN else stored.tell())
            yield LineBlock(piece.name, data, unpacked, read, problem)


def _rest_of_line(text: BinaryIO) -> int:
    size = 0
    while part := text.readline(BLOCK_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _as_json(data: bytes) -> bytes:
    """Convert lines of plain text to JSON lines. Blank lines stay blank. A line that is not UTF-8 is left unchanged,
    and is rejected later."""
    import orjson

    json_lines = []
    for text in data.removesuffix(b"\n").split(b"\n"):
        try:
            line = text.removesuffix(b"\r").decode()
            json_lines.append(orjson.dumps({"text": line}) if line.strip() else b"")
        except UnicodeDecodeError:
            json_lines.append(text)
    return b"\n".join(json_lines) + b"\n"


def _document(piece: SourcePiece, done: int) -> Iterator[LineBlock]:
    """Yield a .txt file as one JSON line with the key "text"."""
    import orjson

    if done:
        return
    with _stored(piece.path) as stored, _unpacked(piece.path, stored) as text:
        content = text.read(MOST_LINE_BYTES)
        read, problem, line = piece.before + stored.tell(), None, b""
        if len(content) == MOST_LINE_BYTES:
            problem = f"one document of more than {MOST_LINE_BYTES >> 20} MiB; see --text-lines"
        elif content:
            try:
                line = orjson.dumps({"text": content.removeprefix(BYTE_ORDER_MARK).decode()})
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 at byte {error.start} ({error.reason})"
        if line or problem:
            yield LineBlock(piece.name, line, 1, read, problem)


def _read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that readers of compressed files raise. The errors of zlib and isal are not subclasses of
    OSError."""
    exceptions: list[Any] = [OSError, EOFError, ValueError, lzma.LZMAError, zlib.error]
    with contextlib.suppress(ImportError):
        from isal import isal_zlib

        exceptions.append(isal_zlib.error)
    return tuple(exceptions)


def _stored(path: Path) -> BinaryIO:
    if path != STDIN:
        return open(path, "rb")
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer


def _unpacked(path: Path, stored: BinaryIO) -> BinaryIO:
    """Return a file object that reads the decompressed bytes."""
    opener: Any
    suffix = path.suffix.lower()
    if suffix == ".gz":
        try:
            from isal import igzip

            opener = igzip.open
        except ImportError:
            opener = gzip.open
    elif suffix == ".xz":
        opener = _from_xz
    elif suffix == ".bz2":
        opener = bz2.open
    elif suffix == ".zst":
        opener = _from_zstandard
    else:
        return stored
    unpacked: BinaryIO = opener(stored)
    return unpacked


class _Unpacked(io.RawIOBase):
    """A file object that reads the output of an iterator of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._ready):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _from_xz(stored: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_Unpacked(_xz_pieces(stored)), BLOCK_BYTES)


def _xz_pieces(stored: BinaryIO) -> Iterator[bytes]:
    """Decompress concatenated xz streams in pieces of at most _PIECE_BYTES. Replaces `lzma.open`, which has no memory
    limit."""
    packed = stored.read(_PIECE_BYTES)
    while packed.strip(b"\0"):  # streams may be padded
        stream = lzma.LZMADecompressor(memlimit=_XZ_BYTES)
        while not stream.eof:
            if stream.needs_input and not packed and not (packed := stored.read(_PIECE_BYTES)):
                raise EOFError("the last stream is cut short")
            yield stream.decompress(packed, _PIECE_BYTES)
            packed = b""
        packed = (stream.unused_data or stored.read(_PIECE_BYTES)).lstrip(b"\0")


def _from_zstandard(stored: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs zstandard; pip install '.[data]' in a clone") from None
    library = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)

    def pieces() -> Iterator[bytes]:
        frame, window, bytes_in, bytes_out = None, 0, 0, 0
        try:
            for packed, ends in _zstandard_blocks(stored):
                if frame is None:
                    frame, window, bytes_in, bytes_out = library.decompressobj(), 0, 0, 0
                    window = zstandard.get_frame_parameters(packed).window_size
                piece = frame.decompress(packed)
                bytes_in, bytes_out = bytes_in + len(packed), bytes_out + len(piece)
                if min(window, bytes_out) > max(
                    _FREE_WINDOW_BYTES, bytes_in * _MOST_RATIO
                ):  # a window occupies memory only when it is filled
                    raise OSError(f"{bytes_out} bytes in {bytes_in}, and a window of {window} bytes")
                yield piece
                frame = None if ends else frame
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None

    return io.BufferedReader(_Unpacked(pieces()), BLOCK_BYTES)


def _zstandard_blocks(stored: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of concatenated Zstandard frames, and whether each part ends a frame. A part decompresses to at
    most 128 KiB.

    The library itself decompresses its whole input in one call (64 KiB can become 2 GiB), and does not detect truncated
    files. Source: RFC 8878, sections 3.1.1 and 3.1.2. Errors: EOFError if the last frame is truncated.
    """

    def exactly(size: int) -> bytes:
        data = stored.read(size)
        if len(data) < size:
            raise EOFError("the last frame is cut short")
        return data

    while magic := stored.read(4):
        if magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5:  # a skippable frame
            remaining = int.from_bytes(exactly(4), "little")
            while remaining:
                remaining -= len(exactly(min(remaining, _PIECE_BYTES)))
            continue
        if magic != b"\x28\xb5\x2f\xfd":
            raise OSError("not a Zstandard frame")
        descriptor = exactly(1)
        single, checked = descriptor[0] >> 5 & 1, descriptor[0] >> 2 & 1
        content = (single, 2, 4, 8)[descriptor[0] >> 6]
        yield magic + descriptor + exactly(1 - single + (0, 1, 2, 4)[descriptor[0] & 3] + content), False
        last = 0
        while not last:
            header = exactly(3)
            number = int.from_bytes(header, "little")
            last, kind, size = number & 1, number >> 1 & 3, number >> 3
            block = header + exactly(1 if kind == 1 else size)
            yield block + (exactly(4) if last and checked else b""), bool(last)


def _skipped(text: BinaryIO, size: int) -> int:
    """Read and discard `size` bytes."""
    remaining = size
    while remaining:
        data = text.read(min(remaining, BLOCK_BYTES))
        if not data:
            raise EOFError(f"ends before byte {size}, where the work was to resume")
        remaining -= len(data)
    return size


# --- rows -----------------------------------------------------------------------------------------------------------


@cache
def _columns(memory: int) -> Confined:
    """Return the child process that reads parquet and arrow files."""
    formats = "parquet and arrow"
    return Confined(
        "mega.core.data.columns_process", formats, seconds=_COLUMNS_SECONDS, memory=memory, answer_bytes=memory
    )


def _ask_columns(path: Path, /, **question: Any) -> Any:
    """Send a request about a file to the process of `_columns`. The process's memory limit grows with the size of the
    file, because decompressed row groups can be larger."""
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path}: cannot be read: needs pyarrow; pip install '.[data]' in a clone")
    memory = _COLUMNS_BYTES
    while memory < 4 * path.stat().st_size:
        memory *= 2
    return _columns(memory).ask(question, f"{path}: cannot be read")


def _row_blocks(piece: SourcePiece, keys: Sequence[str], done: int) -> Iterator[LineBlock]:
    ask, reader = partial(_ask_columns, piece.path), next(_reader_numbers)
    source = {"path": str(piece.path), "kind": piece.kind, "keys": list(keys)}
    ask(reader=reader, **source, first=piece.first, last=piece.last, done=done)
    try:
        while (rows := ask(reader=reader)) is not None:
            done += rows["rows"]
            yield LineBlock(piece.name, rows[RAW], done, piece.before + rows["read"])
    finally:
        with contextlib.suppress(ValueError):
            ask(reader=reader, close=True)


_reader_numbers = itertools.count()


# --- one line -------------------------------------------------------------------------------------------------------


def parsed(line: bytes | memoryview) -> Any:
    """Parse one JSON line. Errors: ValueError with the reason.

    NaN and Infinity are accepted although they are not JSON, because Python's json module writes them.
    """
    import orjson

    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        reason = f"not JSON, {error.msg} at character {error.pos}"
        if bytes(line[:2]).strip() == b"[":
            reason = f"not JSON lines, but the beginning of {AN_ARRAY}"
    if len(line) <= BLOCK_BYTES:
        try:
            value = json.loads(str(line, "utf-8"))
            json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired surrogate, which is not text
            return value
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at byte {error.start}"
        except (ValueError, RecursionError):
            pass
    raise ValueError(reason)


# --- readers without resume -----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A JSON line that is not blank."""

    where: str
    """Location of the line, "file:number"."""
    text: bytes
    """Bytes of the line."""


def lines(inputs: Sequence[str | Path], keys: Sequence[str], *, text_lines: bool = False) -> Iterator[Line]:
    """Yield every line of the inputs, except blank lines. Raises BadLine at a line that is too long."""
    for piece in pieces(find(inputs), text_lines=text_lines):
        number = 0
        for block in blocks(piece, keys, text_lines=text_lines):
            block_lines = block.lines()
            for text in block_lines.removesuffix(b"\n").split(b"\n") if block_lines else ():
                number += 1
                if text and not text.isspace():
                    yield Line(f"{block.name}:{number}", text)
            if block.problem:
                raise BadLine(f"{block.name}:{number + 1}: {block.problem}")


AN_ARRAY = "an array; one object a line is read, which `jq -c '.[]' FILE` makes of it"


def describe_value(value: object) -> str:
    """Describe a JSON value that is not an object, and give advice."""
    if isinstance(value, list):
        return f"this is {AN_ARRAY}"
    return f"this is {json.dumps(value)[:40]}"


def describe_keys(fields: Mapping[str, object], flag: str) -> str:
    """Describe an object's keys and the flag that selects a key, for use in messages."""
    return f"there are {', '.join(map(repr, fields)) or 'none'}; name it by {flag}"


def texts(inputs: Sequence[str | Path], key: str = "text", *, text_lines: bool = False) -> Iterator[str]:
    """Yield the text under `key` in every line. Raises BadLine naming file and line if a line has no text under
    `key`."""
    for location, line in lines(inputs, [key], text_lines=text_lines):
        try:
            document = parsed(line)
        except ValueError as error:
            raise BadLine(f"{location}: {error}") from None
        if not isinstance(document, dict):
            raise BadLine(f'{location}: must be a JSON object with a text under "{key}"; {describe_value(document)}')
        if not isinstance(document.get(key), str):
            problem = (
                f"this is {json.dumps(document[key])[:40]}"
                if key in document
                else describe_keys(document, "--json-key")
            )
            raise BadLine(f'{location}: must be a JSON object with a text under "{key}"; {problem}')
        yield document[key]
