"""The quickstart's own parts: corpus, plot, unigram statistics, and the lines that it shows."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.config import toml
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.quickstart.corpus import Document, make_corpus, read_corpus
from mega.core.quickstart.tour import MORE, TOUR, arguments, closing, play, tour
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


def test_the_plot_shows_the_loss_and_what_it_must_beat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "loss": 7 - step / 20} for step in range(1, 101)] + [{"step": 100, "memory": 9}]
    for place in ("four-ranks", "tokens"):
        (tmp_path / place).mkdir()
    (tmp_path / "four-ranks" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with IndexedWriter(str(tmp_path / "tokens" / "train_text_document"), np.dtype(np.uint16)) as writer:
        writer.extend(np.arange(100, dtype=np.uint16), np.array([100]), np.array([1]))
    play("plot", tmp_path)
    shown = capsys.readouterr().out
    assert (
        "6.95 │A" in shown
        and "step 1 " in shown
        and "step 100" in shown
        and f"statistics is {math.log(100):.2f}" in shown
    )
    drawn = ElementTree.parse(tmp_path / "loss.svg").getroot()
    assert sum(each.tag.endswith("polyline") for each in drawn.iter()) == 2


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
