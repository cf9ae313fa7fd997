"""Decontamination: Megatron-LM's recorded pieces and counts; files of benchmarks; any way of running."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mega import cli
from mega.core.corpus.contamination import Finder, ngrams, questions
from mega.core.corpus.decontaminate import Decontaminate, occurrences
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.run import process
from tests.support.shared import shared


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shared("golden/openwebtext/openwebtext.json").read_text())["ngrams"]
    return found


def finder() -> Finder:
    return Finder(ngrams(golden()["questions"], 8, 13), 13)


def test_ngrams_are_megatrons() -> None:
    found = ngrams(golden()["questions"], 8, 13)
    assert sorted(found) == sorted(golden()["ngrams"])
    assert sorted(Counter(found.values()).items()) == [tuple(pair) for pair in golden()["lengths"]]


def test_pieces_and_counts_are_megatrons() -> None:
    for name, text in golden()["corpus"].items():
        expected = golden()["result"][name]
        pieces, trimmed = Decontaminate().pieces(text, finder())
        assert (pieces, int(trimmed)) == (expected["pieces"], expected["trimmed"]), name
        assert dict(occurrences(text, finder())) == expected["counted"], name
        assert finder().may_have(text) or pieces == [text]


def files(folder: Path) -> tuple[Path, Path]:
    """The recorded corpus, and its questions in SQuAD's form."""
    (folder / "squad.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"qas": [{"question": text} for text in golden()["questions"]]}]}]})
    )
    rows = [{"text": text, "n": i} for i, text in enumerate(golden()["corpus"].values())]
    rows[1]["split_id"] = "old-1"
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "in.jsonl", folder / "squad.json"


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, squad = files(tmp_path)
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "1.txt").write_text(json.dumps({"questions": [], "article": "x"}))
    (tmp_path / "race" / "2.txt").write_text(json.dumps({"questions": ["too short"]}))
    line = ["corpus", "decontaminate", "--input", str(source), "--key-threshold", "100", "--as-megatron"]
    line += ["--task-data", f"squad={squad}", f"race={tmp_path / 'race'}"]
    saved = ["--save-dictionary", str(tmp_path / "dictionary.json")]
    assert cli.main([*line, "--output", str(tmp_path / "out.jsonl"), *saved]) == 0
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = [piece for name in golden()["corpus"] for piece in golden()["result"][name]["pieces"]]
    assert [row["text"] for row in rows] == expected
    assert rows[0]["split_id"] == "squad-race-0000000001-0000"
    assert [row["split_id"] for row in rows[1:3]] == [f"old-1-squad-race-0000000002-000{i}" for i in range(2)]
    assert "2 dropped: nothing left" in capsys.readouterr().out

    counts = json.loads((tmp_path / "dictionary.json").read_text())
    assert counts[golden()["questions"][0]] == sum(
        golden()["result"][name]["counted"].get(golden()["questions"][0], 0) for name in golden()["corpus"]
    )
    assert cli.main([*line, "--output", str(tmp_path / "b.jsonl"), "--load-dictionary", saved[1]]) == 0
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_common_phrases_stay_and_whole_documents_are_kept_as_they_are(tmp_path: Path) -> None:
    source, squad = files(tmp_path)
    step = Decontaminate(tasks=(("squad", str(squad)),))
    found = {}
    for workers in (1, 2):
        options = RunOptions(output=tmp_path / f"{workers}.jsonl", part_bytes=3000, workers=workers)
        found[workers] = process([source], step, options).counts
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes() and found[1] == found[2]
    rows = (tmp_path / "1.jsonl").read_text().splitlines()
    lines = source.read_text().splitlines()
    names = list(golden()["corpus"])
    assert lines[names.index("many")] in rows  # its question occurs more than 10 times
    assert lines[names.index("clean")] in rows
    assert found[1].other == {"split": 3, "trimmed": 1} and not found[1].dropped


def test_positions_are_mapped_to_the_text() -> None:
    """The lower case of a capital I with a dot has two characters."""
    text = "İ. " * 300 + golden()["corpus"]["middle13"]
    ours = Decontaminate().pieces(text, finder()).texts
    own = Finder(finder().ngrams, 13, as_megatron=True)
    theirs = Decontaminate(as_megatron=True).pieces(text, own).texts
    assert len(ours) == 2 and ours[1] == golden()["result"]["middle13"]["pieces"][1]
    assert theirs[-1] != ours[-1]


@pytest.mark.parametrize(
    ("task", "path", "least"),
    [("lambada", "lambada", 100), ("natural_questions", "", 0)],
)
def test_questions_of_real_files(tmp_path: Path, task: str, path: str, least: int) -> None:
    if path:
        assert sum(1 for _ in questions(task, shared(path))) > least
        return
    (tmp_path / "nq.jsonl").write_text('{"question": {"text": "when was it"}}\n{"question_text": "who was it"}\n')
    assert list(questions(task, tmp_path / "nq.jsonl")) == ["when was it", "who was it"]
    (tmp_path / "coqa.json").write_text('{"data": [{"questions": [{"input_text": "and then"}]}]}')
    assert list(questions("coqa", tmp_path / "coqa.json")) == ["and then"]
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--task-data coqa=.*none.json: no question found"):
        list(questions("coqa", tmp_path / "none.json"))
