"""Blends without weights, named corpora, named validation sets, thousands of prefixes, and `mega data`."""

from __future__ import annotations

import json
import resource
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from mega.cli import main
from mega.core.config.corpora import expand
from mega.core.config.sections import DataConfig
from mega.core.data.build import build_datasets
from mega.core.data.indexed import IndexedDataset, token_dtype
from mega.core.data.preprocessing.writer import IndexedWriter


def corpus(directory: Path, name: str, tokens: int, value: int = 1) -> str:
    with IndexedWriter(directory / name, token_dtype(100)) as writer:
        writer.add([[value] * tokens])
    return str(directory / name)


def build(data: DataConfig, samples: tuple[int, int, int] = (40, 0, 0)):  # type: ignore[no-untyped-def]
    return build_datasets(data, seq_length=4, seed=1, vocab=100, samples=samples)


def test_corpora_without_weights_end_together(tmp_path: Path) -> None:
    """41 and 121 tokens give 10 and 30 samples of 4, so that one pass over both has them 1 : 3."""
    prefixes = corpus(tmp_path, "a", 41, 1), corpus(tmp_path, "b", 121, 2)
    made = build(DataConfig(data_path=prefixes, split="1"))
    assert np.bincount([int(made.train[i][0]) for i in range(40)]).tolist() == [0, 10, 30]


def test_names_of_corpora(tmp_path: Path) -> None:
    first, second = corpus(tmp_path, "a", 41, 1), corpus(tmp_path, "b", 41, 2)
    table = tmp_path / "corpora.toml"
    table.write_text(f'[corpora]\nbooks = "{first}"\nmixture = [0.25, "{first}", 0.75, "{second}"]\n')
    assert expand(("0.5", "books", "0.5", "other"), str(table)) == ("0.5", first, "0.5", "other")
    made = build(DataConfig(data_path=("mixture",), corpora=str(table), split="1"))
    assert np.bincount([int(made.train[i][0]) for i in range(40)]).tolist() == [0, 10, 30]
    for text, message in (("x", "is not TOML"), ("[other]", "must hold a table"), (None, "cannot be read")):
        if text is None:
            table.unlink()
        else:
            table.write_text(text)
        with pytest.raises(ValueError, match=f"--corpora .*: {message}"):
            expand(("books",), str(table))


def test_named_validation_sets(tmp_path: Path) -> None:
    first, second = corpus(tmp_path, "a", 41, 1), corpus(tmp_path, "b", 41, 2)
    data = DataConfig(train_data=(first,), valid_sets=(f"one={first}", f"two={second}"))
    made = build(data, (8, 8, 4))
    assert {name: int(dataset[0][0]) for name, dataset in made.named.items()} == {"one": 1, "two": 2}
    assert all(len(dataset) >= 4 for dataset in made.named.values()) and made.valid is None


def test_more_prefixes_than_open_files_allowed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    prefix = corpus(tmp_path, "a", 9)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        if hard < 1024:
            pytest.skip(f"the hard limit of open files is {hard}")
        held = [IndexedDataset(prefix) for _ in range(200)]
        assert len(held[-1].tokens) == 9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_older_format_is_read(tmp_path: Path) -> None:
    """Three items of 2, 1 and 3 tokens, two documents."""
    index = struct.pack("<8s6Q", b"TNTIDX\0\0", 1, 4, 4, 3, 3, 3)
    index += struct.pack("<4q4q3q3q", 0, 1, 2, 3, 0, 2, 3, 6, 2, 1, 3, 0, 2, 3)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    data = IndexedDataset(tmp_path / "a")
    assert [data[i].tolist() for i in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert data.document_index.tolist() == [0, 2, 3] and data.lengths.dtype == np.int32
    (tmp_path / "a.idx").write_bytes(index[:-1])
    with pytest.raises(ValueError, match=r"a\.idx: has 167 bytes.*truncated"):
        IndexedDataset(tmp_path / "a")


def test_verify_finds_what_the_structure_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = corpus(tmp_path, "a", 41)
    assert main(["data", "verify", prefix]) == 0
    assert "structure and checksums are sound" in capsys.readouterr().out
    note = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").unlink()
    assert main(["data", "verify", prefix]) == 0
    assert "no checksums were noted" in capsys.readouterr().out
    assert main(["data", "note", prefix]) == 0
    assert (tmp_path / "a.json").read_bytes() == note
    for name in ("a.bin", "a.idx"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
        capsys.readouterr()
        assert main(["data", "verify", prefix]) == 2
        printed = capsys.readouterr().err
        assert name in printed and len(printed.splitlines()) == 1
        (tmp_path / name).write_bytes(whole)


def test_merge_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts").mkdir()
    for i in range(3):
        corpus(tmp_path / "parts", f"p{i}", 3 + i, i)
    assert main(["data", "merge", str(tmp_path / "parts"), "--output-prefix", f"{tmp_path}/m"]) == 0
    assert IndexedDataset(tmp_path / "m").tokens.tolist() == [0] * 3 + [1] * 4 + [2] * 5
    capsys.readouterr()
    line = f"data inspect {tmp_path}/m --tokenizer NullTokenizer --vocab-size 9 --samples 1"
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "3 documents, 3 sequences, 12 tokens, uint16, ids 0 .. 2" in printed and "'0 0 0'" in printed
    assert "2 ..       3 tokens            1  33.3 %" in printed
    for wrong, message in (("--vocab-size 1", "m: holds ids up to 2, but"), ("--samples -1", "--samples -1: must be")):
        assert main([*line.split(), *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    absent, missing = f"{tmp_path}/absent", "--tokenizer is missing: it must be one of"
    for alone, message in (
        (f"--vocab-file {absent}", "absent: no such file"),
        (f"--tokenizer-model {absent}", "absent: no such file"),
        ("--vocab-size 9", missing),
    ):
        assert main(["data", "inspect", f"{tmp_path}/m", *alone.split()]) == 2
        assert message in capsys.readouterr().err


def test_numbers_of_a_sample_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path, "a", 30, 1)
    line = f"data show-sample --data-path {tmp_path}/a --tokenizer NullTokenizer --vocab-size 9 --split 1"
    ranges = ("--mask-prob nan", "--mask-prob -1", "--short-seq-prob 2", "--decoder-seq-length 0", "--vocab-size 0")
    for wrong in ("--seq-length 0", "--seq-length -5", "--seed -1", "--seed 4294967296", *ranges):
        assert main([*line.split(), *wrong.split()]) == 2
        printed = capsys.readouterr().err
        assert wrong in printed and len(printed.splitlines()) == 1


def test_split_and_presplit(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"One {i}. Two.", "n": i + 10**30}) + "\n" for i in range(200)))
    made = []
    for seed in (1, 1, 2):
        line = f"data split --input {source} --output-dir {tmp_path}/{len(made)} --split 80,15,5 --seed {seed}"
        assert main(line.split()) == 0
        names = ("train", "valid", "test")
        made.append([(tmp_path / str(len(made)) / f"{name}.jsonl").read_text().splitlines() for name in names])
    assert [len(part) for part in made[0]] == [160, 30, 10]
    assert made[0] == made[1] != made[2]
    assert sorted(chain(*made[2]), key=lambda text: json.loads(text)["n"]) == source.read_text().splitlines()
    assert main(f"data split --input - --output-dir {tmp_path}/s".split()) == 2
    assert main(f"data split --input {source} --output-dir {tmp_path}/s --seed -1".split()) == 2
    pytest.importorskip("sentencex")
    line = f"data presplit --input {source} --output {tmp_path}/new/b.jsonl --sentence-splitter sentencex"
    assert main(line.split()) == 0
    first = json.loads((tmp_path / "new" / "b.jsonl").read_text().splitlines()[0])
    assert [part.strip() for part in first["text"].split("\n")] == ["One 0.", "Two."] and first["n"] == 10**30


def test_split_and_presplit_spare_their_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output among the inputs would be lost; in a folder that is read again its documents would come twice."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"One {i}."}) + "\n" for i in range(20)))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "train.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for line in (
        f"data split --input {tmp_path}/train.jsonl --output-dir {tmp_path}",
        f"data split --input {tmp_path}/link.jsonl --output-dir {tmp_path}",
        f"data split --input {tmp_path} --output-dir {tmp_path}/.",
        f"data presplit --input {tmp_path}/link.jsonl --output {tmp_path}/train.jsonl --sentence-splitter sentencex",
    ):
        assert main(line.split()) == 2
        assert ": would replace the input " in capsys.readouterr().err
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_places_that_cannot_be_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "One."}\n')
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    for line, flag, rule in (
        (f"split --input {source}", f"--output-dir {source}", "is not a directory"),
        (f"split --input {source}", f"--output-dir {source}/x", "is not a directory"),
        (f"presplit --input {source}", f"--output {source}/x", "is not a directory"),
        (f"presplit --input {source}", f"--output {tmp_path}", "is a directory; must be a file"),
        (f"from-numpy --input {tmp_path}/a.npy", f"--output-prefix {source}/x", "is not a directory"),
    ):
        assert main(["data", *line.split(), *flag.split()]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"mega: {flag}: ") and rule in printed and len(printed.splitlines()) == 1
