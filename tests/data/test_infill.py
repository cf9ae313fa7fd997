"""Fill in the middle: Megatron-core's rows for its own draws, and samples that are functions of seed and number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.config.sections import DataConfig
from mega.core.data.build import build_datasets
from mega.core.data.infill import Infill, InfillTokens
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.support.shared import shared
from tests.support.toy_tokenizer import ToyTokenizer


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


def as_text(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


def test_golden_rows() -> None:
    """Seven settings, five rows, each read twice by one generator, as Megatron-core reads them."""
    golden = json.loads(shared("golden/fim/fim.json").read_text())
    names = golden["tokens"]
    assert len(golden["results"]) == 35
    for row in golden["results"]:
        tokens = InfillTokens(*(names[key] for key in ("prefix", "middle", "suffix", "pad", "eod")), row.get("split"))
        infill = Infill(
            tokens,
            as_bytes,
            as_text,
            row.get("rate", 0.5),
            row.get("spm", 0.5),
            row.get("fragment", 0.5),
            row.get("no"),
        )
        generator = np.random.RandomState(row.get("seed", 1234))
        ids = np.array(golden["cases"][row["case"]], np.int64)
        for reading in ("first_call", "second_call"):
            assert infill.sample(ids, generator).tolist() == row[reading], (row["config"], row["case"], reading)


MARKS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>")
EOD = 257 + MARKS.index("<|endoftext|>")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """400 documents of a byte tokenizer that has the marks, and that tokenizer among those that --tokenizer names."""
    from mega.core.config.sections import TOKENIZERS
    from mega.core.text.build import BUILDERS
    from tests.support.toy_tokenizer import KIND, make

    monkeypatch.setitem(TOKENIZERS, KIND, ("vocab_file",))
    monkeypatch.setitem(BUILDERS, KIND, make)
    (tmp_path / "names.txt").write_text("\n".join(MARKS))
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(str(tmp_path / name), np.dtype(np.uint16)) as writer:
            for _ in range(400):
                text = random.integers(97, 123, random.integers(5, 60)).tolist()
                writer.add([[*text, EOD]])
    return tmp_path


def built(corpus: Path, **options: Any) -> Any:
    data = DataConfig(train_data=(str(corpus / "a"),), fim_data=True, **options)
    tokenizer = ToyTokenizer(corpus / "names.txt")
    return build_datasets(data, seq_length=64, seed=3, vocab=262, samples=(40, 0, 0), tokenizer=tokenizer).train


def test_a_sample_is_a_function_of_seed_and_number(corpus: Path) -> None:
    forward, backward = built(corpus), built(corpus)
    first = [forward[number] for number in range(40)]
    assert all(len(row) == 65 for row in first)
    for number in reversed(range(40)):
        assert (backward[number] == first[number]).all()
    changed = sum(int(257 in row) for row in first)
    assert changed > 20  # of each document about half is changed, so most samples have a mark
    assert not any((row == 257).any() for row in (built(corpus, fim_rate=0.0)[number] for number in range(40)))


def test_text_is_kept_but_for_what_the_marks_push_out(corpus: Path) -> None:
    plain = DataConfig(train_data=(str(corpus / "a"),))
    before = build_datasets(plain, seq_length=64, seed=3, vocab=262, samples=(40, 0, 0)).train
    after = built(corpus, fim_rate=1.0)
    for number in range(40):
        ours, theirs = (sorted(token for token in row[number] if token < 256) for row in (after, before))
        missing = len(theirs) - len(ours)
        assert 0 <= missing <= 3 * int((before[number] == EOD).sum() + 1)


def run(corpus: Path, save: str, *more: str) -> list[float]:
    shape = "--layers 1 --hidden 8 --heads 1 --seq-length 64 --positions 64 --micro-batch 2 --global-batch 4 --lr 1e-2"
    words = f"{shape} --tokenizer ToyTokenizer --vocab-file {corpus}/names.txt --fim-data --device cpu --no-progress"
    words += f" --log-interval 1 --save {corpus}/{save} --save-interval 2 --valid-by-corpus --eval-iters 1"
    blend = ["--data-path", "0.3", str(corpus / "a"), "0.7", str(corpus / "b"), "--split", "90,10,0"]
    assert main(["pretrain", *words.split(), *blend, *more]) == 0
    rows = map(json.loads, (corpus / save / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row and "lr" in row]


def test_a_resumed_run_reads_the_same(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(corpus, "whole", "--steps", "4")
    run(corpus, "cut", "--steps", "4", "--exit-interval", "2")
    assert run(corpus, "cut", "--steps", "4", "--resume", "auto") == whole
    printed = capsys.readouterr().out
    for name in ("valid", "a", "b"):
        assert f"{name} at step 4 | loss" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--fim-middle-token", "<m>"), "--fim-middle-token <m>: is not one token of ToyTokenizer; name one that"),
        (("--fim-rate", "1.5"), "--fim-rate 1.5: must be at least 0 and at most 1"),
        (("--mock-data",), "--fim-data: excludes --mock-data; it changes samples of token files"),
    ],
)
def test_what_cannot_be_is_said_before_the_first_step(
    corpus: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    shape = "--layers 1 --hidden 8 --heads 1 --seq-length 64 --micro-batch 2 --lr 1e-2 --steps 1 --device cpu"
    words = f"{shape} --tokenizer ToyTokenizer --vocab-file {corpus}/names.txt --fim-data --data-path {corpus}/a"
    assert main(["pretrain", *words.split(), *more]) == 2
    assert message in capsys.readouterr().err
