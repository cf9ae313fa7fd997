"""Google's own BERT records: their checksums, their fields, and the text that they were made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mega.core.data.tfrecords import TFRecordDataset, crc32c, read
from mega.core.text.build import build
from tests.support.shared import shared


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA


def test_real_records() -> None:
    dataset = TFRecordDataset([shared("bert_tfrecord/tf_examples.tfrecord")])
    tokenizer = build(
        tokenizer="BertWordPieceLowerCase", vocab_file=shared("bert/bert-base-uncased-vocab.txt"), vocab_extra_ids=0
    )
    words = set(tokenizer.encode(shared("bert_tfrecord/sample_text.txt").read_text()))
    assert len(dataset) == 60
    swapped = 0
    for i in range(60):
        sample = dataset[i]
        real = np.where(sample.labels >= 0, sample.labels, sample.text)[sample.padding_mask == 1]
        assert sample.text.shape == (128,) and real[0] == 101 and real[-1] == 102 and (real == 102).sum() == 2
        assert set(real.tolist()) <= words | {101, 102}, "the labels restore the sentences of the text"
        assert 1 <= sample.loss_mask.sum() <= 20
        swapped += sample.is_random
    assert 0 < swapped < 60


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cut short behind byte"),
        (lambda data: data[:5], "cut short behind byte 0"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "the length at byte 0 has another checksum"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "the record at byte 0 has another checksum"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.tfrecord"
    path.write_bytes(damage(shared("bert_tfrecord/tf_examples.tfrecord").read_bytes()))
    with pytest.raises(ValueError, match=rf"a\.tfrecord: .*{message}"):
        list(read(path))
