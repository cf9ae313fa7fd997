"""Read BERT samples from the TFRecord files of google-research/bert, without TensorFlow.

A record is u64 length · checksum of the length · payload · checksum of the payload. The payload is a tf.train.Example,
a map of names to lists of numbers. Files are memory-mapped. The offsets of records are computed once and cached; a
record's checksum is verified on every read.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mega.core.data.cache import cached
from mega.core.data.mapped import mapped
from mega.core.data.masked import BertSample, bert_batch
from mega.core.data.sources import find
from mega.core.text.protobuf import fields, packed_floats, packed_integers

if TYPE_CHECKING:
    from mega.core.batch import MaskedBatch

Features = dict[str, list[int] | list[float]]

_HEADER = struct.Struct("<QI")
_FOOT = 4


class TFRecordDataset:
    """A dataset of the examples in all files, as `BertSample`s. Each pass over the examples is shuffled separately.

    records: int64 [n, 3], with columns file index, first byte of the payload, and size of the payload. Raises
    ValueError naming file and byte of a record that is damaged, or that does not match seq_length and vocab.
    """

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

    def collate(self, rows: Sequence[BertSample], first_sample: int) -> MaskedBatch:
        """See `bert_batch`. Rows with more masked tokens than the first record lists may come from a file that was
        written with other limits; the batch then lists no predicted columns."""
        masked = max(int(row.loss_mask.sum()) for row in rows)
        return bert_batch(rows, first_sample, self._most_masked if masked <= self._most_masked else None)

    @functools.cached_property
    def _most_masked(self) -> int:
        """The length of the first record's list of masked tokens, which google-research/bert fills up to
        --max_predictions_per_seq."""
        file, first, size = self._records[0].tolist()
        positions = _checked(self._paths[file], self._files[file], first, size)["masked_lm_positions"]
        return min(max(1, len(positions)), self._seq_length)

    def __getitem__(self, sample: int) -> BertSample:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        number, within = divmod(sample, len(self._records))
        order = self._pass  # local copy: another thread may assign another pass
        if order is None or order[0] != number:
            generator = np.random.RandomState((self._seed + number) % 2**32)
            order = self._pass = number, generator.permutation(len(self._records))
        file, first, size = self._records[order[1][within]].tolist()
        path = self._paths[file]
        bert_sample = _bert(_checked(path, self._files[file], first, size), path)
        if len(bert_sample.text) != self._seq_length:
            raise ValueError(f"{path}: its samples have {len(bert_sample.text)} tokens; must be --seq-length")
        largest = max(int(bert_sample.text.max()), int(bert_sample.labels.max()))
        if largest >= self._vocab:
            raise ValueError(f"{path}: holds token id {largest}, but the vocabulary's are 0 .. {self._vocab - 1}")
        return bert_sample


def record_dataset(
    flag: str, inputs: Sequence[str], *, seq_length: int, vocab: int, samples: int, seed: int, cache: Path | None
) -> TFRecordDataset:
    """Return a dataset of `samples` samples from the files, folders and globs of `flag`. Raises ValueError for damaged
    files."""
    paths = [path.absolute() for path in find(inputs, flag)]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    def compute() -> NDArray[np.int64]:
        records_of_files = [np.insert(spans(path), 0, number, axis=1) for number, path in enumerate(paths)]
        return np.concatenate(records_of_files)

    key = {"kind": "tfrecords", "files": stamps}
    records = cached(cache, key, ("records",), lambda: {"records": compute()})["records"]
    if not len(records):
        raise ValueError(f"{flag} {' '.join(inputs)}: holds no record")
    dataset = TFRecordDataset(paths, records, samples=samples, seq_length=seq_length, vocab=vocab, seed=seed)
    dataset[0]  # raises ValueError if the records are not BERT samples or have a different length
    return dataset


def read(path: Path) -> Iterator[Features]:
    """Yield the examples of one file in order. Errors: ValueError naming file and byte of a damaged record."""
    data = memoryview(mapped(path))
    return (_checked(path, data, *span) for span in spans(path).tolist())


def spans(path: Path) -> NDArray[np.int64]:
    """Return the first byte and the size of each payload, int64 [n, 2]. The checksums of the lengths are verified."""
    data = memoryview(mapped(path))
    payload_spans: list[tuple[int, int]] = []
    offset = 0
    while offset < len(data):
        if offset + _HEADER.size > len(data):
            raise ValueError(f"{path}: cut short after byte {offset}")
        size, check = _HEADER.unpack_from(data, offset)
        if check != _masked(bytes(data[offset : offset + 8])):
            raise ValueError(f"{path}: corrupt, the length at byte {offset} has another checksum")
        payload_spans.append((offset + _HEADER.size, size))
        if offset + _HEADER.size + size + _FOOT > len(data):
            raise ValueError(f"{path}: cut short after byte {offset}")
        offset += _HEADER.size + size + _FOOT
    return np.array(payload_spans, np.int64).reshape(-1, 2)


def _checked(path: Path, data: memoryview, first: int, size: int) -> Features:
    """Parse one example, and verify its checksum."""
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
    """Parse a serialized Example { Features { map<string, Feature { bytes | floats | integers }> } }."""
    features: Features = {}
    for feature_list in fields(payload)[1]:
        for entry in fields(_bytes(feature_list))[1]:
            pair = fields(_bytes(entry))
            for kind, values in fields(_bytes(pair[2][0])).items():
                numbers = fields(_bytes(values[0])).get(1, [])
                features[_bytes(pair[1][0]).decode()] = (
                    packed_floats(numbers) if kind == 2 else packed_integers(numbers)
                )
    return features


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is due")
    return value


def _bert(features: Features, path: Path) -> BertSample:
    try:
        text, types, padding_mask, positions, ids, weights, pair = (
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
    labels[positions[weights != 0]] = ids[weights != 0]  # the lists are padded with entries of weight 0
    rows = np.stack([text, types, labels])
    return BertSample(rows, length=int(padding_mask.sum()), is_random=int(pair[0]), truncated=0)


_SPAN = 4096


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """Return the CRC-32C (Castagnoli, reflected 0x82F63B78) of each byte followed by 0 .. _SPAN - 1 zero bytes, [_SPAN,
    256]."""
    first: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.bitwise_xor(first >> 1, (first & 1) * np.uint32(0x82F63B78), dtype=np.uint32)
    tables = np.empty((_SPAN, 256), np.uint32)
    tables[0] = first
    for i in range(1, _SPAN):
        tables[i] = (tables[i - 1] >> 8) ^ first[tables[i - 1] & 0xFF]
    return tables


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of the data. The checksum is linear: the contribution of each byte depends only on its value
    and on its distance from the end.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    tables = _tables()
    state = 0xFFFFFFFF
    for start in range(0, len(data), _SPAN):
        part = np.frombuffer(data, np.uint8, min(_SPAN, len(data) - start), start).copy()
        lead = min(4, len(part))
        part[:lead] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)[:lead]
        contributions = tables[np.arange(len(part) - 1, -1, -1), part]
        state = int(np.bitwise_xor.reduce(contributions)) ^ (state >> 8 * lead)
    return state ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """Return TensorFlow's masked checksum: the checksum rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
