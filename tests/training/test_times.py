"""The seconds that a run reports of its steps: each has its own, whichever routines run between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega.cli import main
from mega.core import device
from mega.core.training import evaluation, loop
from mega.core.training.saves.saver import Saver

STEP, VALIDATION, SAVE = 1.0, 0.25, 8.0
"""Seconds that each takes, of a clock that nothing else moves; all sums of them are exact."""


def test_a_step_has_its_own_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation after every third step, a save after every fourth; both take longer than a step."""
    now = 0.0
    counted = {STEP: 0, VALIDATION: 0, SAVE: 0}

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal now
            now += seconds
            counted[seconds] += 1
            return function(*given)

        return call

    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(loop, "train_step", taking(STEP, loop.train_step))
    monkeypatch.setattr(evaluation, "evaluate_step", taking(VALIDATION, evaluation.evaluate_step))
    monkeypatch.setattr(Saver, "save", taking(SAVE, Saver.save))
    words = "--layers 1 --hidden 16 --heads 2 --vocab 64 --seq-length 8 --micro-batch 1 --global-batch 2 --lr 1e-3"
    words += " --steps 8 --mock-data --device cpu --eval-interval 3 --eval-iters 5 --save-interval 4 --log-interval 1"
    places = ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "metrics.jsonl")]
    assert main(["pretrain", *words.split(), *places]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["seconds"] for row in rows if "seconds" in row] == [STEP] * 8, "a step's time holds another's"
    assert counted == {STEP: 8, VALIDATION: (3 + 1) * 5, SAVE: 2}
