"""From texts to exported models with real command lines: the small form of tests/battery/story.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.cli import main
from tests.battery.story import SMALL, Sources, tell
from tests.support.shared import shared


def test_the_whole_story(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line works in a folder with a blank; training makes the plays likelier; what is exported opens."""
    nltk_data = pytest.importorskip("nltk.data")
    monkeypatch.setattr(nltk_data, "path", [str(shared("nltk_data"))])  # which it makes of NLTK_DATA when imported
    monkeypatch.setenv("NLTK_DATA", str(shared("nltk_data")))  # for processes that are started
    monkeypatch.chdir(tmp_path)
    files = {
        "novels": "novels/novels.jsonl.gz",
        "shakespeare": "tinyshakespeare/input.txt",
        "lambada": "lambada/lambada_test.first500.jsonl",
        "mnli": "mnli/dev_matched.part1.tsv",
        "qqp": "qqp/dev.tsv",
    }
    out = tmp_path / "the story"
    assert tell(out, Sources(**{name: shared(path) for name, path in files.items()}), SMALL, run=main) == 0
    printed = capfd.readouterr().out
    assert printed.count("\n$ mega ") == 22, printed.count("\n$ mega ")
    losses = {name: figure(out / f"ppl-{name}.json", "loss") for name in ("gpt", "plays-gpt")}
    assert losses["plays-gpt"] < losses["gpt"] - 0.1, losses
    assert {figure(out / task / "score.json", "total") for task in ("mnli", "qqp")} == {40, 47}
    assert all((out / place / "model.safetensors").is_file() for place in ("hf", "mnli/hf", "qqp/hf"))


def figure(path: Path, name: str) -> float:
    return {each["name"]: each["value"] for each in json.loads(path.read_text())["figures"]}[name]
