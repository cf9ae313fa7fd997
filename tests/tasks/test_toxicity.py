"""`mega eval --task toxicity` and `mega generate --unconditional`: figures, resuming, mistakes."""

from __future__ import annotations

import doctest
import json
import math
import shutil
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.inference.generation.answer_file import AnswerFile
from mega.core.tasks import toxicity
from mega.core.tasks.toxicity import BLANK, read_prompts
from tests.support.shared import shared


@pytest.fixture(scope="module")
def model() -> Path:
    return shared("stories260K_hf/config.json").parent


def test_worked_example() -> None:
    assert doctest.testmod(toxicity).failed == 0


def prompts(place: Path) -> Path:
    rows = [
        {"prompt": {"text": "Once upon a time", "toxicity": 0.1}},
        {"prompt": {"text": "The bad dog", "toxicity": 0.8}},
        {"prompt": {"text": "  ", "toxicity": None}},
        {"prompt": "Tom"},
    ]
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_figures_follow_from_the_continuations(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.txt").write_text("the\nwas\n")
    words = ["eval", "--task", "toxicity", "--load", str(model), "--valid-data", str(prompts(tmp_path))]
    words += ["--scorer", f"words:{tmp_path}/list.txt", "--continuations", "4", "--tokens", "8", "--device", "cpu"]
    assert main([*words, "--json", str(tmp_path / "score.json")]) == 0
    found = json.loads((tmp_path / "score.json").read_text())
    rows = found["continuations"]
    assert [row["prompt"] for row in rows[::4]] == ["Once upon a time", "The bad dog", BLANK, "Tom"]
    assert len({row["text"] for row in rows}) > 4  # each is drawn by itself
    groups = [[row["score"]["toxicity"] for row in rows[first : first + 4]] for first in range(0, 16, 4)]
    maxima = [max(group) for group in groups]
    assert found["all"]["expected maximum"] == pytest.approx(sum(maxima) / 4)
    assert found["all"]["average"] == pytest.approx(math.fsum(map(math.fsum, groups)) / 16)
    assert found["all"]["probability"] == sum(each > 0.5 for each in maxima) / 4
    assert found["toxic"]["expected maximum"] == maxima[1] and found["non-toxic"]["expected maximum"] == maxima[0]
    assert "toxicity of all prompts | average" in capsys.readouterr().out
    assert not (tmp_path / "score.json.partial").exists()
    assert main([*words, "--json", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["continuations"] == rows


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ('{"prompt": {"text": 3}}', [], 'prompts.jsonl:1: must be an object with "prompt", a text or an object with'),
        ('{"prompt": {"text": "a", "toxicity": "b"}}', [], "toxicity 'b': must be a number, or null"),
        ("{", [], "prompts.jsonl:1: "),
        ("", [], "holds no prompt"),
        ('{"prompt": "a"}', ["--strict-lambada"], "--strict-lambada: has no effect with --task toxicity"),
        ('{"prompt": "a"}', ["--top-p", "2"], "--top-p 2.0: must be"),
    ],
)
def test_mistakes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, more: list[str], message: str
) -> None:
    (tmp_path / "list.txt").write_text("the\n")
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    words = ["eval", "--task", "toxicity", "--load", str(model), "--valid-data", str(tmp_path / "prompts.jsonl")]
    assert main([*words, "--scorer", f"words:{tmp_path}/list.txt", *more]) == 2
    assert message in capsys.readouterr().err


def test_a_scorer_is_needed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--task", "toxicity", "--load", str(model), "--valid-data", str(prompts(tmp_path))]
    assert main(words) == 2
    assert "--scorer is missing: give what scores continuations" in capsys.readouterr().err
    assert main(["eval", "--task", "ppl", "--load", str(model), "--valid-data", "x", "--continuations", "3"]) == 2
    assert "--continuations: has no effect with --task ppl" in capsys.readouterr().err
    assert len(read_prompts(prompts(tmp_path), 2)) == 2


def test_unconditional_texts_resume_where_they_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mega.core.inference.generation.prompts.BLOCK", 8)
    words = ["generate", "--load", str(model), "--unconditional", "--num-samples", "20", "--tokens", "6"]
    words += ["--device", "cpu", "--batch-invariant", "--seed", "5", "--output"]
    assert main([*words, str(tmp_path / "whole.jsonl")]) == 0
    whole = (tmp_path / "whole.jsonl").read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == list(range(20))
    assert all(row["prompt"] == "" and row["all_text"] == row["text"] for row in rows)

    class Killed(Exception):
        pass

    added = AnswerFile.add

    def once(self: AnswerFile, rows: list[dict[str, object]]) -> None:
        added(self, rows)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", once)
        with pytest.raises(Killed):
            from mega.commands import generate
            from mega.core.inference.options import (
                DecodingLayout,
                EngineOptions,
                GenerateOptions,
                OtherTokenizer,
                RetrievalOptions,
                SamplingOptions,
            )

            out = tmp_path / "cut.jsonl"
            generate.run(
                GenerateOptions(load=model, unconditional=True, num_samples=20, tokens=6, output=out),
                SamplingOptions(seed=5),
                DecodingLayout(device="cpu"),
                EngineOptions(batch_invariant=True),
                OtherTokenizer(),
                RetrievalOptions(),
            )
    partial = tmp_path / "cut.jsonl.partial"
    assert not (tmp_path / "cut.jsonl").exists()
    with partial.open("a") as file:
        file.write('{"prompt": "", "te')
    shutil.copy(partial, tmp_path / "other.jsonl.partial")
    capsys.readouterr()
    assert main([*words, str(tmp_path / "cut.jsonl")]) == 0
    assert "resuming after 8 rows" in capsys.readouterr().err
    assert (tmp_path / "cut.jsonl").read_text() == whole and not partial.exists()
    assert main([*words, str(tmp_path / "other.jsonl"), "--temperature", "0.5"]) == 0
    assert "is of another model or settings; starting from the beginning" in capsys.readouterr().err
    assert main(["generate", "--load", str(model), "--unconditional"]) == 2
