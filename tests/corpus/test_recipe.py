"""Recipes: all steps from one file, resumed; and the page about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega import cli

RECIPE = """
input = "{folder}/in.jsonl"
output = "{folder}/corpus"
show-dropped = 1

[[step]]
verb = "filter"
preset = ["fineweb"]

[[step]]
verb = "exact-duplicates"

[[step]]
verb = "shuffle"
seed = 7
"""


def recipe(folder: Path, text: str = RECIPE) -> Path:
    body = "This is a sentence of an article, and it ends with a full stop."
    texts = [f"{body} {i % 8}." for i in range(12)] + ["menu", "home"]
    rows = [{"text": text, "url": f"http://www.site{i % 3}.com/{i}"} for i, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(text.format(folder=folder))
    return folder / "recipe.toml"


def test_a_recipe_runs_its_steps_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path)
    assert cli.main(["corpus", "run", str(path), "--dry-run"]) == 0
    assert f"mega corpus filter --input {tmp_path}/in.jsonl --output" in capsys.readouterr().out
    assert not (tmp_path / "corpus").exists()
    assert cli.main(["corpus", "run", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "14 documents, 12 kept, 2 dropped: fineweb: lines without punctuation at the end" in printed
    assert "12 documents, 8 kept, 4 dropped: exact duplicate" in printed
    assert len((tmp_path / "corpus" / "3-shuffle" / "00000-000000.jsonl").read_text().splitlines()) == 8
    assert cli.main(["corpus", "run", str(path)]) == 0
    assert capsys.readouterr().out.count("done before") == 3


def test_a_page_shows_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["corpus", "run", str(recipe(tmp_path))]) == 0
    for place in ("corpus", "corpus/1-filter"):
        assert cli.main(["report", str(tmp_path / place)]) == 0
    page = (tmp_path / "corpus.html").read_text()
    assert page.index("1-filter") < page.index("2-exact-duplicates") < page.index("3-shuffle")
    shown = ("site1.com", "Length in characters", "<pre>menu</pre>", "14.29%")
    for words in ("fineweb: lines without punctuation at the end", *shown):
        assert words in page, words
    assert (tmp_path / "corpus" / "1-filter.html").is_file()
    capsys.readouterr()
    line = [
        "corpus",
        "merge",
        "--input",
        str(tmp_path / "corpus" / "1-filter"),
        "--output",
        str(tmp_path / "one.jsonl"),
    ]
    assert cli.main(line) == 0 and cli.main(["report", str(tmp_path / "one.jsonl")]) == 0
    assert "one.jsonl (merge)" in (tmp_path / "one.jsonl.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('verb = "shuffle"', 'verb = "shufle"', "step 3: verb shufle: must be of urls, clean"),
        ("seed = 7", "sede = 7", "step 3, shuffle: --sede: is not an option"),
        ("seed = 7", "seed = 'x'", "step 3, shuffle: --seed x: must be a whole number"),
        ("input =", "inputs =", "input: must be a path"),
        ("[[step]]", "[step]", "cannot be read as TOML"),
        ('verb = "filter"', "", "step 1: must have a verb"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    path = recipe(tmp_path, RECIPE.replace(old, new))
    assert cli.main(["corpus", "run", str(path)]) == 2
    assert f"{path}: {words}" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()
