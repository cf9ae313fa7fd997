"""Damaged files end as bad flags do: exit 2 and one line that names the file, before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.data.preprocessing.writer import IndexedWriter

RUN = "pretrain --model tiny-gpt --micro-batch 2 --steps 10 --lr 1e-3 --vocab 100 --nproc 2 --eval-iters 0"


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("mega.core.processes.launch.launch", started)
    for variable in ("WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS", "MEGA_DEBUG"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The prefix of a sound corpus of 20 documents of 200 tokens, ids 0 to 99."""
    prefix = tmp_path / "text_document"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for number in range(20):
            writer.add([[(number + token) % 100 for token in range(200)]])
    return prefix


def _message(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command ends with."""
    assert cli.main([*RUN.split(), *map(str, arguments)]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    return printed[0]


def test_a_sound_corpus_starts_ranks(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN.split(), "--data-path", str(corpus)]) == 1
    assert "a rank was started" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("keep", [0, 3, -1])
def test_a_truncated_file(corpus: Path, suffix: str, keep: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"{corpus}{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    line = _message(capsys, "--data-path", corpus)
    assert line.startswith(f"mega: --data-path {corpus}: ") and str(path) in line


def test_an_index_that_is_none(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{corpus}.idx").write_bytes(b"not an index" * 20)
    assert f"{corpus}.idx" in _message(capsys, "--data-path", corpus)


def test_ids_outside_the_vocabulary(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _message(capsys, "--data-path", corpus, "--vocab", 99)
    assert "holds token ids 0 .. 99, but the vocabulary's are 0 .. 98" in line


def test_a_corpus_that_is_too_small(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _message(capsys, "--data-path", corpus, "--seq-length", 100_000)
    assert line.startswith(f"mega: --data-path {corpus}: ") and "token" in line


def test_a_second_corpus_of_a_blend(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = corpus.with_name("other")
    Path(f"{other}.bin").write_bytes(b"")
    Path(f"{other}.idx").write_bytes(b"")
    assert str(other) in _message(capsys, "--data-path", "0.5", corpus, "0.5", other)


def test_a_broken_tokenizer(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text("{")
    merges.write_text("")
    line = _message(capsys, "--data-path", corpus, "--vocab-file", vocab, "--merge-file", merges)
    assert str(vocab) in line


def test_a_vocabulary_smaller_than_the_tokenizers(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _message(capsys, "--data-path", corpus, "--tokenizer", "NullTokenizer", "--vocab-size", 200)
    assert line.startswith("mega: --vocab 100: ") and "must be at least 20" in line


def test_the_tokenizers_vocabulary_is_the_models(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 files with 3 ids cannot read a corpus of 100."""
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    merges.write_text("#version: 0.2\n")
    arguments = RUN.replace("--vocab 100 ", "").split()
    command = [
        *arguments,
        "--data-path",
        str(corpus),
        "--vocab-file",
        str(vocab),
        "--merge-file",
        str(merges),
    ]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(vocab) in line or str(corpus) in line


def test_a_layout_of_128_ranks_is_checked_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = "pretrain --model gpt3-175b --tp 8 --pp 16 --micro-batch 1 --global-batch 64 --dry-run --world 128"
    assert cli.main(command.split()) == 0
    assert "nothing trained" in capsys.readouterr().out


def test_a_link_to_nowhere_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    assert cli.main(["checkpoint", "show", str(tmp_path / "run")]) == 2
    line = f"mega: DIRECTORY {tmp_path}/run: links to {tmp_path}/gone, which is not there\n"
    assert capsys.readouterr().err == line
