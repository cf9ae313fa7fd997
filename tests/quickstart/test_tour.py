"""The tour from end to end, with few training steps: every line works as it is shown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.checkpoint.own.store import locate
from mega.core.quickstart.tour import TOUR, closing, tour


def in_this_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """A line of the tour, without the seconds that each new process takes to import what it needs."""
    assert command[1:3] == ["-m", "mega"]
    return subprocess.CompletedProcess(command, main(command[3:]))


def test_the_whole_tour(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega.core.quickstart.tour.subprocess.run", in_this_process)
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
