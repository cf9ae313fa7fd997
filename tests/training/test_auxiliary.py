"""A run of a model whose layers have losses: log, metrics, TensorBoard, validation, report, resume, estimate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega.cli import main
from tests.support import toy_losses

SHAPE = "--layers 2 --hidden 32 --heads 4 --vocab 64 --seq-length 16 --global-batch 4 --micro-batch 2 --mock-data"
EVERY = "--eval-interval 2 --eval-iters 1 --save-interval 2"
RUN = f"pretrain --family {toy_losses.NAME} {SHAPE} --lr 1e-2 --device cpu {EVERY}".split()
NAMES = ("lm", "activation", "z_loss", "balance")
FACTORS = {"lm": 1.0, "activation": 0.3, "z_loss": 0.2, "balance": 0.7}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    toy_losses.register()
    yield
    toy_losses.unregister()


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_them_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    board = ["--tensorboard-dir", "board"]
    assert main([*RUN, "--steps", "4", "--save", "run", "--log-interval", "1", *board]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert len(lines) >= 4 and all(f" | {name} " in line for line in lines for name in ("z_loss", "balance"))
    assert "valid at step 2 | loss " in shown and " | z_loss " in shown.split("valid at step 2")[1].splitlines()[0]
    trained = [row for row in rows(tmp_path / "run") if "loss" in row]
    judged = [row for row in rows(tmp_path / "run") if "valid_loss" in row]
    assert len(trained) == 4 and len(judged) == 2
    for row in trained:
        assert row["loss"] == pytest.approx(sum(factor * row[name] for name, factor in FACTORS.items()), rel=1e-6)
    for row in judged:
        found = {name: row[f"valid_{name}"] for name in NAMES}
        assert row["valid_loss"] == pytest.approx(sum(FACTORS[name] * found[name] for name in NAMES), rel=1e-6)
    assert trained[-1]["z_loss"] < trained[0]["z_loss"]

    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"z-loss", "balance", "z_loss valid", "loss valid"} <= set(tags)


def test_a_report_takes_no_loss_for_a_held_out_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "--steps", "2", "--save", "run"]) == 0
    from mega.core.report.read import RunRecord, read

    record = read(tmp_path / "run")
    assert isinstance(record, RunRecord) and record.sets == ["valid", "test"] and "z_loss" in record.series
    assert main(["report", "run", "--out", "page.html"]) == 0
    assert "z loss" in (tmp_path / "page.html").read_text()


def test_a_stopped_run_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    often = ["--steps", "4", "--log-interval", "1"]
    assert main([*RUN, *often, "--save", "whole"]) == 0
    assert main([*RUN, *often, "--save", "parts", "--exit-interval", "2"]) == 0
    assert main([*RUN, *often, "--save", "parts", "--resume", "auto"]) == 0
    found = [[row["z_loss"] for row in rows(tmp_path / run) if "loss" in row] for run in ("whole", "parts")]
    assert len(found[0]) == 4 and found[0] == found[1]


def test_its_memory_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--tp 2 --sequence-parallel --pp 2 --recompute selective --device cpu".split()
    assert main(["memory-estimate", "--family", toy_losses.NAME, *SHAPE.split(), *layout, "--world", "4"]) == 0
    assert "activations" in capsys.readouterr().out
