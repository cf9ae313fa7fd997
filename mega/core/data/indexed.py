"""Read token files: `<prefix>.bin` has the concatenated ids, and `<prefix>.idx` has the offset of each sequence.

The format is Megatron-LM's MMIDIDX, so files can be exchanged with Megatron-LM. A *sequence* is one stored run of
tokens (a document, or one sentence of a document). A *document* is a run of consecutive sequences. This module does not
depend on texts or samples.

    .bin   only the ids of all sequences, little-endian, in the dtype given by the .idx
    .idx   "MMIDIDX\\0\\0" · u64 version 1 · u8 dtype code · u64 S sequences · u64 D = documents + 1
           i32[S] lengths in tokens · i64[S] byte offsets in the .bin · i64[D] first sequence of each document

A third file, `<prefix>.json`, is called the note. It contains the counts, the smallest and largest id, checksums, and
the tokenizer and options with which the pair was written. Other programs ignore the note. This module uses the note
only if its counts equal those of the pair. The older TNTIDX format can also be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega.core.data.mapped import Unmapped, mapped, whole
from mega.core.files import sampled_digest
from mega.core.text.tokenizer import TokenizerIdentity
from mega.core.untrusted import parse_json, read_limited

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_OLD_HEADER = struct.Struct("<8s6Q")
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_NOTE_BYTES = 1 << 20
_BLOCK = 1 << 20  # number of array entries processed at a time, to bound memory
_SCAN_TOKENS = 1 << 28  # number of tokens scanned for the largest id if a file has no note


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Megatron-LM's dtype for ids: uint16 if the unpadded vocabulary has fewer than 65,500 entries, else int32."""
    return DTYPES[8 if vocab_size < 65500 else 4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def note_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def read_note(prefix: str | Path) -> Any:
    """Return the content of `<prefix>.json`, the note. Errors: OSError if the file is missing, ValueError if it is not
    JSON."""
    if not (path := note_path(prefix)).is_file():
        raise FileNotFoundError(path)
    return parse_json(read_limited(path, _NOTE_BYTES, str(path)), str(path))


def noted_tokenizer(prefix: str | Path) -> dict[str, str | int]:
    """Return the arguments of `text.build` for the tokenizer of a pair of token files, from the pair's note; {} if the
    tokenizer is unknown."""
    try:
        note = read_note(prefix)
    except (OSError, ValueError):
        return {}
    options = note.get("tokenizer_options") if isinstance(note, dict) else None
    arguments = options if isinstance(options, dict) else {}
    return {str(name): value for name, value in arguments.items() if isinstance(value, str | int)}


def exists(prefix: str | Path) -> bool:
    """Whether both files of the pair exist."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


class IndexedDataset:
    """A pair of token files, memory-mapped and checked.

    lengths: int32 [S]; document_index: int64 [D]; tokens: all ids in the .bin.
    `dataset[i]` is a view of sequence i.
    mmap: if False, the whole .idx is read into memory, and tokens are read from the .bin on each access.
    Raises ValueError naming the file if the contents of the pair are inconsistent.
    """

    def __init__(self, prefix: str | Path, *, mmap: bool = True) -> None:
        self.prefix = str(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise ValueError(f"{path}: no such file (a data path is the common prefix of a .bin and an .idx)")
        index = mapped(idx_path(prefix)) if mmap else whole(idx_path(prefix))
        read = _read_old_index if index[:8] == _OLD_MAGIC else _read_index
        self.lengths: NDArray[np.int32]
        self._offsets: NDArray[np.int64]
        self.document_index: NDArray[np.int64]
        self.dtype, self.lengths, self._offsets, self.document_index = read(idx_path(prefix), index)
        total = self._check_index()
        size = bin_path(prefix).stat().st_size  # the .bin has no header, so its size is the only check
        if size != total * self.dtype.itemsize:
            raise ValueError(
                f"{bin_path(prefix)}: has {size} bytes, but its .idx describes {total} tokens, "
                f"{total * self.dtype.itemsize} bytes: truncated, or of another .idx"
            )
        self.tokens: NDArray[np.integer] | Unmapped
        if mmap:
            self.tokens = np.frombuffer(mapped(bin_path(prefix)), self.dtype)
        else:
            self.tokens = Unmapped(bin_path(prefix), self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[np.integer]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Return `length` tokens (default: all remaining tokens) of one sequence, starting at `offset`, as a view."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix}: no sequence {sequence}, there are {len(self)}")
        whole = int(self.lengths[sequence])
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(f"{self.prefix}: sequence {sequence} has {whole} tokens, not {offset}..{stop}")
        first = int(self._offsets[sequence]) // self.dtype.itemsize
        return self.tokens[first + offset : first + stop]

    def run(self, first: int, last: int) -> NDArray[np.integer]:
        """Return sequences `first` .. `last` - 1 (at least one), concatenated, as a view."""
        if not 0 <= first < last <= len(self):
            raise IndexError(f"{self.prefix}: no sequences {first}..{last - 1}, there are {len(self)}")
        begin = int(self._offsets[first]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.lengths[first:last].sum())]

    def runs(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """For each i, locate the sequences first[i] .. last[i] - 1 (at least one). Return an array that contains each
        such range contiguously, and the index of each range's first token. The array is a view of all tokens if they
        are memory-mapped. The arguments are not checked."""
        begins = self._offsets[first] // self.dtype.itemsize
        if isinstance(self.tokens, np.ndarray):
            return self.tokens, begins
        ends = self._offsets[last - 1] // self.dtype.itemsize + self.lengths[last - 1]
        runs = [self.tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(runs), (ends - begins).cumsum() - (ends - begins)

    @property
    def documents(self) -> int:
        return len(self.document_index) - 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 hash of the dtype and the sequence lengths, which determine the order of samples."""
        digest = hashlib.sha256(str(self.dtype).encode())
        for block in _blocks(len(self)):
            digest.update(self.lengths[block].tobytes())
        return digest.hexdigest()

    @cached_property
    def note(self) -> Mapping[str, Any]:
        """The note that was written with the pair; empty if the note is missing or damaged, or belongs to other
        files."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = read_note(self.prefix)
            if note["counts"] == [len(self), self.documents, len(self.tokens)]:
                return dict(note)
        return {}

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """The tokenizer that produced the ids, or None if no tokenizer was recorded."""
        return TokenizerIdentity.read(self.note.get("tokenizer"))

    def content(self) -> dict[str, str | None]:
        """Hashes that identify the content: a hash of the lengths, of a sample of the .bin, and of all tokens. The hash
        of all tokens is read from the note and not verified."""
        tokens = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tokens = str(read_note(self.prefix)["sha256"]["bin"])
        return {"lengths": self.fingerprint, "content": sampled_digest(bin_path(self.prefix)), "tokens": tokens}

    def token_range(self) -> tuple[int, int]:
        """The smallest and largest id, from the note or from a scan. In a huge file, only evenly spaced blocks are
        scanned."""
        if not len(self.tokens):
            return 0, 0
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(self.note["smallest"]), int(self.note["largest"])
        stride = -(-len(self.tokens) // _SCAN_TOKENS)
        # Read the file without mmap, because the pages that the scan maps would stay in this process's memory.
        stored = Unmapped(bin_path(self.prefix), self.dtype)
        block_ranges = [_ends(stored[block]) for block in list(_blocks(len(stored)))[::stride]]
        return min(least for least, _ in block_ranges), max(most for _, most in block_ranges)

    def _check_index(self) -> int:
        """Return the number of tokens, after checking that lengths, offsets and documents are consistent."""
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


def _ends(ids: NDArray[np.integer]) -> tuple[int, int]:
    return int(ids.min()), int(ids.max())


Index = tuple[np.dtype[np.integer], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""The content of an .idx: dtype, lengths in tokens, offsets in bytes, index of the first sequence of each document."""


def _read_index(path: Path, index: mmap.mmap | bytes) -> Index:
    """Read an .idx. Errors: ValueError if the size of the file does not match its header."""
    if len(index) < HEADER.size or index[:9] != MAGIC:
        raise ValueError(f"{path}: not an index of token files (no MMIDIDX header)")
    _, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size])
    dtype = _checked(path, version, code)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if len(index) == expected + sequences and sequences:
        raise ValueError(f"{path}: a multimodal index (a mode after each sequence); only text is read")
    if len(index) != expected:
        raise ValueError(
            f"{path}: has {len(index)} bytes, but its {sequences} sequences and {documents} document entries "
            f"take {expected}: truncated or corrupt"
        )
    offsets = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences]).tolist()
    return (
        dtype,
        np.frombuffer(index, "<i4", sequences, offsets[0]),
        np.frombuffer(index, "<i8", sequences, offsets[1]),
        np.frombuffer(index, "<i8", documents, offsets[2]),
    )


def _read_old_index(path: Path, index: mmap.mmap | bytes) -> Index:
    """Read an .idx in the older TNTIDX format (--dataset-impl lazy or cached), which has offsets in tokens and 64-bit
    sizes.

    8 bytes "TNTIDX\\0\\0" · u64 version · code · width · N items · Z sizes · D, then i64 dims [N + 1],
    offsets [N + 1], sizes [Z], documents [D].
    """
    if len(index) < _OLD_HEADER.size:
        raise ValueError(f"{path}: has {len(index)} bytes, a TNTIDX header takes {_OLD_HEADER.size}: truncated")
    _, version, code, width, items, sizes, documents = _OLD_HEADER.unpack(index[: _OLD_HEADER.size])
    dtype = _checked(path, version, code)
    expected = _OLD_HEADER.size + 8 * (2 * (items + 1) + sizes + documents)
    if len(index) != expected or sizes != items or width != dtype.itemsize:
        raise ValueError(
            f"{path}: has {len(index)} bytes, but its {items} items of {width} bytes, {sizes} sizes and {documents} "
            f"document entries take {expected}: truncated, corrupt, or without documents (fairseq's own)"
        )
    section_offsets = np.cumsum([_OLD_HEADER.size, 8 * (items + 1), 8 * (items + 1), 8 * sizes]).tolist()
    lengths = np.frombuffer(index, "<i8", items, section_offsets[2])
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) < 2**31:
        raise ValueError(f"{path}: corrupt, a sequence has a length outside 0 .. 2^31 - 1")
    offsets = np.frombuffer(index, "<i8", items, section_offsets[1]) * dtype.itemsize
    return dtype, lengths.astype("<i4"), offsets, np.frombuffer(index, "<i8", documents, section_offsets[3])


def _checked(path: Path, version: int, code: int) -> np.dtype[np.integer]:
    """Return the integer dtype for the dtype code of an .idx."""
    if version != 1:
        raise ValueError(f"{path}: version {version}: must be 1")
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise ValueError(f"{path}: dtype code {code}: must be an integer's, one of 1 2 3 4 5 8")
    return DTYPES[code]


def _blocks(count: int) -> Iterator[slice]:
    """Yield slices of at most _BLOCK entries that cover 0 .. count - 1."""
    return (slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))
