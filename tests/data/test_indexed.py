"""Token files: Megatron-LM's bytes, and nothing but errors from files that are not whole."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.data import indexed, mapped
from mega.core.data.indexed import IndexedDataset, exists, token_dtype
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.support.shared import shared

GOLDEN = [[[10, 11], [12]], [[20, 21]], [], [[30, 31, 32, 65000]]]


def write(prefix: Path, documents: list[list[list[int]]], vocab: int = 65499) -> Path:
    with IndexedWriter(prefix, token_dtype(vocab)) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def test_golden_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", GOLDEN)
    assert Path(f"{prefix}.bin").read_bytes().hex() == "0a000b000c00140015001e001f002000e8fd"
    index = Path(f"{prefix}.idx").read_bytes()
    assert len(index) == 122
    assert hashlib.md5(index).hexdigest() == "f0d3c10b9036a4d7216dc88ec7ec6a3d"


def test_golden_reads_back(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "a", GOLDEN))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [
        [10, 11],
        [12],
        [20, 21],
        [30, 31, 32, 65000],
    ]
    assert dataset.document_index.tolist() == [0, 2, 3, 3, 4] and dataset.documents == 4
    assert dataset.get(3, 1, 2).tolist() == [31, 32] and dataset.get(3, 4).tolist() == []
    assert dataset.token_range() == (10, 65000)
    for arguments in ((4,), (-1,), (0, 3), (0, 0, 3), (0, 1, -1)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)
    assert dataset.run(1, 4).tolist() == [12, 20, 21, 30, 31, 32, 65000] and dataset.run(0, 1).tolist() == [10, 11]
    for arguments in ((-1, 1), (2, 2), (3, 5)):
        with pytest.raises(IndexError):
            dataset.run(*arguments)


def test_width_of_ids() -> None:
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@settings(max_examples=30)
@given(st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3), max_size=6))
def test_any_documents_read_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("any") / "a", documents, vocab=10**6))
    kept = [[sequence for sequence in document if sequence] for document in documents]
    assert [dataset[i].tolist() for i in range(len(dataset))] == [s for document in kept for s in document]
    assert np.diff(dataset.document_index).tolist() == [len(document) for document in kept]


@pytest.mark.parametrize("way", ["mapped", "small", "unmapped"])
def test_every_way_of_reading_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(mapped, "_SMALL", 0 if way == "mapped" else 1 << 16)
    dataset = IndexedDataset(write(tmp_path / "a", GOLDEN), mmap=way != "unmapped")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [s for document in GOLDEN for s in document if s]
    assert dataset.get(0, 1, 1).tolist() == GOLDEN[0][0][1:2] and dataset.get(0, 1, 0).tolist() == []
    Path(f"{tmp_path}/a.json").unlink()
    ids = [token for document in GOLDEN for sequence in document for token in sequence]
    assert dataset.token_range() == (min(ids), max(ids)) and dataset.tokens[:].tolist() == ids
    empty = IndexedDataset(write(tmp_path / "empty", []), mmap=way != "unmapped")
    assert len(empty) == len(empty.tokens) == 0


def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "a", [[[1] * 100], [[2] * 100]]), mmap=False)
    (tmp_path / "a.bin").write_bytes(bytes(300))
    assert dataset[0].tolist() == [0] * 100
    with pytest.raises(ValueError, match=r"a\.bin: has become shorter"):
        dataset[1]


def test_blocks_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[[i, i + 1], [i]] for i in range(50)]
    whole = write(tmp_path / "whole", documents)
    monkeypatch.setattr(indexed, "_BLOCK", 7)
    blocks = write(tmp_path / "blocks", documents)
    for end in ("bin", "idx"):
        assert Path(f"{blocks}.{end}").read_bytes() == Path(f"{whole}.{end}").read_bytes()
    Path(f"{blocks}.json").unlink()
    assert IndexedDataset(blocks).token_range() == (0, 50)
    assert IndexedDataset(blocks).fingerprint == IndexedDataset(whole).fingerprint


def test_note_of_another_file_is_not_believed(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[[1, 2, 3]]])
    write(tmp_path / "b", [[[1, 2, 900, 4]]])
    shutil.copy(tmp_path / "b.json", tmp_path / "a.json")
    assert IndexedDataset(prefix).token_range() == (1, 3)


def test_megatron_made_files_read() -> None:
    own = IndexedDataset(str(shared("megatron_indexed/test_text_document.idx"))[: -len(".idx")])
    assert (len(own), own.documents, own.dtype) == (1000, 1000, np.int32)
    assert own[7].tolist() == [111214, 343, 54365900, 77, 131072]
    fim = IndexedDataset(str(shared("megatron_indexed/fim_text_document.idx"))[: -len(".idx")])
    assert len(fim.tokens) == 7600
    assert all(fim[i][0] == 128000 and fim[i][-1] == 128001 for i in range(len(fim)))


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", GOLDEN)
    for end in ("bin", "idx"):
        path = Path(f"{prefix}.{end}")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"a\.(bin|idx)"):
                IndexedDataset(prefix)
        path.write_bytes(whole)
    IndexedDataset(prefix)


def test_flipped_bits_of_the_index_are_found(tmp_path: Path) -> None:
    """All but those in the inside of the document index, which GPT does not use and nothing else repeats."""
    prefix = write(tmp_path / "a", GOLDEN)
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(400):
        at, bit = rng.randrange(82 + 8), rng.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        try:
            dataset = IndexedDataset(prefix)
        except ValueError as error:
            assert "a.idx" in str(error) or "a.bin" in str(error)
        else:  # uint16 read as int16: the same width, and then a negative id that `token_range` shows
            assert at == 17 and dataset.dtype == np.int16


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "no MMIDIDX header"),
        (b"x" * 100, "no MMIDIDX header"),
        (b"TNTIDX\0\0" + bytes(60), "version 0"),
        (struct.pack("<9sQBQQ", indexed.MAGIC, 2, 4, 0, 1) + bytes(8), "version 2"),
        (struct.pack("<9sQBQQ", indexed.MAGIC, 1, 9, 0, 1) + bytes(8), "dtype code 9"),
        (struct.pack("<9sQBQQ", indexed.MAGIC, 1, 7, 0, 1) + bytes(8), "dtype code 7"),
        (struct.pack("<9sQBQQ", indexed.MAGIC, 1, 4, 2**61, 2**61) + bytes(8), "truncated or corrupt"),
        (struct.pack("<9sQBQQiqqqb", indexed.MAGIC, 1, 4, 1, 2, 1, 0, 0, 1, 0), "multimodal"),
        (struct.pack("<9sQBQQiqqq", indexed.MAGIC, 1, 4, 1, 2, -1, 0, 0, 1), "negative length"),
        (struct.pack("<9sQBQQiqqq", indexed.MAGIC, 1, 4, 1, 2, 1, 4, 0, 1), "running sum"),
        (struct.pack("<9sQBQQiqqq", indexed.MAGIC, 1, 4, 1, 2, 1, 0, 0, 2), "documents do not run"),
        (struct.pack("<9sQBQQiqqq", indexed.MAGIC, 1, 4, 1, 2, 1, 0, 1, 1), "documents do not run"),
        (struct.pack("<9sQBQQiqqqq", indexed.MAGIC, 1, 4, 1, 3, 1, 0, 0, 2, 1), "documents do not run"),
        (struct.pack("<9sQBQQiqqq", indexed.MAGIC, 1, 4, 1, 2, 2, 0, 0, 1), "describes 2 tokens"),
    ],
)
def test_wrong_index_is_named(tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(bytes(4))
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    assert not exists(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"")
    assert not exists(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a\.bin: no such file"):
        IndexedDataset(tmp_path / "a")


def test_failed_writer_leaves_nothing_and_the_old_pair_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", GOLDEN)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(prefix, token_dtype(100)) as writer:
        writer.add([[1, 2, 3]])
        raise RuntimeError
    with pytest.raises(ValueError, match="do not fit"), IndexedWriter(prefix, token_dtype(100)) as writer:
        writer.add([[70000]])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_second_writer_is_refused_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    program = (
        "import os, sys; from mega.core.data.indexed import *; from mega.core.data.preprocessing.writer import *\n"
        "w = IndexedWriter(sys.argv[1], token_dtype(100)); w.add([[9] * 5000]); print('on', flush=True)\n"
        "sys.stdin.read(); os._exit(9)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(prefix)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout and other.stdout.readline() == "on\n"
    with pytest.raises(ValueError, match="another process"):
        IndexedWriter(prefix, token_dtype(100))
    other.stdin.close()
    assert other.wait() == 9
    assert not exists(prefix)
    write(prefix, [[[1, 2]]])
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    assert json.loads(Path(f"{prefix}.json").read_text())["counts"] == [1, 1, 2]
