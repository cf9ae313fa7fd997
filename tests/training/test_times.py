"""The seconds that a run tells of its steps: each has its own, whatever is due between them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

from mega.cli import main
from mega.core.training import loop
from mega.core.training.step import train_step

SLOW = 0.1
"""Seconds that a step takes at least."""


def test_a_step_has_its_own_seconds(tmp_path: Path) -> None:
    """Validation behind every third step, a save behind every fourth; both take longer than a step."""

    def slow(*given: Any) -> Any:
        time.sleep(SLOW)
        return train_step(*given)

    words = "--layers 1 --hidden 16 --heads 2 --vocab 64 --seq-length 8 --micro-batch 1 --global-batch 2 --lr 1e-3"
    words += " --steps 8 --mock-data --device cpu --eval-interval 3 --eval-iters 40 --save-interval 4 --log-interval 1"
    places = ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "metrics.jsonl")]
    began = time.monotonic()
    with mock.patch.object(loop, "train_step", slow):
        assert main(["pretrain", *words.split(), *places]) == 0
    whole = time.monotonic() - began
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    assert len(seconds) == 8 and min(seconds) >= SLOW and sum(seconds) <= whole
    assert sorted(seconds)[4] < 1.8 * SLOW, "a step's time holds another's"
