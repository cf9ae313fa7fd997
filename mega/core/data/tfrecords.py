"""BERT samples that google-research/bert wrote as TFRecords, read without TensorFlow.

A record is u64 length · checksum of it · payload · checksum of that; the payload is a tf.train.Example, a map of names
to lists of numbers. Files are mapped, not loaded: where each record lies is found once and cached, and a record's
checksum is held against it whenever it is read.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.data.cache import cached
from mega.core.data.mapped import mapped
from mega.core.data.masked import BertSample, bert_batch
from mega.core.data.sources import find
from mega.core.text.protobuf import fields, packed_floats, packed_integers

Features = dict[str, list[int] | list[float]]

_HEADER = struct.Struct("<QI")
_FOOT = 4


class TFRecordDataset:
    """`dataset[i]`: the examples of all files as `BertSample`, in passes, reshuffled in each pass.

    records: int64 [n, 3]: file, first byte of the payload, its size. Raises ValueError naming file and byte of a
    damaged record, or one of other sizes than seq_length and vocab.
    """

    collate = staticmethod(bert_batch)

    def __init__(
        self, paths: Sequence[Path], records: NDArray[np.int64], *, samples: int, seq_length: int, vocab: int, seed: int
    ) -> None:
        assert len(records)
        self._paths, self._records, self._seed = paths, records, seed
        self._files = [memoryview(mapped(path)) for path in paths]
        self._samples, self._seq_length, self._vocab = samples, seq_length, vocab
        self._pass: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> BertSample:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        number, within = divmod(sample, len(self._records))
        order = self._pass  # held here, since another thread may be in another pass
        if order is None or order[0] != number:
            generator = np.random.RandomState((self._seed + number) % 2**32)
            order = self._pass = number, generator.permutation(len(self._records))
        file, first, size = self._records[order[1][within]].tolist()
        path = self._paths[file]
        found = _bert(_checked(path, self._files[file], first, size), path)
        if len(found.text) != self._seq_length:
            raise ValueError(f"{path}: its samples have {len(found.text)} tokens; must be --seq-length")
        largest = max(int(found.text.max()), int(found.labels.max()))
        if largest >= self._vocab:
            raise ValueError(f"{path}: holds token id {largest}, but the vocabulary's are 0 .. {self._vocab - 1}")
        return found


def record_dataset(
    flag: str, inputs: Sequence[str], *, seq_length: int, vocab: int, samples: int, seed: int, cache: Path | None
) -> TFRecordDataset:
    """`samples` samples of the record files, folders and globs that `flag` gives. Raises ValueError for damage."""
    paths = [path.absolute() for path in find(inputs, flag)]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    def compute() -> NDArray[np.int64]:
        found = [np.insert(spans(path), 0, number, axis=1) for number, path in enumerate(paths)]
        return np.concatenate(found)

    key = {"kind": "tfrecords", "files": stamps}
    records = cached(cache, key, ("records",), lambda: {"records": compute()})["records"]
    if not len(records):
        raise ValueError(f"{flag} {' '.join(inputs)}: holds no record")
    made = TFRecordDataset(paths, records, samples=samples, seq_length=seq_length, vocab=vocab, seed=seed)
    made[0]  # are they BERT's, and of this length?
    return made


def read(path: Path) -> Iterator[Features]:
    """The examples of one file, in its order; ValueError naming file and byte where it is damaged."""
    data = memoryview(mapped(path))
    return (_checked(path, data, *span) for span in spans(path).tolist())


def spans(path: Path) -> NDArray[np.int64]:
    """First byte and size of each payload: int64 [n, 2]. Lengths are held against their checksums."""
    data = memoryview(mapped(path))
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            raise ValueError(f"{path}: cut short after byte {at}")
        size, check = _HEADER.unpack_from(data, at)
        if check != _masked(bytes(data[at : at + 8])):
            raise ValueError(f"{path}: corrupt, the length at byte {at} has another checksum")
        found.append((at + _HEADER.size, size))
        if at + _HEADER.size + size + _FOOT > len(data):
            raise ValueError(f"{path}: cut short after byte {at}")
        at += _HEADER.size + size + _FOOT
    return np.array(found, np.int64).reshape(-1, 2)


def _checked(path: Path, data: memoryview, first: int, size: int) -> Features:
    """One example, if its checksum is right."""
    payload = bytes(data[first : first + size])
    if struct.unpack_from("<I", data, first + size)[0] != _masked(payload):
        raise ValueError(f"{path}: corrupt, the record at byte {first - _HEADER.size} has another checksum")
    try:
        return _example(payload)
    except ValueError as error:
        raise ValueError(
            f"{path}: the record at byte {first - _HEADER.size} is not a tf.train.Example ({error})"
        ) from None


def _example(payload: bytes) -> Features:
    """Example { Features { map<string, Feature { bytes | floats | integers }> } }"""
    found: Features = {}
    for whole in fields(payload)[1]:
        for entry in fields(_bytes(whole))[1]:
            pair = fields(_bytes(entry))
            for kind, values in fields(_bytes(pair[2][0])).items():
                numbers = fields(_bytes(values[0])).get(1, [])
                found[_bytes(pair[1][0]).decode()] = packed_floats(numbers) if kind == 2 else packed_integers(numbers)
    return found


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is due")
    return value


def _bert(features: Features, path: Path) -> BertSample:
    try:
        text, types, real, positions, ids, weights, pair = (
            np.array(features[name])
            for name in (
                "input_ids",
                "segment_ids",
                "input_mask",
                "masked_lm_positions",
                "masked_lm_ids",
                "masked_lm_weights",
                "next_sentence_labels",
            )
        )
    except KeyError as error:
        raise ValueError(f"{path}: an example without {error}; there are {', '.join(features)}") from None
    labels = np.full(len(text), -1, np.int64)
    labels[positions[weights != 0]] = ids[weights != 0]
    return BertSample(
        text=text,
        types=types,
        labels=labels,
        loss_mask=(labels >= 0).astype(np.int64),
        padding_mask=real,
        is_random=int(pair[0]),
        truncated=0,
    )


_SPAN = 4096


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """CRC-32C (Castagnoli, reflected 0x82F63B78) of each byte followed by 0 .. _SPAN - 1 zero bytes: [_SPAN, 256]."""
    first: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.bitwise_xor(first >> 1, (first & 1) * np.uint32(0x82F63B78), dtype=np.uint32)
    found = np.empty((_SPAN, 256), np.uint32)
    found[0] = first
    for i in range(1, _SPAN):
        found[i] = (found[i - 1] >> 8) ^ first[found[i - 1] & 0xFF]
    return found


def crc32c(data: bytes) -> int:
    """The checksum is linear: each byte contributes on its own, by its distance from the end.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    tables = _tables()
    state = 0xFFFFFFFF
    for start in range(0, len(data), _SPAN):
        part = np.frombuffer(data, np.uint8, min(_SPAN, len(data) - start), start).copy()
        lead = min(4, len(part))
        part[:lead] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)[:lead]
        each = tables[np.arange(len(part) - 1, -1, -1), part]
        state = int(np.bitwise_xor.reduce(each)) ^ (state >> 8 * lead)
    return state ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """TensorFlow's: rotated right by 15, and a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
