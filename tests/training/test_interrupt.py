"""Ctrl-C, a scheduler's signals: a run saves and stops, however many of its processes the signal reaches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.parallel import launch
from mega.core.parallel.launch import Pool
from mega.core.parallel.mesh import Groups
from mega.core.training import evaluation
from mega.core.training.inputs import open_inputs, resolve_run
from mega.core.training.start import start

RUN = (
    "--layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 --steps 1000000 "
    "--eval-iters 0 --save-interval 20 --log-interval 100000 --device cpu --nproc 2"
).split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_job_saves_and_stops(number: signal.Signals, tmp_path: Path) -> None:
    """As a terminal's Ctrl-C and `scancel` send it: to the launcher, its server and every rank at once."""
    command = [sys.executable, "-m", "mega", "pretrain", *RUN, "--save", str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    store, deadline = CheckpointStore(tmp_path), time.monotonic() + 100
    while not store.steps() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(job.pid, number)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert f"stopped at step {store.steps()[-1]}" in said and "Traceback" not in said


LONG = {
    **{"layers": 1, "hidden": 8, "heads": 1, "seq_length": 8, "vocab": 64, "mock_data": True, "micro_batch": 1},
    **{"lr": 1e-3, "steps": 6, "save_interval": 3, "eval_interval": 2, "eval_iters": 5, "resume": "auto"},
}


def _trained(groups: Groups, rank: int, place: str, stop: tuple[int, int] | None) -> tuple[int, int]:
    """Job: steps and validation samples of a run on two ranks; `stop`: a rank, and the batch at which it is asked."""
    whole, batches = evaluation.evaluate_step, 0

    def evaluate(*arguments: Any) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if stop == (rank, batches):
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*arguments)

    with mock.patch.object(evaluation, "evaluate_step", evaluate):
        prepared = open_inputs(resolve_run(compose(flags=LONG | {"save": place}), 2))
        training = start(prepared, rank, 2, Device.choose("cpu"), groups, contextlib.ExitStack())
        training.play()
    progress = training.state.progress
    return progress.step, progress.consumed_valid


def _figures(place: Path) -> dict[int, float]:
    """Step -> the last validation loss reported at it."""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}


def test_a_validation_is_cut_short_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    """One of two ranks is asked in the third of five batches: both leave after it, save, and lose nothing by that."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert pool.run(_trained, str(straight), None, world=2) == [(6, 30)] * 2
    assert pool.run(_trained, str(cut), (1, 3), world=2) == [(2, 10)] * 2  # as after a whole validation
    assert CheckpointStore(cut).steps() == [2] and _figures(cut) == {}
    assert pool.run(_trained, str(cut), None, world=2) == [(6, 30)] * 2
    one, other = (CheckpointStore(place).open(6) for place in (straight, cut))
    assert not list(diff(one, other)) and one.meta["progress"] == other.meta["progress"]
    figures = _figures(straight)
    assert sorted(figures) == [2, 4, 6]
    assert _figures(cut) == {step: figures[step] for step in (4, 6)}


def test_the_same_signal_twice_is_one_and_a_later_ctrl_c_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = launch.RepeatedSignal()
    assert not asked.repeats(signal.SIGINT)
    now += 0.5
    assert not asked.repeats(signal.SIGINT)
    now += 10
    assert not asked.repeats(signal.SIGTERM)
    assert asked.repeats(signal.SIGINT)


def test_threads_are_what_the_user_sets_or_a_share_of_the_cores_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launch.threads(ranks) for ranks in (1, 4, 99)] == [12, 3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch.threads(4) == 2
