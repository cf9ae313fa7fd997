"""The tour from end to end, with few training steps: every line works as it is shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.checkpoint.own.store import locate
from mega.core.quickstart.tour import TOUR, closing, tour


def in_this_process(command: list[str]) -> tuple[int, None]:
    """A line of the tour, without the seconds that each new process takes to import what it needs."""
    assert command[1:3] == ["-m", "mega"]
    return main(command[3:]), None


def test_the_whole_tour(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega.core.quickstart.tour._run", in_this_process)
    out = tmp_path / "new place" / "quickstart"
    assert tour(out, 6) == 0
    printed = capfd.readouterr().out
    assert printed.count("\n$ mega ") == len(TOUR) and printed.splitlines()[-1] == closing(out)
    rows = [json.loads(line) for line in (out / "four-ranks" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6 and "nats per token under the model" in printed
    assert (locate(out / "four-ranks").world, locate(out / "one-rank").world) == (4, 1)


def test_a_step_that_fails_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert tour(tmp_path / "file" / "inside", 12) != 0
    printed = capfd.readouterr()
    assert f"step 1 of {len(TOUR)} failed" in printed.err
    assert "[2/" not in printed.out


INTERRUPTED = """
import sys
from pathlib import Path
from mega.core.quickstart import tour
tour.TOUR = (("A run", "pretrain --device cpu --nproc 2 --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 "
    "--mock-data --micro-batch 1 --lr 1e-3 --steps 1000000 --eval-iters 0 --save-interval 1000000 --save {out}/run"),
    ("Never reached", "doctor"))
sys.exit(tour.tour(Path(sys.argv[1]), 1))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole_group", [True, False])
def test_a_run_that_is_interrupted_saves_as_it_promises(tmp_path: Path, whole_group: bool) -> None:
    """Ctrl-C reaches every process of the terminal's job; `kill` reaches the tour alone."""
    folder, log = tmp_path / "out", tmp_path / "log"
    with log.open("w") as printed:
        tour_process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(folder)],
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=Path(__file__).resolve().parents[2],
        )
    try:
        metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            assert tour_process.poll() is None, log.read_text()
            time.sleep(0.1)
        (os.killpg if whole_group else os.kill)(tour_process.pid, signal.SIGINT)
        assert tour_process.wait(120) == 128 + signal.SIGINT
    finally:
        if tour_process.poll() is None:
            os.killpg(tour_process.pid, signal.SIGKILL)
    text = log.read_text()
    assert "then saving to" in text and "mega: SIGINT received in step 1 of 2; the tour ends" in text
    assert "[2/2]" not in text and f"saved step {locate(folder / 'run').step}" in text
