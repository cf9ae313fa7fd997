"""Google's own BERT records: their checksums, their fields, and the text that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data.batches import Batches
from mega.core.data.build import build_datasets
from mega.core.data.masked import BertSample
from mega.core.data.tfrecords import TFRecordDataset, crc32c, read, record_dataset
from mega.core.text.build import build
from tests.support.shared import shared

RECORDS = "bert_tfrecord/tf_examples.tfrecord"


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA


@given(st.binary(max_size=40), st.integers(0, 3))
@settings(max_examples=60)
def test_checksum_is_its_definition(data: bytes, spans: int) -> None:
    data += bytes(range(256)) * 16 * spans + data
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


def dataset(path: Path, cache: Path | None = None, samples: int = 150, seq_length: int = 128) -> TFRecordDataset:
    return record_dataset(
        "--train-data", [str(path)], seq_length=seq_length, vocab=30522, samples=samples, seed=3, cache=cache
    )


def test_real_records(tmp_path: Path) -> None:
    """Every pass gives every record once; labels restore the sentences; text mask positions are the records' own."""
    path = shared(RECORDS)
    found = dataset(path, tmp_path)
    tokenizer = build(
        tokenizer="BertWordPieceLowerCase", vocab_file=shared("bert/bert-base-uncased-vocab.txt"), vocab_extra_ids=0
    )
    words = set(tokenizer.encode(shared("bert_tfrecord/sample_text.txt").read_text()))
    assert len(found) == 150
    inputs = sorted(tuple(features["input_ids"]) for features in read(path))
    assert sorted(tuple(found[i].text.tolist()) for i in range(60)) == inputs
    assert sorted(tuple(found[i].text.tolist()) for i in range(60, 120)) == inputs
    assert any(not np.array_equal(found[i].text, found[i + 60].text) for i in range(60)), "reshuffled"
    swapped = 0
    for i in range(60):
        sample = found[i]
        real = np.where(sample.labels >= 0, sample.labels, sample.text)[sample.padding_mask == 1]
        assert sample.text.shape == (128,) and real[0] == 101 and real[-1] == 102 and (real == 102).sum() == 2
        assert set(real.tolist()) <= words | {101, 102}, "the labels restore the sentences of the text"
        assert 1 <= sample.loss_mask.sum() <= 20
        swapped += sample.is_random
    assert 0 < swapped < 60
    again = dataset(path, tmp_path)
    assert all(np.array_equal(again[i].text, found[i].text) for i in (140, 3)), "any sample, in any order"
    batch = Batches(found, micro_batch=4, vocab=30522).take(8, 1)[0]
    for row, features in enumerate(by_text(path, found[8 + i].text) for i in range(4)):
        weighed = np.array(features["masked_lm_weights"]) != 0
        places = np.array(features["masked_lm_positions"])[weighed]
        assert np.flatnonzero(batch.loss_weights[row]).tolist() == sorted(places.tolist())
        assert batch.labels[row, places].tolist() == np.array(features["masked_lm_ids"])[weighed].tolist()
        assert batch.types[row].tolist() == features["segment_ids"]
        assert [batch.pairs[row]] == features["next_sentence_labels"]
    assert batch.predicted is not None and batch.predicted.shape == (4, 20), "the records' --max_predictions_per_seq"
    listed = torch.zeros_like(batch.tokens).scatter(1, batch.predicted, 1)
    assert bool((listed.bool() | (batch.loss_weights == 0)).all()) and bool((listed.sum(1) == 20).all())


def test_more_masked_tokens_than_the_first_record_lists(tmp_path: Path) -> None:
    """As in files that were written with several limits: such a batch predicts at any column, with the same losses."""
    found = dataset(shared(RECORDS), tmp_path)
    rows = [found[i] for i in range(4)]
    many = rows[0].rows.copy()
    many[2, 1:22] = many[0, 1:22]
    batch = found.collate([BertSample(many, *rows[0][1:]), *rows[1:]], 0)
    assert batch.predicted is None and int(batch.loss_weights[0].sum()) >= 21
    assert found.collate(rows, 0).predicted is not None


def by_text(path: Path, text: Any) -> dict[str, Any]:
    return next(features for features in read(path) if features["input_ids"] == text.tolist())


def test_records_of_another_run(tmp_path: Path) -> None:
    path = shared(RECORDS)
    with pytest.raises(ValueError, match=r"its samples have 128 tokens; must be --seq-length"):
        dataset(path, seq_length=64)
    with pytest.raises(ValueError, match=r"holds token id \d+, but the vocabulary's are 0 .. 99"):
        record_dataset("--train-data", [str(path)], seq_length=128, vocab=100, samples=1, seed=1, cache=None)
    data = DataConfig(
        train_data=(str(path),), valid_data=(str(path),), valid_sets=(f"more={path}",), data_cache=str(tmp_path)
    )
    made = build_datasets(
        data, seq_length=128, seed=1, vocab=30522, samples=(70, 5, 5), masking=MaskingConfig(sample_kind="tfrecords")
    )
    assert made.train is not None and made.valid is not None and made.test is None
    assert (len(made.train), len(made.valid), len(made.named["more"])) == (70, 5, 5)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"--train-data .*empty: holds no record"):
        dataset(tmp_path / "empty")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cut short after byte"),
        (lambda data: data[:5], "cut short after byte 0"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "the length at byte 0 has another checksum"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "the record at byte 0 has another checksum"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.tfrecord"
    path.write_bytes(damage(shared("bert_tfrecord/tf_examples.tfrecord").read_bytes()))
    with pytest.raises(ValueError, match=rf"a\.tfrecord: .*{message}"):
        list(read(path))
