"""What a run reports: rows that every JSON reader takes, and none of an earlier run lost."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.config.sections import LogConfig
from mega.core.training.metrics.file import open_rows
from mega.core.training.metrics.meters import Meters


def write(path: Path, start: int, *steps: int, norm: float = 1.0) -> None:
    """Rows of some steps, by a run that starts at `start`."""
    options = LogConfig(metrics=str(path), progress=False)
    meters = Meters(options, start=start, steps=100, flops_per_token=1.0, devices=1, peak=None)
    for step in steps:
        meters.step(step, {"consumed": step, "lr": 1e-3, "loss": 2.0, "grad_norm": norm, "seconds": 1.0}, 8, 0)
    meters.close()


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_restarted_run_keeps_the_rows_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 0, 1, 2, 3)
    write(tmp_path / "m.jsonl", 0, 1)
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [1]
    assert [row["step"] for row in rows(tmp_path / "m.jsonl.previous")] == [1, 2, 3]


def test_resuming_reports_each_step_once(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 0, 1, 2, 3)
    write(tmp_path / "m.jsonl", 2, 3, 4)
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [1, 2, 3, 4]


def test_ranks_that_start_again_before_the_first_save_keep_the_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done until then is a loss of this run; a run of another launcher is another one."""
    write(tmp_path / "m.jsonl", 0, 1, 2, 3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write(tmp_path / "m.jsonl", 0, 1)
    begins = [event for event in rows(tmp_path / "m.events.jsonl") if event["event"] == "begin"]
    assert [event.get("lost_steps") for event in begins] == [None, 3] and begins[1]["lost_seconds"] == 3.0
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [1]
    assert not list(tmp_path.glob("*.previous"))
    monkeypatch.setattr(os, "getppid", lambda: -1)
    write(tmp_path / "m.jsonl", 0, 1)
    assert [event["event"] for event in rows(tmp_path / "m.events.jsonl")] == ["begin", "started", "end"]
    assert [row["step"] for row in rows(tmp_path / "m.jsonl.previous")] == [1]


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_the_norm_of_a_skipped_step_is_null(tmp_path: Path, norm: float) -> None:
    write(tmp_path / "m.jsonl", 0, 1, norm=norm)
    assert rows(tmp_path / "m.jsonl")[0]["grad_norm"] is None


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", 0, 1)
    assert (tmp_path / "pipe").is_fifo()
    assert json.loads(os.read(reader, 10_000))["step"] == 1
    os.close(reader)


def test_a_validation_of_no_token_has_no_perplexity(tmp_path: Path) -> None:
    options = LogConfig(metrics=str(tmp_path / "m.jsonl"), progress=False)
    meters = Meters(options, start=0, steps=100, flops_per_token=1.0, devices=1, peak=None)
    meters.evaluation(1, "valid", {"loss": float("nan")})
    meters.close()
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "valid_loss": None, "valid_perplexity": None}]


def test_a_refused_run_leaves_the_metrics_of_the_one_before(tmp_path: Path) -> None:
    """What refuses a run that resumes does so before the file of metrics is cut."""
    words = "--layers 1 --hidden 8 --heads 1 --vocab 64 --seq-length 8 --micro-batch 1 --global-batch 1 --mock-data"
    run = ["pretrain", *words.split(), "--device", "cpu", "--steps", "4", "--save-interval", "2"]
    run += ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "m.jsonl")]
    assert main([*run, "--lr", "1e-3"]) == 0
    before = (tmp_path / "m.jsonl").read_bytes()
    (tmp_path / "other").mkdir()
    refused = [*run[:-3], str(tmp_path / "other"), *run[-2:], "--resume", str(tmp_path / "run" / "step-0000002")]
    assert main([*refused, "--lr", "2e-3"]) != 0
    assert (tmp_path / "m.jsonl").read_bytes() == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "last"), [(110, "1 tokens/s/device"), (80, "1000.0 ms/step")])
def test_a_line_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, last: str) -> None:
    """Nor does it repeat what the bar shows; what a model has written is text, whatever its brackets."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    options = LogConfig(metrics=str(tmp_path / "m.jsonl"), log_interval=1)
    meters = Meters(options, start=0, steps=800, flops_per_token=1.0, devices=8, peak=None)
    meters.step(1, {"consumed": 16, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "seconds": 1.0}, 8, 0)
    meters.report("a :smile: in [brackets] [/b]")
    meters.close()
    lines = shown.getvalue().replace("\x1b[2K", "").splitlines()  # which clears the bar
    (line,) = (line for line in lines if "| loss" in line)
    assert line.rstrip().endswith(last) and len(line) <= columns
    assert "a :smile: in [brackets] [/b]" in shown.getvalue()


def test_lines_of_a_run_whose_output_is_kept_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mega pretrain ... | tee log`, at a terminal."""
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stdout", kept)
    monkeypatch.setattr(sys, "stderr", Terminal())
    meters = Meters(
        LogConfig(metrics=str(tmp_path / "m.jsonl")), start=0, steps=9, flops_per_token=1.0, devices=1, peak=None
    )
    meters.step(1, {"consumed": 1, "loss": 2.0, "seconds": 1.0}, 8, 0)
    meters.close()
    assert kept.getvalue().startswith("step 1/9")


def test_a_line_in_a_file_leaves_nothing_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MFU and memory too, and of preferences their accuracy and margin."""
    options = LogConfig(metrics=str(tmp_path / "m.jsonl"), progress=False)
    figures = {"start": 0, "steps": 100, "flops_per_token": 1e12, "devices": 8, "peak": 1000.0}
    meters = Meters(options, **figures, shown=("accuracy", "margin"))
    row = {"consumed": 10**9, "loss": 0.6, "lr": 1e-4, "grad_norm": 1.0, "seconds": 2.0, "accuracy": 0.75}
    meters.step(1, {**row, "margin": 0.125, "loss_scale": 65536.0, "params_norm": 1234.5, "zeros": 0.5}, 10**3, 2**33)
    meters.close()
    line = capsys.readouterr().out
    for field in ("samples 1000000000", "MFU 6.2%", "8.00 GiB", "62.50 TFLOP/s", "accuracy 0.7500", "margin 0.1250"):
        assert field in line


def test_metrics_by_a_link_to_another_disk(tmp_path: Path) -> None:
    """One whose file is still to come is followed, also by a resume, as is a tail of other bytes of a power cut."""
    link, there = tmp_path / "metrics.jsonl", tmp_path / "scratch" / "m.jsonl"
    link.symlink_to(there)
    for start in (0, 1):
        with open_rows(link, start, bool(start)) as rows:
            rows.write(json.dumps({"step": start + 1}) + "\n")
        with there.open("ab") as torn:
            torn.write(b"\xff\xfe\n")
    assert link.is_symlink() and [json.loads(row)["step"] for row in there.read_bytes().splitlines()[:2]] == [1, 2]


def test_a_streams_file_is_not_moved_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").touch()
    with open(tmp_path / "log") as log:
        (tmp_path / "out").symlink_to(f"/proc/self/fd/{log.fileno()}")
        run = "pretrain --model tiny-gpt --micro-batch 1 --steps 1 --lr 1 --mock-data --vocab 9 --metrics".split()
        assert main([*run, str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr().err
        == f"mega: --metrics {tmp_path}/out: leads to a file that is open already; name a file of its own\n"
    )
