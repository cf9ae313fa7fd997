"""The quickstart's own parts: corpus, plot, unigram statistics, and the lines that it shows."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.config import toml
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.quickstart import chart
from mega.core.quickstart.corpus import Document, make_corpus, read_corpus
from mega.core.quickstart.tour import MORE, TOUR, arguments, closing, tour
from mega.core.quickstart.unigram import entropy, unigram


def test_the_corpus_is_the_same_every_time_and_holds_documents_out(tmp_path: Path) -> None:
    first, second = make_corpus(tmp_path / "a"), make_corpus(tmp_path / "b")
    assert first.train.read_bytes() == second.train.read_bytes()
    train, held_out = read_corpus(first.train), read_corpus(first.held_out)
    assert len(train) + len(held_out) == first.documents
    assert not {document.name for document in train} & {document.name for document in held_out}
    assert 10 <= len(held_out) < len(train) / 10
    assert first.characters > 3_000_000
    assert any(document.name == "json/decoder.py" for document in [*train, *held_out])


def test_unigram_statistics(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "tokens"), np.dtype(np.uint16)) as writer:
        writer.extend(np.array([0, 0, 0, 1], np.uint16), np.array([4]), np.array([1]))
    # Counts 3, 1, 0 and one more each: 4/7, 2/7, 1/7.
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram(tmp_path / "tokens", [0, 2], 3) == pytest.approx(expected)
    # Two ids are there: 4/6, 2/6.
    assert entropy(tmp_path / "tokens") == pytest.approx(-(3 * math.log(4 / 6) + math.log(2 / 6)) / 4)


def test_the_plot_shows_where_the_loss_went() -> None:
    curve = [(step, 7 - step / 20) for step in range(1, 101)]
    rows = chart.terminal(curve, level=5.0, width=20, height=10).splitlines()
    assert len(rows) == 12
    assert rows[0].split("│")[0].strip() == "6.95" and rows[9].split("│")[0].strip() == "2.00"
    blank = "\u2800"
    assert rows[0].split("│")[1].rstrip(blank) and not rows[0].split("│")[1][10:].strip(blank)
    assert not rows[9].split("│")[1][:10].strip(blank) and rows[9].split("│")[1][10:].strip(blank)
    assert "step 1" in rows[-1] and "step 100" in rows[-1]


def test_the_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    curve = [(1, 3.0), (2, 2.0)]
    assert chart.png(curve, 2.5, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not chart.png(curve, 2.5, tmp_path / "other.png")


def test_rows_without_a_loss_are_no_part_of_the_curve(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "memory": 9}, {"step": 2, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chart.read_curve(tmp_path / "metrics.jsonl") == [(1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("line", [line for _, line in TOUR] + [MORE])
def test_every_line_names_a_verb_and_flags_that_exist(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *rest = shlex.split(line)
    monkeypatch.setenv("COLUMNS", "240")  # no flag is shortened
    assert cli.main([verb, "--help-all" if verb == "pretrain" else "--help"]) == 0
    shown = capsys.readouterr().out
    for word in rest:
        if word.startswith("--"):
            assert word in shown


def test_the_training_line_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for _, line in TOUR if line.startswith("pretrain"))
    assert cli.main([*arguments(line, tmp_path / "a b", 40), "--print-config"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    values = toml.read(tmp_path / "run.toml")
    assert (values["tp"], values["pp"], values["nproc"], values["steps"]) == (2, 2, 4, 40)
    assert values["save"] == f"{tmp_path}/a b/four-ranks"


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        tour(tmp_path, 10)
    with pytest.raises(ValueError, match="--steps 0"):
        tour(tmp_path / "new", 0)
    assert cli.main(["quickstart", "--only", "plot"]) == 2
    assert cli.main(["quickstart", "--only", "plot", "--out", str(tmp_path)]) == 2


def test_held_out_follows_from_the_name_alone() -> None:
    assert Document("help/global", "x").held_out == Document("help/global", "y").held_out


def test_the_closing_line_works_where_mega_is_no_command_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["generate", "--load", "out/one-rank", "--prompt", "import ", "--temperature", "0.8", "--top-k", "50"]
    monkeypatch.setattr("shutil.which", lambda name: os.path.join(os.path.dirname(sys.executable), name))
    assert shlex.split(closing(Path("out"))) == ["mega", *words]
    monkeypatch.setattr("shutil.which", lambda name: None)
    words[2] = str(tmp_path / "out" / "one-rank")
    assert shlex.split(closing(Path("out"))) == [sys.executable, "-m", "mega", *words]
