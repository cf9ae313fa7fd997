"""Pairs to groups, and groups to a corpus with the first of each: the golden groups, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.cli import main
from tests.support.shared import shared


@pytest.mark.parametrize("threshold", ["0.5", "0.7", "0.9"])
def test_groups_are_megatrons(tmp_path: Path, threshold: str) -> None:
    golden = json.loads(shared("golden/openwebtext/openwebtext.json").read_text())["near_duplicates"]
    pairs = [{first: [{second: overlap}]} for first, second, overlap in golden["pairs_over_half_exact_mode"]]
    (tmp_path / "pairs").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    words = ["--pairs", str(tmp_path / "pairs"), "--groups", str(tmp_path / "groups"), "--threshold", threshold]
    assert main(["corpus", "group", *words]) == 0
    lines = (tmp_path / "groups").read_text().splitlines()
    found = [sorted(group) for line in lines for group in json.loads(line).values()]
    assert sorted(found) == sorted(map(sorted, golden["groups_at_threshold"][threshold]))


def test_the_first_of_the_data_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that share an id are one."""
    monkeypatch.chdir(tmp_path)
    Path("groups").write_text('{"0": ["c", "a"]}\n{"1": ["a", "e"]}\n{"2": ["x", "d"]}\n')
    Path("in.jsonl").write_text("".join(json.dumps({"url": each, "text": each}) + "\n" for each in "abcdef"))
    words = ["--groups", "groups", "--input", "in.jsonl", "--output", "out.jsonl"]
    assert main(["corpus", "remove-groups", *words]) == 0
    assert [json.loads(line)["url"] for line in Path("out.jsonl").read_text().splitlines()] == ["a", "b", "d", "f"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "--pairs pairs:1: must be an object"),
        ('{"a": [{"b": "c"}]}', "--pairs pairs:1: must be an object of lists of {id: overlap}"),
        ("{", "--pairs pairs:1: "),
    ],
)
def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs").write_text(line + "\n")
    assert main(["corpus", "group", "--pairs", "pairs", "--groups", "groups"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("groups").exists()
