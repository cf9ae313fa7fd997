"""Ctrl-C, a scheduler's signals: a run saves and stops, however many of its processes the signal reaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega.core.checkpoint.store import CheckpointStore
from mega.core.parallel import launch

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


def test_the_same_signal_twice_is_one_and_a_later_ctrl_c_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = launch.Asked()
    assert not asked.again(signal.SIGINT)
    now += 0.5
    assert not asked.again(signal.SIGINT)
    now += 10
    assert not asked.again(signal.SIGTERM)
    assert asked.again(signal.SIGINT)


def test_threads_are_what_the_user_says_or_a_share_of_the_cores_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launch.threads(ranks) for ranks in (1, 4, 99)] == [12, 3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch.threads(4) == 2
