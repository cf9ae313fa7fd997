"""BERT samples that google-research/bert wrote as TFRecords, read without TensorFlow.

A record is u64 length · checksum of it · payload · checksum of that; the payload is a tf.train.Example, a map of names
to lists of numbers. Everything is checked; nothing is shuffled here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mega.core.data.masked import BertSample
from mega.core.text.protobuf import fields, packed_floats, packed_integers

Features = dict[str, list[int] | list[float]]


class TFRecordDataset:
    """`dataset[i]` is the i-th example of the files, in their order, as a `BertSample`. Held in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._samples = [_bert(features, path) for path in paths for features in read(path)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> BertSample:
        return self._samples[sample]


def read(path: Path) -> Iterator[Features]:
    """The examples of one file; ValueError naming file and byte where it is damaged."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        if at + 12 > len(data):
            raise ValueError(f"{path}: cut short behind byte {at}")
        size, check = struct.unpack_from("<QI", data, at)
        if check != _masked(data[at : at + 8]):
            raise ValueError(f"{path}: corrupt, the length at byte {at} has another checksum")
        payload = data[at + 12 : at + 12 + size]
        if at + 16 + size > len(data):
            raise ValueError(f"{path}: cut short behind byte {at}")
        if struct.unpack_from("<I", data, at + 12 + size)[0] != _masked(payload):
            raise ValueError(f"{path}: corrupt, the record at byte {at} has another checksum")
        yield _example(payload)
        at += 16 + size


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
        raise ValueError("no tf.train.Example")
    return value


def _bert(features: Features, path: Path) -> BertSample:
    try:
        text, types, real, places, ids, weights, pair = (
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
    labels[places[weights != 0]] = ids[weights != 0]
    return BertSample(
        text=text,
        types=types,
        labels=labels,
        loss_mask=(labels >= 0).astype(np.int64),
        padding_mask=real,
        is_random=int(pair[0]),
        truncated=0,
    )


def _table() -> list[int]:
    """CRC-32C (Castagnoli), reflected: 0x82F63B78."""
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return found


_CRC = _table()


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """TensorFlow's: rotated right by 15, and a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
