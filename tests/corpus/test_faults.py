"""Every step with every kind of bad input: one line with file, line and rule, nothing lost, counts that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.core.corpus.folder import RunOptions
from mega.core.corpus.part_files import UNREADABLE
from mega.core.corpus.run import process
from mega.core.corpus.shuffle import Shuffle, shuffle
from tests.support.corpus_faults import FAULTS, STEPS, call, walk
from tests.support.toy_step import ToyStep

NEEDS = {
    "urls": "tldextract",
    "clean": "ftfy",
    "near-duplicates": "rensa",
    "wikipedia": "mwparserfromhell",
}
PACKED = {"cut .zst": "zstandard", "cut .parquet": "pyarrow"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_is_one_line_and_nothing_is_lost(step: str, fault: str, tmp_path: Path) -> None:
    for package in (NEEDS.get(step), PACKED.get(fault)):
        if package is not None:
            pytest.importorskip(package, reason="is not installed: pip install '.[corpus]' in a clone")
    if step == "clean":
        pytest.importorskip("py3langid", reason="is not installed: pip install '.[corpus]' in a clone")
    walk(step, fault, tmp_path / "case")


def test_skipping_resumes_what_a_bad_line_has_ended(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "kept"}\n' * 3)
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write("[1]\n")
    inputs = [str(tmp_path / "*.jsonl")]
    with pytest.raises(ValueError, match=r"b\.jsonl:4: must be a JSON object"):
        process(inputs, ToyStep(), RunOptions(output=tmp_path / "out"))
    done = tmp_path / "out" / "00000-000000.jsonl"
    before = done.stat().st_mtime_ns
    counts = process(inputs, ToyStep(), RunOptions(output=tmp_path / "out", on_error="skip")).counts
    assert done.stat().st_mtime_ns == before  # what was done is not done twice
    assert (counts.documents, counts.kept, counts.dropped) == (10, 9, {UNREADABLE: 1})
    with pytest.raises(ValueError, match="holds the result of other inputs or settings"):
        process(inputs, ToyStep(), RunOptions(output=tmp_path / "out"))


def test_lines_of_text_are_not_shuffled_with_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    (tmp_path / "b.txt").write_text("two\n")
    with pytest.raises(ValueError, match=r"b\.txt: \.txt and JSON lines cannot be shuffled together"):
        shuffle([tmp_path / "a.jsonl", tmp_path / "b.txt"], Shuffle(), RunOptions(output=tmp_path / "out"))


def mistake(*words: str) -> str:
    found = call(["corpus", *words])
    assert found.code == 2 and len(found.errors) == 1, found
    return found.errors[0]


def test_one_file_has_the_form_that_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    for source, output, right in (("a.txt", "out.jsonl.gz", ".txt"), ("b.jsonl", "out.txt", ".jsonl")):
        line = ["--input", str(tmp_path / source), "--output", str(tmp_path / output)]
        assert f"are written; name it {right}, or a folder" in mistake("merge", *line)
    assert not list(tmp_path.glob("*out*"))


def test_lines_of_text_have_no_place_for_scores(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "words.txt").write_text("war\n")
    line = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    found = mistake("annotate", *line, "--scorer", f"words:{tmp_path / 'words.txt'}")
    assert f"{tmp_path / 'a.txt'}:1: a line of text has no place for scores" in found


def test_a_language_that_is_not_known(tmp_path: Path) -> None:
    pytest.importorskip("py3langid", reason="is not installed: pip install '.[corpus]' in a clone")
    (tmp_path / "a.jsonl").write_text('{"text": "two"}\n')
    line = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), "--tasks", "language"]
    assert "--language english: must be of ace af" in mistake("clean", *line, "--language", "english")
    assert not (tmp_path / "out").exists()


def test_after_a_mistake_in_the_first_line_other_flags_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n' * 3)
    line = ["exact-duplicates", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    assert "name it by --json-key" in mistake(*line)
    assert call(["corpus", *line, "--json-key", "body"]).code == 0
    assert "holds the result of other inputs or settings" in mistake(*line)
