"""Token files: a `<prefix>.bin` of ids back to back and a `<prefix>.idx` that says where each sequence lies.

The bytes are Megatron-LM's MMIDIDX format, so either program reads what the other wrote. A *sequence* is one
stored run of tokens (a document, or a sentence of one); a *document* is a run of neighbouring sequences.
This file knows neither texts nor samples.

    .bin   ids of all sequences, little-endian, of the width that the .idx names; nothing else
    .idx   "MMIDIDX\\0\\0" · u64 version 1 · u8 dtype code · u64 S sequences · u64 D = documents + 1
           i32[S] lengths in tokens · i64[S] byte offsets in the .bin · i64[D] first sequence of each document

A third file, `<prefix>.json`, holds the counts and the smallest and largest id. Other readers ignore it, and
this one believes it only where its counts are those of the .idx.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from mega.core.files import sync_directory, whole_file

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BLOCK = 1 << 20  # entries of an array that are looked at together, so that memory stays bounded
_SCAN_TOKENS = 1 << 28  # a foreign file is searched for its largest id up to this many tokens


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The width of ids that Megatron-LM takes: uint16 below 65,500 entries (unpadded), else int32."""
    return DTYPES[8 if vocab_size < 65500 else 4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def note_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def exists(prefix: str | Path) -> bool:
    """Whether both files of the pair are there."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


class IndexedDataset:
    """A pair of token files, mapped into memory and checked.

    lengths: int32 [S]; document_index: int64 [D]; tokens: the whole .bin.
    `dataset[i]` is sequence i, without a copy.
    Raises ValueError naming the file where anything in the pair contradicts anything else.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise ValueError(f"{path}: no such file (a data path is the common prefix of a .bin and an .idx)")
        index = _map(idx_path(prefix))
        self.dtype, sequences, documents = _read_header(idx_path(prefix), index)
        at = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences]).tolist()
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", sequences, at[0])
        self._offsets: NDArray[np.int64] = np.frombuffer(index, "<i8", sequences, at[1])
        self.document_index: NDArray[np.int64] = np.frombuffer(index, "<i8", documents, at[2])
        total = self._check_index()
        size = bin_path(prefix).stat().st_size
        if size != total * self.dtype.itemsize:
            raise ValueError(
                f"{bin_path(prefix)}: has {size} bytes, but its .idx describes {total} tokens, "
                f"{total * self.dtype.itemsize} bytes: truncated, or of another .idx"
            )
        self.tokens: NDArray[Any] = np.frombuffer(_map(bin_path(prefix)), self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens (or the rest) of one sequence from `offset` on, as a view."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix}: no sequence {sequence}, there are {len(self)}")
        whole = int(self.lengths[sequence])
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(f"{self.prefix}: sequence {sequence} has {whole} tokens, not {offset}..{stop}")
        first = int(self._offsets[sequence]) // self.dtype.itemsize
        return self.tokens[first + offset : first + stop]

    @property
    def documents(self) -> int:
        return len(self.document_index) - 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the sequences' lengths: all that the order of samples depends on."""
        digest = hashlib.sha256(str(self.dtype).encode())
        for block in _blocks(len(self)):
            digest.update(self.lengths[block].tobytes())
        return digest.hexdigest()

    def token_range(self) -> tuple[int, int]:
        """The smallest and largest id: noted by the writer, else searched for (evenly in a huge file)."""
        if not len(self.tokens):
            return 0, 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(note_path(self.prefix).read_bytes())
            if note["counts"] == [len(self), self.documents, len(self.tokens)]:
                return int(note["smallest"]), int(note["largest"])
        every = -(-len(self.tokens) // _SCAN_TOKENS)
        blocks = [self.tokens[block] for block in list(_blocks(len(self.tokens)))[::every]]
        return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)

    def _check_index(self) -> int:
        """The number of tokens, once lengths, offsets and documents agree with one another."""
        path, total = idx_path(self.prefix), 0
        for block in _blocks(len(self)):
            ends = np.cumsum(self.lengths[block], dtype=np.int64) + total
            begins = ends - self.lengths[block]
            if (self.lengths[block] < 0).any():
                raise ValueError(f"{path}: corrupt, a sequence has a negative length")
            if (self._offsets[block] != begins * self.dtype.itemsize).any():
                raise ValueError(f"{path}: corrupt, byte offsets are not the running sum of the lengths")
            total = int(ends[-1])
        index = self.document_index
        if not len(index) or index[0] != 0 or index[-1] != len(self) or (np.diff(index) < 0).any():
            raise ValueError(f"{path}: corrupt, documents do not run from sequence 0 to {len(self)}")
        return total


def _map(path: Path) -> mmap.mmap | bytes:
    """The whole file in memory's address space, read as it is touched."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], int, int]:
    """dtype, S and D of an .idx whose size is what they say."""
    if index[:8] == _OLD_MAGIC:
        raise ValueError(f"{path}: the older TNTIDX (lazy, cached) format; preprocess the corpus again")
    if len(index) < _HEADER.size or index[:9] != MAGIC:
        raise ValueError(f"{path}: not an index of token files (no MMIDIDX header)")
    _, version, code, sequences, documents = _HEADER.unpack(index[: _HEADER.size])
    if version != 1:
        raise ValueError(f"{path}: version {version}: must be 1")
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise ValueError(f"{path}: dtype code {code}: must be an integer's, one of 1 2 3 4 5 8")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if len(index) == expected + sequences and sequences:
        raise ValueError(f"{path}: a multimodal index (a mode behind each sequence); only text is read")
    if len(index) != expected:
        raise ValueError(
            f"{path}: has {len(index)} bytes, but its {sequences} sequences and {documents} document entries "
            f"take {expected}: truncated or corrupt"
        )
    return DTYPES[code], sequences, documents


def _blocks(count: int) -> Iterator[slice]:
    """Slices of at most _BLOCK entries that cover `count`."""
    return (slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))


class IndexedWriter:
    """Writes a pair of token files that appears under `prefix` when `with` ends well, the .idx last.

        with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
            writer.add([[10, 11], [12]])     # one document of two sequences

    Memory stays bounded: lengths and documents wait in unnamed files, not in lists. A second writer on the
    same prefix is refused with ValueError.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        assert self.dtype in _CODES, dtype
        self.sequences = self.documents = self.tokens = 0
        self._range: tuple[int, int] | None = None
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(f"{bin_path(prefix)}.tmp")
        self._bin = _open_alone(self._temporary)
        self._lengths = tempfile.TemporaryFile(dir=self._temporary.parent)  # noqa: SIM115
        self._counts = tempfile.TemporaryFile(dir=self._temporary.parent)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._temporary.unlink(missing_ok=True)
            for file in (self._bin, self._lengths, self._counts):
                file.close()

    def add(self, document: Sequence[Sequence[int]]) -> None:
        """One document: its sequences, of which the empty ones are dropped."""
        lengths = [len(sequence) for sequence in document if len(sequence)]
        ids = [token for sequence in document for token in sequence]
        self.extend(np.array(ids, np.int64), np.array(lengths, np.int64), np.array([len(lengths)]))

    def extend(self, ids: NDArray[Any], lengths: NDArray[Any], counts: NDArray[Any]) -> None:
        """Many documents at once: all their ids, the lengths of all their sequences, sequences per document.

        Raises ValueError for an id that the dtype cannot hold.
        """
        assert len(ids) == lengths.sum() and len(lengths) == counts.sum()
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise ValueError(f"{self.prefix}: ids {low} .. {high} do not fit into {self.dtype}")
            before = self._range or (low, high)
            self._range = min(before[0], low), max(before[1], high)
        self._bin.write(ids.astype(self.dtype, copy=False).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._counts.write(counts.astype("<i8").tobytes())
        self.tokens += len(ids)
        self.sequences += len(lengths)
        self.documents += len(counts)

    def _publish(self) -> None:
        """Take the old index away, then put down ids, note and index in this order."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        for old in (idx_path(self.prefix), note_path(self.prefix)):
            old.unlink(missing_ok=True)
        os.replace(self._temporary, bin_path(self.prefix))
        sync_directory(self._temporary.parent)
        smallest, largest = self._range or (0, 0)
        note = {
            "counts": [self.sequences, self.documents, self.tokens],
            "smallest": smallest,
            "largest": largest,
        }
        with whole_file(note_path(self.prefix)) as file:
            file.write(json.dumps(note).encode() + b"\n")
        with whole_file(idx_path(self.prefix)) as file:
            self._write_index(file)

    def _write_index(self, file: BinaryIO) -> None:
        file.write(_HEADER.pack(MAGIC, 1, _CODES[self.dtype], self.sequences, self.documents + 1))
        for lengths in _stored(self._lengths, "<i4"):
            file.write(lengths.tobytes())
        offset = 0
        for lengths in _stored(self._lengths, "<i4"):
            ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize + offset
            file.write((ends - lengths.astype("<i8") * self.dtype.itemsize).tobytes())
            offset = int(ends[-1])
        file.write(struct.pack("<q", 0))
        first = 0
        for counts in _stored(self._counts, "<i8"):
            ends = np.cumsum(counts, dtype="<i8") + first
            file.write(ends.tobytes())
            first = int(ends[-1])


def _stored(file: Any, dtype: str) -> Iterator[NDArray[Any]]:
    """The numbers of a spool file from its beginning, in blocks."""
    file.seek(0)
    while data := file.read(_BLOCK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype)


def _open_alone(path: Path) -> BinaryIO:
    """Open `path` empty and locked; ValueError where a living process is writing it.

    A killed writer's lock dies with it. Where the file system has no locks there is no check.
    """
    while True:
        file = open(path, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{path}: another process is writing this output") from None
        except OSError:
            pass
        # Another writer may have published or removed this very file between open and lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                return file
        file.close()
