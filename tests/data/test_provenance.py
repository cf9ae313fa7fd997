"""Outputs that stand there already are kept, where the same work made them, and never replaced unasked.

The tokenizer of token files is noted next to them, kept by a merge, and compared before a run.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.data.indexed import IndexedDataset, bin_path, idx_path, note_path
from mega.core.data.preprocessing.provenance import existing_pairs

LINES = ["The cat sat on the mat.", "A dog and a cat, and a mat", "def f(x): return x"] * 9


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, a tokenizer `small`, a larger one of it, `more`, and one of other texts, `other`."""
    folder = tmp_path_factory.mktemp("home")
    for name, lines in {"a": LINES, "b": LINES[::-1]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 9))
    for name, size in {"small": 270, "more": 280}.items():
        assert train(folder / "a.jsonl", folder / name, size) == 0
    return folder


def train(corpus: Path, folder: Path, size: int, *more: str) -> int:
    line = f"train-tokenizer --input {corpus} --vocab-size {size} --output-dir {folder}"
    return main([*line.split(), *more])


def tokenizer(home: Path, name: str) -> list[str]:
    words = f"--tokenizer GPT2BPETokenizer --vocab-file {home}/{name}/vocab.json --merge-file {home}/{name}/merges.txt"
    return words.split()


def preprocess(home: Path, prefix: Path, *more: str, corpus: str = "a", name: str = "small") -> int:
    line = f"preprocess --input {home}/{corpus}.jsonl --output-prefix {prefix}"
    return main([*line.split(), *tokenizer(home, name), *more])


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files, and when each was written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def pretrain(home: Path, name: str, *paths: Path | str) -> list[str]:
    line = "pretrain --layers 1 --hidden 16 --heads 2 --seq-length 8 --micro-batch 1 --steps 1 --eval-iters 0"
    return [*line.split(), "--device", "cpu", "--dry-run", *tokenizer(home, name), "--data-path", *map(str, paths)]


def test_the_tokenizer_of_every_corpus_is_compared(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary that has all ids of a corpus is not therefore the one that made it."""
    for corpus, name in (("a", "more"), ("b", "small")):
        assert preprocess(home, tmp_path / corpus, corpus=corpus, name=name) == 0
    first, second = (tmp_path / f"{corpus}_text_document" for corpus in "ab")
    assert main(pretrain(home, "more", first)) == 0
    capsys.readouterr()
    blend = pretrain(home, "more", "0.5", first, "0.5", second)
    assert main(blend) == 2
    message = capsys.readouterr().err
    assert f"--data-path {second}: was made with GPT2BPETokenizer of 270 entries (" in message
    assert "the tokenizer given is GPT2BPETokenizer of 280 entries (" in message and message.count("\n") == 1
    assert main([*blend, "--allow-tokenizer-mismatch"]) == 0
    printed = "".join(capsys.readouterr().out.split())  # lines are broken at the terminal's width
    assert f"{second}:wasmadewithGPT2BPETokenizerof270" in printed
    show = f"data show-sample --seq-length 8 --data-path {second}".split()
    assert main([*show, *tokenizer(home, "more")]) == 2
    # Without the note, as Megatron-LM writes them: only ids that the vocabulary lacks are refused.
    for prefix in (first, second):
        note_path(prefix).unlink()
    assert main(blend) == 0
    assert main(pretrain(home, "small", first)) == 2
    assert "it was made with another tokenizer" in capsys.readouterr().err


def test_the_files_are_megatrons_byte_for_byte(home: Path, tmp_path: Path) -> None:
    """What is noted is in a file of its own."""
    assert preprocess(home, tmp_path / "a") == 0
    data = IndexedDataset(tmp_path / "a_text_document")
    assert data.tokenizer is not None and (data.tokenizer.kind, data.tokenizer.vocab_size) == ("GPT2BPETokenizer", 270)
    count = len(data.lengths)
    assert bin_path(data.prefix).stat().st_size == 2 * len(data.tokens)
    assert idx_path(data.prefix).stat().st_size == 34 + 12 * count + 8 * (count + 1)


def test_a_merge_keeps_the_tokenizer_and_compares_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for corpus, name, prefix in (("a", "small", "a"), ("b", "small", "b"), ("a", "more", "c")):
        assert preprocess(home, tmp_path / prefix, corpus=corpus, name=name) == 0
    a, b, c = (str(tmp_path / f"{prefix}_text_document") for prefix in "abc")
    merge = ["data", "merge", "--output-prefix"]
    assert main([*merge, f"{tmp_path}/ab", a, b]) == 0
    assert IndexedDataset(tmp_path / "ab").tokenizer == IndexedDataset(a).tokenizer
    capsys.readouterr()
    assert main([*merge, f"{tmp_path}/ac", a, c]) == 2
    assert f"--input {c}: was made with GPT2BPETokenizer of 280" in capsys.readouterr().err
    assert not (tmp_path / "ac.bin").exists()
    assert main([*merge, f"{tmp_path}/ac", a, c, "--allow-tokenizer-mismatch"]) == 0
    assert IndexedDataset(tmp_path / "ac").tokenizer is None
    note_path(b).unlink()
    assert main([*merge, f"{tmp_path}/ab2", a, b]) == 0
    assert IndexedDataset(tmp_path / "ab2").tokenizer is None
    assert f"no tokenizer is noted for the result: {b} notes none" in capsys.readouterr().out
    # A note can be made later, and again, without losing what it says.
    assert main(["data", "note", b, *tokenizer(home, "small")]) == 0
    assert main(["data", "note", b]) == 0
    assert IndexedDataset(b).tokenizer == IndexedDataset(a).tokenizer
    capsys.readouterr()
    assert main(["data", "note", b, *tokenizer(home, "more")]) == 2
    assert main(["data", "verify", b]) == 0 and main(["data", "inspect", b, *tokenizer(home, "more")]) == 0
    found = capsys.readouterr()
    assert "not with GPT2BPETokenizer of 280" in found.err
    assert found.out.count("made with GPT2BPETokenizer of 270") == 2 and "decoded with another tokenizer" in found.out


def test_inspect_decodes_with_the_recorded_tokenizer(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If its files are missing or changed, ids are shown, and the reason."""
    shutil.copytree(home / "small", tmp_path / "own")
    shutil.copy(home / "a.jsonl", tmp_path)
    assert preprocess(tmp_path, tmp_path / "a", name="own") == 0

    def inspect(*more: str) -> str:
        capsys.readouterr()
        assert main(["data", "inspect", f"{tmp_path}/a_text_document", "--samples", "1", *more]) == 0
        return capsys.readouterr().out

    ids = IndexedDataset(tmp_path / "a_text_document")[0].tolist()
    shown_ids, shown_text = (f"tokens: {text}\n" for text in (" ".join(map(str, ids)), repr(LINES[0])))
    assert shown_text in inspect() and "another tokenizer" not in inspect()
    assert "decoded with another tokenizer, GPT2BPETokenizer of 280" in inspect(*tokenizer(home, "more"))
    assert json.loads(inspect("--json"))["samples"][0]["text"] == LINES[0]
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(home / "more" / file, tmp_path / "own" / file)
    changed = inspect()
    assert shown_ids in changed and "have changed, they are GPT2BPETokenizer of 280 entries" in changed
    (tmp_path / "own/vocab.json").write_text("{")
    assert shown_ids in (broken := inspect()) and "the recorded tokenizer cannot be opened (--vocab-file" in broken
    shutil.rmtree(tmp_path / "own")
    missing = f"{tmp_path}/own/vocab.json, a file of the recorded tokenizer, does not exist"
    assert shown_ids in inspect() and missing in inspect()
    found = json.loads(inspect("--json"))
    assert missing in found["message"] and found["samples"][0] == {"sequence": 0, "tokens": len(ids), "ids": ids}
    note_path(tmp_path / "a_text_document").unlink()
    assert shown_ids in inspect() and "recorded tokenizer" not in inspect()


def test_preprocess_keeps_the_same_and_refuses_another(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert preprocess(home, out / "a", "--append-eod") == 0
    before, said = state(out), capsys.readouterr().out
    assert preprocess(home, out / "a", "--append-eod", "--workers", "2") == 0
    assert state(out) == before
    again = capsys.readouterr().out
    assert again.splitlines()[:2] == said.splitlines() and "and kept" in again
    for more in ({"name": "more"}, {"corpus": "b"}):
        assert preprocess(home, out / "a", "--append-eod", **more) == 2
    assert preprocess(home, out / "a") == 2 and preprocess(home, out / "a", "--resume") == 2
    assert capsys.readouterr().err.count("give --overwrite") == 4
    assert state(out) == before
    assert preprocess(home, out / "a", "--overwrite") == 0
    assert state(out)["a_text_document.bin"] != before["a_text_document.bin"]
    note_path(out / "a_text_document").unlink()  # of another program
    assert preprocess(home, out / "a") == 2


def test_a_part_of_this_work_is_no_hindrance(home: Path, tmp_path: Path) -> None:
    """Two keys, of which one was published when the process was killed."""
    (tmp_path / "two.jsonl").write_text('{"text": "a cat", "title": "b"}\n')
    run = f"preprocess --input {tmp_path}/two.jsonl --output-prefix {tmp_path}/two --json-keys text title".split()
    assert main([*run, *tokenizer(home, "small")]) == 0
    idx_path(tmp_path / "two_title_document").unlink()
    assert main([*run, *tokenizer(home, "small")]) == 0
    assert IndexedDataset(tmp_path / "two_title_document").documents == 1
    assert existing_pairs("two", [str(tmp_path / "two_text_document")], "x", True) == []
    with pytest.raises(ValueError, match=r"two_text_document\.bin exists"):
        existing_pairs("two", [str(tmp_path / "two_text_document")], None, False)


def test_train_tokenizer_keeps_the_same_and_refuses_another(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, a, b = tmp_path / "t", home / "a.jsonl", home / "b.jsonl"
    assert train(a, folder, 280) == 0
    before = state(folder)
    assert train(a, folder, 280) == 0
    assert "and kept" in capsys.readouterr().out and state(folder) == before
    for arguments in ((b, folder, 280), (a, folder, 285)):
        assert train(*arguments) == 2
        assert f"--output-dir {folder}: {folder}/vocab.json exists" in capsys.readouterr().err
    assert state(folder) == before
    t5 = "--kind", "sentencepiece", "--normalization", "nmt_nfkc"
    assert train(a, folder, 30, *t5) == train(a, folder, 30, *t5) == 0, "its files have other names"
    assert train(a, folder, 30, *t5[:2]) == 2
    assert f"{folder}/tokenizer.model exists" in capsys.readouterr().err, "of another normalization"
    assert train(a, folder, 280) == 0
    (folder / "merges.txt").write_text("changed")
    assert train(a, folder, 280) == 2
    assert train(a, folder, 285, "--overwrite") == 0
    assert state(folder)["vocab.json"] != before["vocab.json"]
    os.utime(a)  # an input that was written again is taken for another
    assert train(a, folder, 285) == 2


@pytest.mark.parametrize(
    ("line", "outputs", "kept"),
    [
        ("data from-numpy --input {home}/ids.npy --output-prefix {out}/n", ["n.bin", "n.idx"], True),
        ("data split --input {home}/a.jsonl --output-dir {out}", ["train.jsonl", "valid.jsonl"], False),
        (
            "data presplit --sentence-splitter sentencex --input {home}/a.jsonl --output {out}/p.jsonl",
            ["p.jsonl"],
            False,
        ),
    ],
)
def test_the_other_verbs_replace_nothing_either(
    home: Path, tmp_path: Path, line: str, outputs: list[str], kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(home / "ids.npy", np.array([[1, 2], [3, 4]]))
    words = line.format(home=home, out=tmp_path).split()
    assert main(words) == 0
    before = state(tmp_path)
    assert main(words) == (0 if kept else 2)
    other: Any = [word.replace("a.jsonl", "b.jsonl") for word in words] + ["--eod", "2"] * kept
    assert main(other) == 2
    assert "give --overwrite" in capsys.readouterr().err and state(tmp_path) == before
    assert main([*other, "--overwrite"]) == 0
    assert set(outputs) <= before.keys() and state(tmp_path) != before
