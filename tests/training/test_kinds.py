"""Tasks of a run: one from outside in the same loop, and `mega finetune` as a run that starts from other weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.config.sections import TASKS
from mega.core.training.kinds import KINDS, register_task
from tests.support import toy_task

SHAPE = "--layers 1 --hidden 16 --heads 2 --vocab 37 --no-tied".split()
RUN = (
    "--seq-length 8 --global-batch 4 --micro-batch 2 --lr 1e-2 --lr-decay constant --eval-iters 1 --eval-interval 2 "
    "--save-interval 2 --log-interval 1 --device cpu --hidden-dropout 0 --attention-dropout 0"
).split()


def rows(place: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def counting() -> Iterator[None]:
    register_task(toy_task.NAME, lambda: toy_task.KIND)
    yield
    del KINDS[toy_task.NAME], TASKS[toy_task.NAME]


def test_another_task_in_the_same_loop(counting: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    assert main(["pretrain", *SHAPE, *RUN, "--mock-data", "--steps", "2", "--save", str(base)]) == 0
    start = ["finetune", *RUN, "--load", str(base), "--save", str(tuned), "--task", "counting", "--resume", "auto"]
    assert main([*start, "--steps", "4", "--override-schedule"]) == 0
    # the iteration, the optimizer and the data begin again; the model is the checkpoint's
    first = next(row for row in rows(tuned) if "loss" in row and "lr" in row)
    assert (first["step"], first["consumed"]) == (1, 4)
    assert any("valid_surprise" in row for row in rows(tuned))
    # the same line resumes, another task is refused in one line
    assert main([*start, "--steps", "6", "--override-schedule"]) == 0
    assert "resuming from" in capsys.readouterr().out
    assert [row["step"] for row in rows(tuned) if "lr" in row] == [1, 2, 3, 4, 5, 6]
    other = ["pretrain", *SHAPE, *RUN, "--mock-data", "--save", str(tuned), "--resume", "auto", "--steps", "8"]
    assert main(other) == 2
    assert "--task lm: " in (said := capsys.readouterr().err) and "--task counting" in said


def test_an_unknown_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *SHAPE, *RUN, "--mock-data", "--steps", "2", "--task", "mnlii"]) == 2
    assert "mnlii" in (said := capsys.readouterr().err) and "lm" in said
