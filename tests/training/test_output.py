"""Outputs that break: a pipe whose reader has left, a full disk. No training is lost, and what broke is named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega.cli import main
from mega.core.activity import ACTIVITY
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.exit_reports import report_of
from mega.core.processes.pool import Pool
from mega.core.training.metrics import meters, output
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start

FULL = Path("/dev/full")
RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 "
    "--steps 4 --save-interval 100 --eval-iters 0 --log-interval 1 --device cpu"
).split()

needs_full = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")


def _left() -> Any:
    """A pipe that nobody reads, as of `| head`."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize(
    ("stdout", "why"),
    [(_left, "Broken pipe"), pytest.param(lambda: FULL.open("w"), "No space left on device", marks=needs_full)],
)
def test_a_run_goes_on_without_stdout(
    stdout: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout() as broken:
        monkeypatch.setattr("sys.stdout", broken)
        assert main([*RUN, "--save", str(tmp_path)]) == 0
    assert CheckpointStore(tmp_path).steps() == [4]
    assert capsys.readouterr().err == f"mega: stdout: {why}; the run continues without it\n"


@pytest.mark.parametrize(
    ("stdout", "code", "said"),
    [
        (_left, 141, ""),
        pytest.param(lambda: FULL.open("w"), 1, "mega: stdout: No space left on device\n", marks=needs_full),
    ],
)
def test_what_only_prints_ends_with_stdout(
    stdout: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout() as broken:
        monkeypatch.setattr("sys.stdout", broken)
        assert main([*RUN, "--print-config"]) == code
    assert capsys.readouterr().err == said


def _train_without_metrics(groups: Groups, rank: int, place: str) -> str:
    """Job: what one of two ranks says of its run, rank 0 of which can write no metrics."""
    values: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "seq_length": 8, "vocab": 64, "mock_data": True}
    values |= {
        "micro_batch": 1,
        "lr": 1e-3,
        "steps": 1000,
        "eval_iters": 0,
        "save": place,
        "save_interval": 5000,
        "metrics": str(FULL),
    }
    with contextlib.ExitStack() as held:
        prepared = open_inputs(resolve_run(compose(flags=values), 2))
        training = start(prepared, rank, 2, Device.choose("cpu"), groups, held)
        with pytest.raises(OSError) as found:
            training.play()
    report = report_of(found.value)
    return f"{report.code} {report.kind} {report.text}"


@needs_full
def test_a_run_that_loses_its_metrics_saves_and_names_the_file(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(_train_without_metrics, str(tmp_path), world=2)
    assert first == "1 line --metrics /dev/full: No space left on device"
    assert second.startswith("1 consequence ")
    (step,) = CheckpointStore(tmp_path).steps()
    assert 1 <= step < 20, "the run went on"


def test_a_run_goes_on_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(meters, "_board", lambda *_: SimpleNamespace(add_scalar=full, close=full))
    assert main([*RUN, "--save", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board")]) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    said = f"mega: --tensorboard-dir {tmp_path / 'board'}: No space left on device; the run continues without it\n"
    assert capsys.readouterr().err == said


class Collected(dict[str, float]):
    """Takes the place of `Trackers`."""

    def __init__(self, *_: object, **__: object) -> None:
        self["stats/nothing"] = 0.0

    def log(self, step: int, values: dict[str, float]) -> None:
        self.update(values)

    def close(self) -> None:
        assert {"stats/tflops", "stats/tokens_per_sec", "lm-loss-training/lm loss"} < self.keys()
        assert {
            f"lm-loss-validation/{split} {name}" for split in ("valid", "test") for name in ("loss", "perplexity")
        } < (self.keys())


def test_boards_get_what_the_log_line_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotted = list[str]()
    monkeypatch.setattr(meters, "Trackers", Collected)
    board = SimpleNamespace(add_scalar=lambda name, value, step: plotted.append(name), close=lambda: None)
    monkeypatch.setattr(meters, "_board", lambda *_: board)
    assert main([*RUN, "--save", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board"), "--eval-iters", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    sets = {f"{split}_{name}": f"{name} {split}" for split in ("valid", "test") for name in ("loss", "perplexity")}
    assert {"tokens_per_second_per_device", "tflops_per_device", "memory", "valid_perplexity"} < names
    assert {sets.get(name, name.replace("_", "-")) for name in names} == set(plotted)


def test_a_name_that_is_not_utf8_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(os.fsencode(str(tmp_path)) + b"/run\xff")
    assert main([*RUN, "--save", name]) == 2
    assert f"{tmp_path}/run\\udcff" in capsys.readouterr().err


def test_a_long_start_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said, there = list[str](), threading.Event()
    monkeypatch.setattr(output, "SLOW_S", 0.0)
    monkeypatch.setattr(output, "warn", lambda line: (said.append(line), there.set()))
    with output.report_if_slow("loading weights"):
        assert there.wait(30)
    with output.report_if_slow("loading weights", quiet=True):
        pass
    assert said == ["loading weights ..."]


def test_a_long_start_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said, there = list[str](), threading.Event()
    monkeypatch.setattr(output, "SLOW_S", 0.0)
    monkeypatch.setattr(output, "PROGRESS_S", 0.01)
    monkeypatch.setattr(output, "warn", lambda line: (said.append(line), there.set()) if ":" in line else None)
    with output.report_if_slow("opening data"):
        assert not there.wait(0.1)  # nothing is known yet
        monkeypatch.setattr(ACTIVITY, "progress", "2 of 9 samples are laid out")
        assert there.wait(30)
    assert set(said) == {"opening data: 2 of 9 samples are laid out"}
