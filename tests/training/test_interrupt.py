"""Ctrl-C, a scheduler's signals: a run saves and stops, however many of its processes the signal reaches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.files import locked_alone
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes import connect, launch, signals
from mega.core.processes.pool import Pool
from mega.core.processes.roll_call import LOST
from mega.core.processes.world import LAUNCHER_FILE
from mega.core.training import evaluation, notice
from mega.core.training.start import rank
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start
from mega.core.training.stop import StopSignal

RUN = (
    "--layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 --steps 1000000 "
    "--eval-iters 0 --save-interval 20 --log-interval 100000 --device cpu --nproc 2"
).split()


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-c", f"from {__name__} import play; play()")
"""Not this file as a script, which each rank would import again."""

pytestmark = pytest.mark.timeout(900)  # on a busy machine each of the runs of `endings` takes a minute to start
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, tuple[int, str]]]]:
    """A folder, and by signal: the exit code of a run whose whole job it reached, and what was said.

    As a terminal's Ctrl-C and `scancel` send it: to the launcher, its server and every rank at once. One launcher has
    all the runs, each in a folder of its own; it is killed in the last one.
    """
    place = tmp_path_factory.mktemp("runs")
    (place / "tmp").mkdir()
    names = [each.name for each in SIGNALS]
    job = subprocess.Popen(
        [*PROGRAM, str(place), *names, "SIGKILL"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(place / "tmp"), "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    for name in [*names, "SIGKILL"]:
        store, deadline = CheckpointStore(place / name), time.monotonic() + 300
        while not store.steps() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if name == "SIGKILL":
            assert len(list((place / "tmp").iterdir())) == 1
            job.kill()
        else:
            os.killpg(job.pid, signal.Signals[name])
            while not (place / f"{name}.code").exists() and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
    said, _ = job.communicate(timeout=300)  # when its ranks have ended, which hold the same pipe
    parts = dict(part.split("\n", 1) for part in said.split("== ")[1:])
    yield place, {name: (int((place / f"{name}.code").read_text()), parts[name]) for name in names}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_whole_job_saves_stops_and_is_its_exit_code(
    number: signal.Signals, endings: tuple[Path, dict[str, tuple[int, str]]]
) -> None:
    place, by_signal = endings
    code, said = by_signal[number.name]
    assert code == 128 + number, said
    told = [line for line in said.splitlines() if line.startswith(f"mega: {number.name} received: finishing ")]
    assert len(told) == 1 and f", then saving to {place / number.name}" in told[0], said
    assert told[0].endswith("; Ctrl-C again leaves at once") == (number == signal.SIGINT)
    last = said.splitlines()[-1]
    assert last == f"stopped at step {CheckpointStore(place / number.name).steps()[-1]}: {number.name} was received", (
        said
    )


def test_a_launcher_that_was_killed_leaves_nothing(endings: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    place, _ = endings
    assert not list((place / "tmp").iterdir())


def _one_is_interrupted(seconds: float) -> None:
    """As Ctrl-C ends ranks that are still starting, but for one that is in a call that does not hear it."""
    if os.environ["RANK"] == "0":
        raise KeyboardInterrupt
    time.sleep(seconds)


def test_one_rank_that_does_not_hear_ctrl_c_does_not_keep_the_others_waiting() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch.launch(2, _one_is_interrupted, 500.0)
    assert time.monotonic() < began + 300  # that long on a busy machine


def test_what_launchers_left_that_were_killed_with_all_their_ranks_is_removed(tmp_path: Path) -> None:
    hosts = {"dead": socket.gethostname(), "alive": socket.gethostname(), "of another host": "elsewhere"}
    for name, host in hosts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / launch._MARK).write_text(host)
    (tmp_path / "no launcher's").mkdir()
    with open(tmp_path / "alive" / launch._MARK) as mark:
        assert locked_alone(mark.fileno())
        launch._remove_abandoned(str(tmp_path))
    assert {each.name for each in tmp_path.iterdir()} == {"alive", "of another host", "no launcher's"}


def test_nohup_keeps_a_run_from_the_end_of_its_terminal() -> None:
    assert set(signals.handled_signals()) == set(signals.STOPPING)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert set(signals.handled_signals()) == set(signals.STOPPING) - {signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, before)


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


def test_a_second_ctrl_c_is_told_what_it_costs_and_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are heard by a thread, whatever the main one waits for."""
    left = threading.Event()
    monkeypatch.setattr(signals, "SAME_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(notice.os, "_exit", lambda code: left.set() if code == 130 else None)
    monkeypatch.setattr(notice, "LEAVES_WITHIN", 0.0)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    outlook = notice.Outlook("finishing step 24", step=23, saved_step=20, place="runs/first")
    told = notice.SignalNotice([signal.SIGINT], outlook, prints=True)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert left.wait(60)
    finally:
        told.close()
        signal.signal(signal.SIGINT, before)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "mega: SIGINT received: finishing step 24, then saving to runs/first; Ctrl-C again leaves at once"
    assert second.startswith("mega: leaving at once: lost is what was trained after step 20")


def test_after_a_second_ctrl_c_signals_mean_again_what_they_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, which goes on; until the run is closed it hears no more of them."""
    monkeypatch.setattr(signals, "SAME_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(notice.os, "_exit", lambda code: None)
    before = {number: signal.getsignal(number) for number in signals.handled_signals()}
    run = StopSignal(Mesh.at(0).everyone, torch.device("cpu"), on_signal=True, minutes=None, prints=False)
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        run.close()
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_that_cannot_start_leaves_signals_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)

    def fail(*arguments: object) -> None:
        assert signal.getsignal(signal.SIGINT) != before
        raise OSError("the file of metrics cannot be written")

    monkeypatch.setattr(rank, "_meters", fail)
    prepared = open_inputs(resolve_run(compose(flags=LONG | {"save": str(tmp_path)}), 1))
    with pytest.raises(OSError, match="metrics"), contextlib.ExitStack() as held:
        start(prepared, 0, 1, Device.choose("cpu"), Groups("gloo", timedelta(minutes=1)), held)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_waits_until_its_notice_is_written_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is given no core, as on a busy machine, until `core` is set."""
    core, written = threading.Event(), list[str]()

    def write(text: str) -> None:
        assert core.wait(60)
        written.append(text)

    monkeypatch.setattr(notice, "write_error", write)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    told = notice.SignalNotice([signal.SIGUSR1], notice.Outlook("finishing step 24"), prints=True)
    try:
        told.settle()  # nothing has come
        os.kill(os.getpid(), signal.SIGUSR1)
        monkeypatch.setattr(notice, "NOTICE_WITHIN", 0.1)
        told.settle()
        assert not written
        monkeypatch.setattr(notice, "NOTICE_WITHIN", 60.0)
        threading.Timer(0.2, core.set).start()
        told.settle()
        assert len(written) == 1 and written[0].startswith("mega: SIGUSR1 received: finishing step 24, ")
    finally:
        core.set()
        told.close()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("killed", [False, True])
def test_no_save_is_promised_after_a_rank_was_killed(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher, which has said so, asks the others to end."""
    monkeypatch.setenv(LAUNCHER_FILE, str(tmp_path / "meeting"))
    if killed:
        (tmp_path / f"meeting{LOST}").write_text("rank 1 was killed by SIGKILL")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    told = notice.SignalNotice([signal.SIGTERM], notice.Outlook("finishing step 24", "runs/first"), prints=True)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        told.settle()
    finally:
        told.close()
        signal.signal(signal.SIGTERM, before)
    assert ("then saving to runs/first" in capsys.readouterr().err) is not killed


def test_the_same_signal_twice_is_one_and_a_later_ctrl_c_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = signals.RepeatedSignal()
    assert not asked.repeats(signal.SIGINT)
    now += 0.5
    assert not asked.repeats(signal.SIGINT)
    now += 10
    assert not asked.repeats(signal.SIGTERM)
    assert asked.repeats(signal.SIGINT)


def test_a_rank_is_interrupted_once() -> None:
    """Ctrl-C at a terminal reaches a rank itself, and again from its launcher, while it ends."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signals.restore_signals([signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_are_what_the_user_sets_or_a_share_of_the_cores_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [connect.threads(ranks) for ranks in (1, 4, 99)] == [12, 3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert connect.threads(4) == 2


def _read(terminal: int) -> bytes:
    """What has been drawn on a terminal since."""
    os.set_blocking(terminal, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(terminal, 1 << 16)
    return b""


def test_a_terminal_that_is_closed_costs_no_step(tmp_path: Path) -> None:
    """As when ssh drops: SIGHUP, and whatever draws on the terminal meets an error from then on. A bar is drawn, by one
    of two ranks on the first terminal, by the process itself on the second."""
    ours, theirs = zip(*(os.openpty() for _ in range(2)), strict=True)
    terminals = [f"{ranks}:{terminal}" for ranks, terminal in zip("21", theirs, strict=True)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs[0])
    command = [*PROGRAM, str(tmp_path), *terminals]
    job = subprocess.Popen(command, **streams, cwd=ROOT, pass_fds=theirs, start_new_session=True)
    for terminal in theirs:
        os.close(terminal)
    for name, terminal in zip(terminals, ours, strict=True):
        shown, rows, deadline = b"", tmp_path / f"{name}.rows", time.monotonic() + 300
        while not (rows.exists() and rows.stat().st_size) and job.poll() is None and time.monotonic() < deadline:
            shown += _read(terminal)
            time.sleep(0.02)
        os.close(terminal)
        while not (code := tmp_path / f"{name}.code").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert code.exists() and int(code.read_text()) == 128 + signal.SIGHUP, shown.decode(errors="replace")
        steps = [json.loads(line)["step"] for line in rows.read_text().splitlines()]
        assert CheckpointStore(tmp_path / name).steps()[-1] == steps[-1]
    assert job.wait(300) == 0


def _write(code: int, place: Path) -> None:
    place.with_suffix(".tmp").write_text(str(code))
    os.replace(place.with_suffix(".tmp"), place)


def play() -> None:
    """A run for each word: of a signal that will come, or of so many ranks on a terminal."""
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        ranks, _, terminal = name.partition(":")
        if terminal:
            os.login_tty(int(terminal))
            more = ["--nproc", ranks, "--metrics", str(folder / f"{name}.rows")]
        else:
            print("==", name, flush=True)
            more = []
        _write(main(["pretrain", *RUN, "--save", str(folder / name), *more]), folder / f"{name}.code")
