"""Write token files atomically, in bounded memory. An interrupted writer can be resumed.

An unfinished pair consists of three temporary files: `<prefix>.bin.tmp`, the sequence lengths, and the numbers of
sequences per document. At the end, the .idx is built from the last two files. This module does not depend on texts or
tokenizers.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import CODES, HEADER, MAGIC, IndexedDataset, bin_path, idx_path, note_path
from mega.core.files import locked_alone, sync_directory, whole_file
from mega.core.untrusted import Json

_BLOCK = 1 << 20
_DENIED = (errno.EACCES, errno.EROFS)
"""Errors of a place into which this user may not write, which is a mistake in flags."""
_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Errors of a disk that is full or fails."""


class IndexedWriter:
    """Writes a pair of token files. The files get their final names, the .idx last, when `with` ends without an error.

        with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
            writer.add([[10, 11], [12]])     # one document of two sequences

    Memory is bounded, because lengths and documents are stored in files. Raises ValueError if another writer uses the
    same prefix.

    keep: whether to keep the temporary files after an error. Given the last `state()`, a later writer can resume from
    these files.
    noted: additional entries of the note, such as the tokenizer, which the writer does not interpret.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[np.integer],
        *,
        keep: bool = False,
        state: Mapping[str, object] | None = None,
        noted: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        assert self.dtype in CODES, dtype
        self.sequences = self.documents = self.tokens = 0
        self._range: tuple[int, int] | None = None
        self._keep = keep
        self.noted = dict(noted)
        self._digest = hashlib.sha256()
        with self._named():
            for output_path in (bin_path(prefix), idx_path(prefix), note_path(prefix)):
                if output_path.is_dir():
                    raise ValueError(f"{output_path}: is a directory; must be a file")
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._paths = [Path(f"{prefix}.{name}.tmp") for name in ("bin", "lengths", "counts")]
            self._bin = _open_exclusively(self._paths[0])
            for published in (idx_path(prefix), note_path(prefix)):  # remove temporary files of a killed writer
                for stale in published.parent.glob(f"{glob.escape(published.name)}.*.tmp"):
                    stale.unlink(missing_ok=True)
            self._lengths, self._counts = (open(path, "a+b") for path in self._paths[1:])  # noqa: SIM115
        self._restore(state or {"tokens": 0, "sequences": 0, "documents": 0, "range": None})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = True
        try:
            if kind is None:
                with self._named():
                    self._publish()
                failed = False
        finally:
            if not (failed and self._keep):
                for path in self._paths:
                    path.unlink(missing_ok=True)
            for file in self._files:
                with contextlib.suppress(OSError):  # data that did not fit on a full disk has not been counted
                    file.close()

    @property
    def _files(self) -> tuple[BinaryIO, BinaryIO, BinaryIO]:
        return self._bin, self._lengths, self._counts

    def state(self) -> dict[str, Json]:
        """Flush all data to disk, and return the file sizes from which a later writer can resume."""
        with self._named():
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "documents": self.documents,
            "range": self._range,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Truncate the files to an earlier writer's `state()`. Errors: ValueError if a file is shorter."""
        self.tokens, self.sequences, self.documents = (state[name] for name in ("tokens", "sequences", "documents"))
        self._range = tuple(state["range"]) if state["range"] else None
        sizes = self.tokens * self.dtype.itemsize, 4 * self.sequences, 8 * self.documents
        with self._named():
            if self.tokens and not os.fstat(self._bin.fileno()).st_size and bin_path(self.prefix).exists():
                # The earlier writer was killed in `_publish` after it had renamed the .bin, so rename the .bin back.
                idx_path(self.prefix).unlink(missing_ok=True)
                os.replace(bin_path(self.prefix), self._paths[0])
                self._bin.close()
                self._bin = _open_exclusively(self._paths[0])
            for path, file, size in zip(self._paths, self._files, sizes, strict=True):
                if os.fstat(file.fileno()).st_size < size:
                    raise ValueError(f"{path}: is shorter than when it was last saved; remove it and start again")
                file.truncate(size)
            with open(self._paths[0], "rb") as file:
                while block := file.read(_BLOCK):
                    self._digest.update(block)

    def add(self, document: Sequence[Sequence[int]]) -> None:
        """Add one document, without its empty sequences."""
        lengths = [len(sequence) for sequence in document if len(sequence)]
        ids = [token for sequence in document for token in sequence]
        self.extend(np.array(ids, np.int64), np.array(lengths, np.int64), np.array([len(lengths)]))

    def extend(self, ids: NDArray[np.integer], lengths: NDArray[np.integer], counts: NDArray[np.integer]) -> None:
        """Add many documents, given as concatenated ids, sequence lengths, and numbers of sequences per document.

        Raises ValueError for an id that the dtype cannot represent.
        """
        assert len(ids) == lengths.sum() and len(lengths) == counts.sum()
        self._write(ids, lengths, counts)

    def append(self, other: IndexedDataset) -> None:
        """Append all documents of another pair. Errors: ValueError if the dtype of that pair differs."""
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix}: its ids are {other.dtype}, those of {self.prefix} {self.dtype}")
        no_entries = np.zeros(0, np.int64)
        for first in range(0, len(other.tokens), _BLOCK):
            self._write(other.tokens[first : first + _BLOCK], no_entries, no_entries)
        for first in range(0, len(other), _BLOCK):
            self._write(no_entries, other.lengths[first : first + _BLOCK], no_entries)
        for first in range(0, other.documents, _BLOCK):
            self._write(no_entries, no_entries, np.diff(other.document_index[first : first + _BLOCK + 1]))

    def _write(self, ids: NDArray[np.integer], lengths: NDArray[np.integer], counts: NDArray[np.integer]) -> None:
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise ValueError(f"{self.prefix}: ids {low} .. {high} do not fit into {self.dtype}")
            before = self._range or (low, high)
            self._range = min(before[0], low), max(before[1], high)
        data = np.ascontiguousarray(ids, self.dtype).data
        self._digest.update(data)
        with self._named():
            self._bin.write(data)
            self._lengths.write(lengths.astype("<i4").tobytes())
            self._counts.write(counts.astype("<i8").tobytes())
        self.tokens += len(ids)
        self.sequences += len(lengths)
        self.documents += len(counts)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the output in an OSError. Errors: ValueError if this user may not write there; OSError, such as that of
        a full disk."""
        try:
            yield
        except OSError as error:
            if error.errno not in _DENIED + _FAILED:
                raise
            kind = ValueError if error.errno in _DENIED else OSError
            raise kind(f"{self.prefix}: cannot be written ({os.strerror(error.errno)})") from None

    @property
    def largest(self) -> int:
        """The largest id so far."""
        return (self._range or (0, 0))[1]

    def _publish(self) -> None:
        """Remove the old .idx, then rename the .bin, the note and the .idx to their final names, in this order."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        for old in (idx_path(self.prefix), note_path(self.prefix)):
            old.unlink(missing_ok=True)
        os.replace(self._paths[0], bin_path(self.prefix))
        sync_directory(self._paths[0].parent)
        smallest, largest = self._range or (0, 0)
        with whole_file(idx_path(self.prefix)) as file:
            digest = hashlib.sha256()
            for part in self._index():
                digest.update(part)
                file.write(part)
            note = {
                **self.noted,
                "counts": [self.sequences, self.documents, self.tokens],
                "smallest": smallest,
                "largest": largest,
                "sha256": {"bin": self._digest.hexdigest(), "idx": digest.hexdigest()},
            }
            with whole_file(note_path(self.prefix)) as note_file:
                note_file.write(json.dumps(note).encode() + b"\n")

    def _index(self) -> Iterator[bytes]:
        """Yield the bytes of the .idx."""
        yield HEADER.pack(MAGIC, 1, CODES[self.dtype], self.sequences, self.documents + 1)
        for lengths in _stored(self._lengths, "<i4"):
            yield lengths.tobytes()
        offset = 0
        for lengths in _stored(self._lengths, "<i4"):
            ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize + offset
            yield (ends - lengths.astype("<i8") * self.dtype.itemsize).tobytes()
            offset = int(ends[-1])
        yield struct.pack("<q", 0)
        first = 0
        for counts in _stored(self._counts, "<i8"):
            ends = np.cumsum(counts, dtype="<i8") + first
            yield ends.tobytes()
            first = int(ends[-1])


def _stored(file: BinaryIO, dtype: str) -> Iterator[NDArray[np.integer]]:
    """Yield the numbers in a temporary file, from the beginning, in blocks."""
    file.seek(0)
    while data := file.read(_BLOCK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype)


def _open_exclusively(path: Path) -> BinaryIO:
    """Open and lock `path`. Errors: ValueError if a running process is writing the file."""
    while True:
        file = open(path, "ab")  # noqa: SIM115
        if not locked_alone(file.fileno()):
            file.close()
            raise ValueError(f"{path}: another process is writing this output")
        # Another writer may have renamed or removed the file between open and lock, so check the file and retry.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()
