"""Metrics of runs over each other: on a terminal without colour each in its letter, and as an SVG that stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mega import cli


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name, slope in (("first", 0.5), ("second", 0.25)):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 6.0 - slope * step if step != 4 else None} for step in range(1, 9)]
        text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 8, "valid_loss": 3.0, "note": "<b>"}])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    return [str(tmp_path / "first"), str(tmp_path / "second")]


def test_two_runs_on_a_terminal(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss"] and lines[1].split()[0] == "5.75" and "B" in lines[1]
    assert "          A first   B second" in lines and any(line.split() == ["valid_loss"] for line in lines)
    assert max(map(len, lines)) <= 83
    assert cli.main(["plot", runs[0], "--metric", "loss", "--smooth", "0.5"]) == 0
    assert "⠉" in (one := capsys.readouterr().out) and "A first" not in one


def test_an_svg_stands_alone(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both.svg"
    assert cli.main(["plot", *runs, "--out", str(out)]) == 0 and capsys.readouterr().out == f"{out}\n"
    root = ElementTree.fromstring(out.read_text())
    names = {"{http://www.w3.org/2000/svg}" + name for name in ("svg", "text", "style", "rect")}
    assert root.tag in names and names <= {element.tag for element in root.iter()}
    words = {element.text for element in root.iter() if element.text}
    assert {"loss", "valid_loss", "first", "second"} <= words


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--metric", "los"], "--metric los: no run has it; valid: loss, valid_loss"),
        (["--out", "a.pdf"], "--out a.pdf: must end in .svg or .png"),
        (["--smooth", "1"], "--smooth 1.0: must be at least 0 and less than 1"),
        (["--log"], "--log: needs --out, a file"),
    ],
)
def test_mistakes(more: list[str], said: str, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", *runs, *more]) == 2
    assert capsys.readouterr().err == f"mega: {said}\n"
