"""A blend that changes in mid-run: no sample is lost or read twice, in any number of changes; runs that resume so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.config.sections import DataConfig
from mega.core.data.build import build_datasets
from mega.core.data.phases import BlendPhase
from mega.core.data.preprocessing.writer import IndexedWriter

TOKENS = 16
"""Of a sample."""


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Every token of a corpus is another one, so that a sample says where it is from: 400 samples each."""
    for number, name in enumerate("abc"):
        with IndexedWriter(str(tmp_path / name), np.dtype(np.int32)) as writer:
            begin = number * 10_000
            writer.add([list(range(begin, begin + 400 * TOKENS + 1))])
    return tmp_path


def built(place: Path, words: list[str], samples: int, phases: list[BlendPhase] | None = None) -> Any:
    blend = tuple(str(place / word) if word in "abc" else word for word in words)
    found = build_datasets(
        DataConfig(train_data=blend),
        seq_length=TOKENS,
        seed=5,
        vocab=40_000,
        samples=(samples, 0, 0),
        phases=tuple(phases or ()),
    )
    return found.train


def phase(place: Path, until: int, asked: int, words: list[str]) -> BlendPhase:
    weights = [float(word) for word in words[::2]]
    return BlendPhase(until, asked, [(w, str(place / p)) for w, p in zip(weights, words[1::2], strict=True)])


def test_no_sample_is_lost_or_read_twice(corpora: Path) -> None:
    first, second, third = ["0.5", "a", "0.5", "b"], ["0.1", "a", "0.3", "b", "0.6", "c"], ["0.9", "a", "0.1", "c"]
    before = built(corpora, first, 300)
    phases = [phase(corpora, 100, 300, first), phase(corpora, 250, 400, second)]
    data = built(corpora, third, 450, phases)
    begins = [int(data[number][0]) for number in range(450)]
    assert begins[:100] == [int(before[number][0]) for number in range(100)]
    middle = built(corpora, second, 400, phases[:1])
    assert begins[:250] == [int(middle[number][0]) for number in range(250)]
    assert max(Counter(begins).values()) == 1  # no corpus of 400 samples was passed over once
    shares = [Counter(begin // 10_000 for begin in part) for part in (begins[:100], begins[100:250], begins[250:])]
    assert shares == [{0: 50, 1: 50}, {0: 15, 1: 45, 2: 90}, {0: 180, 2: 20}]


def test_a_corpus_is_passed_over_again_only_when_all_of_it_is_read(corpora: Path) -> None:
    phases = [phase(corpora, 100, 200, ["0.5", "a", "0.5", "b"])]
    data = built(corpora, ["a"], 1000, phases)
    begins = [int(data[number][0]) for number in range(1000)]
    of_a = [begin for begin in begins if begin < 10_000]
    assert len(of_a) == 950
    assert max(Counter(of_a[:400]).values()) == 1  # the first pass has everything once


def run(place: Path, save: str, blend: list[str], *more: str) -> list[float]:
    shape = "--layers 1 --hidden 8 --heads 1 --seq-length 16 --positions 16 --micro-batch 2 --lr 1e-2 --vocab 40000"
    words = (
        f"{shape} --device cpu --no-progress --log-interval 1 --save {place}/{save} --save-interval 2 --eval-iters 0"
    )
    named = [str(place / word) if word in "abc" else word for word in blend]
    assert main(["pretrain", *words.split(), "--train-data", *named, *more]) == 0
    rows = map(json.loads, (place / save / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row and "lr" in row]


def test_a_run_resumes_with_another_blend(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Change at step 2, and a resume after it with the same blend: equal to the run that was not cut again."""
    first, second = ["0.5", "a", "0.5", "b"], ["0.2", "a", "0.8", "c"]
    run(corpora, "run", first, "--steps", "6", "--exit-interval", "2")
    capsys.readouterr()
    run(corpora, "run", second, "--steps", "6", "--resume", "auto", "--exit-interval", "4")
    assert "the blend changes at sample 4; each corpus continues where it was" in capsys.readouterr().out
    cut = run(corpora, "run", second, "--steps", "6", "--resume", "auto")
    assert "the blend changes" not in capsys.readouterr().out
    run(corpora, "whole", first, "--steps", "6", "--exit-interval", "2")
    assert run(corpora, "whole", second, "--steps", "6", "--resume", "auto") == cut
    manifest = next((corpora / "run").glob("step-*6/manifest.json"))
    assert json.loads(manifest.read_text())["meta"]["blends"][0]["until"] == 4
