"""Ranks that are started again: after what, how often, from where, and on which hosts."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from mega.cli import main
from mega.core.parallel.mesh import Mesh
from mega.core.processes import hosts, launch, restarts
from mega.core.processes.hosts import Supervisor, supervise_hosts
from mega.core.processes.launch import fork_server, local_environments, run_attempt
from mega.core.processes.leader import Size
from mega.core.processes.restarts import Job, Restarts, supervise
from mega.core.processes.world import LAUNCHED, supervised_ranks, world_from_env
from mega.core.training.stop import StopSignal
from tests.support.lost_host import one_host

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 2 "
    "--lr 1e-3 --steps 60 --eval-iters 0 --device cpu --nproc 2 --max-restarts 2"
).split()


def ends(how: str) -> int:
    """A rank of its own will."""
    if how == "mistake":
        raise ValueError("--lr -1: must be positive")
    if how == "diverged":
        raise FloatingPointError("step 3: the loss is nan")
    if how == "disk":
        raise OSError("disk full")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(how)


@pytest.mark.parametrize(
    ("how", "code", "final", "reason"),
    [
        ("0", 0, True, ""),
        ("143", 143, True, ""),
        ("mistake", 2, True, "rank 0: --lr -1: must be positive"),
        ("diverged", 1, True, "rank 0: step 3: the loss is nan"),
        ("disk", 1, False, "rank 0: disk full"),
        ("killed", 137, False, "rank 0 was killed by SIGKILL"),
        ("7", 7, False, "rank 0 ended with exit code 7"),
    ],
)
def test_which_endings_are_final(how: str, code: int, final: bool, reason: str) -> None:
    ending = run_attempt(local_environments(1), ends, (how,))
    assert ending is not None and (ending.code, ending.final, ending.reason) == (code, final, reason)


def test_the_module_of_a_partials_function_is_imported_before_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(multiprocessing.forkserver, "set_forkserver_preload", imported.extend)
    ending = run_attempt(local_environments(1), partial(partial(ends, "0")), ())
    assert ending is not None and ending.code == 0
    assert imported[-1] == ends.__module__


def test_a_killed_rank_is_named_though_other_hosts_were_faster(tmp_path: Path) -> None:
    """Their end and the word of it come at the same moment."""
    rank = fork_server().Process(target=ends, args=("killed",), name="rank 0")
    rank.start()
    assert wait([rank.sentinel], 60)
    bell, ring = multiprocessing.Pipe(duplex=False)
    ring.send_bytes(b".")
    ending = launch._supervise([rank], launch._Endings(str(tmp_path / "attempt"), 0.2), bell)
    assert ending is not None and ending.reason == "rank 0 was killed by SIGKILL" and ending.here


def fails_until(place: str, attempts: int, resumes: bool) -> int:
    """A rank that fails in its first attempts, and notes each."""
    with open(place, "a") as notes:
        notes.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {resumes}\n")
    return 0 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= attempts else 3


@pytest.mark.parametrize(
    ("limit", "saved", "code", "attempts"),
    [
        (2, lambda restarts: 0, 0, ["0 False", "1 False", "2 False"]),
        (1, lambda restarts: 0, 3, ["0 False", "1 False"]),
        (1, lambda restarts: 10 * restarts, 0, ["0 False", "1 True", "2 True"]),
    ],
    ids=["limit", "gives up", "progress"],
)
def test_restarts_are_limited_without_a_newer_save(
    limit: int, saved: object, code: int, attempts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes"

    def newest() -> int:
        return saved(len(notes.read_text().splitlines()) if notes.exists() else 0)  # type: ignore[operator, no-any-return]

    job = Job(fails_until, lambda resumes: (str(notes), 2, resumes), newest)
    assert supervise(1, limit, job) == code
    assert notes.read_text().splitlines() == attempts
    said = capsys.readouterr().err
    assert said.count("mega: restart ") == len(attempts) - 1
    assert ("mega: gave up after 1 restarts in a row in which no step was saved" in said) == bool(code)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    place = tmp_path_factory.mktemp("undisturbed")
    assert main([*RUN, "--save-interval", "10", "--save", str(place)]) == 0
    return _tensors(place)


@pytest.mark.parametrize(
    "how",
    [["--save-interval", "10"], ["--save-interval", "1000", "--peer-copy-interval", "5"]],
    ids=["disk", "memory"],
)
def test_a_lost_rank_costs_nothing_but_time(
    how: list[str],
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, folders = tmp_path / "metrics.jsonl", list[str]()
    monkeypatch.setattr(restarts, "lock_folder", folders.append)

    def kill() -> None:
        while not metrics.exists() or '"step": 20,' not in metrics.read_text():
            time.sleep(0.01)
        rank = next(each for each in multiprocessing.active_children() if each.name == "rank 1")
        os.kill(rank.pid, signal.SIGKILL)  # type: ignore[arg-type]

    threading.Thread(target=kill, daemon=True).start()
    assert main([*RUN, *how, "--save", str(tmp_path)]) == 0
    assert "mega: restart 1, from step " in capsys.readouterr().err
    assert _tensors(tmp_path) == undisturbed
    assert len(folders) == ("--peer-copy-interval" in how) and not any(map(os.path.exists, folders))


def test_a_restart_resumes_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--no-load-optim is about what the run begins with, not about its own saves."""
    jobs = list[Job]()
    monkeypatch.setattr(restarts, "supervise", lambda nproc, limit, job: jobs.append(job) or 0)
    save = ["--save", str(tmp_path), "--save-interval", "10", "--load", str(tmp_path), "--no-load-optim"]
    assert main([*RUN, *save]) == 0
    read = [jobs[0].args(resumes)[0].run.checkpoint for resumes in (False, True)]
    assert [(each.resume, each.load_optim) for each in read] == [(None, False), ("auto", True)]
    assert jobs[0].alike["--lr"] == "0.001" and "the version of mega" in jobs[0].alike


def _tensors(place: Path) -> dict[str, bytes]:
    """What the last save holds, weights and moments, by file and name."""
    files = sorted((place / "step-0000060").glob("*.safetensors"))
    assert files
    return {f"{path.name} {name}": array.tobytes() for path in files for name, array in load_file(path).items()}


def test_a_spare_takes_the_place_of_the_host_that_led(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", f"from {one_host.__module__} import one_host; one_host({str(tmp_path)!r})"]
    first = subprocess.Popen(command, env=variables)
    while not (tmp_path / "attempt-0").exists():
        time.sleep(0.05)
    spare = subprocess.Popen(command, env=variables, text=True, stderr=subprocess.PIPE)
    assert spare.stderr is not None and "this host is a spare" in spare.stderr.readline()
    (tmp_path / "spare").touch()
    assert (first.wait(timeout=120), spare.wait(timeout=120)) == (-9, 0)
    assert "which led the others, was lost" in spare.stderr.read()
    assert (tmp_path / "attempt-1").exists()


def test_the_name_of_the_first_host_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod's own name does in Kubernetes."""
    with socket.socket() as one:
        one.bind(("", 0))
        monkeypatch.setenv("MASTER_PORT", str(one.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    answers = iter([False, False])
    monkeypatch.setattr(hosts, "is_own", lambda name: next(answers, True))
    assert supervise_hosts(1, 1, 0, 0.1, Job(ends, lambda resumes: ("0",), lambda: 0)) == 0


def test_who_starts_ranks_again_is_the_one_who_started_them() -> None:
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
    cases = [
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, 2, None, "torchrun starts ranks again itself"),
        (srun, 4, 2, "slurm has started 8 ranks, 4 on this host"),
        ({}, 4, 2, "MASTER_ADDR is not set: must be the first rank's host, where 8 ranks meet"),
    ]
    pods = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456"}
    assert supervised_ranks(world_from_env(pods), 8, 4, pods) == 32 and "RANK" not in pods
    for environ, nproc, count, rule in cases:
        with pytest.raises(ValueError, match=rule):
            supervised_ranks(world_from_env(environ), nproc, count, environ)


def stays(place: str) -> int:
    """A rank that heeds nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(place).touch()
    time.sleep(60)
    return 0


def test_a_signal_while_ranks_are_ended_leaves_none_of_them(tmp_path: Path) -> None:
    """The first is passed on, or noted, until the ranks have ended; those that follow change nothing."""
    ready, bell = tmp_path / "ready", multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        while not ready.exists():
            time.sleep(0.01)
        bell[1].send_bytes(b".")
        for _ in range(3):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    with restarts.stopping_on_signals():
        asking.start()
        with pytest.raises(restarts.Stopped):
            run_attempt(local_environments(1), stays, (str(ready),), bell[0], 1.5)
        asking.join()
    until = time.monotonic() + 30  # killed, but a busy machine takes a while to say so
    while left := [each for each in multiprocessing.active_children() if each.name == "rank 0"]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


class Elsewhere(OSError):
    """What a rank is told of another one's end."""

    elsewhere = True


def saves_when_asked(place: str, ends: str) -> int:
    """A rank that saves for a while when it is asked to stop."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(place).touch()
    while not asked.wait(0.05):  # no signal acts in a wait without end
        pass
    time.sleep(0.8)
    if ends == "alone":
        raise Elsewhere("lost another rank")
    return 128 + signal.SIGTERM


@pytest.mark.parametrize("ends", ["well", "alone"])
def test_ranks_that_were_asked_to_stop_save_whatever_other_hosts_do(ends: str, tmp_path: Path) -> None:
    """The run is not started again: it was to stop."""
    ready, bell = tmp_path / "ready", multiprocessing.Pipe(duplex=False)
    before = signal.getsignal(signal.SIGTERM)

    def ask() -> None:
        while not ready.exists() or signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        bell[1].send_bytes(b".")

    asking = threading.Thread(target=ask)
    asking.start()
    ending = run_attempt(local_environments(1), saves_when_asked, (str(ready), ends), bell[0], 0.2)
    asking.join()
    assert ending is not None and (ending.code, ending.final) == (143, True)


class Gone:
    """A connection to a leader that welcomes a host and is lost in the same moment."""

    def __init__(self, connection: socket.socket):
        self.closed = False
        connection.close()

    def start(self, heard: Callable[[dict[str, object]], None], lost: Callable[[], None]) -> None:
        heard({"welcome": ["a"]})
        self.closed = True
        lost()

    def send(self, message: object) -> None:
        pass


def test_a_leader_that_is_lost_as_a_host_joins_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes to another one; or ends, where its ranks were asked to stop."""
    monkeypatch.setattr(hosts, "Wire", Gone)
    host = Supervisor(Size(1, 1, 1.0, 1, ""), Job(ends, lambda resumes: ("0",), lambda: 0), None, 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        host.join(server.getsockname(), 0.0)
    host._final = 143
    assert host.play() == 143


def notes_its_launch(place: str) -> int:
    with open(place, "a") as notes:
        notes.write(os.environ[LAUNCHED] + "\n")
    return 3


def test_a_restart_counts_minutes_from_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, before = tmp_path / "notes", time.monotonic()
    assert supervise(1, 1, Job(notes_its_launch, lambda resumes: (str(notes),), lambda: 0)) == 3
    first, second = map(float, notes.read_text().split())
    assert before <= first == second
    there = Restarts.from_message(**Restarts(1, launched=first).to_message())  # on a host with a clock of its own
    assert first <= there.launched < first + 1.0
    monkeypatch.setenv(LAUNCHED, str(time.monotonic() - 90))
    everyone, device = Mesh.at(0).everyone, torch.device("cpu")
    for minutes, over in ((1, True), (2, False)):
        stop = StopSignal(everyone, device, on_signal=False, minutes=minutes, prints=False)
        stop.poll().read()
        assert stop.requested == over


def test_folders_of_others_are_left(tmp_path: Path) -> None:
    """Anyone may put a pipe there, which waits for who writes into it, or a link."""
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / launch._MARK)
    for name in ("link", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / launch._MARK).write_text(socket.gethostname())
    (tmp_path / "link" / launch._MARK).symlink_to(tmp_path / "own" / launch._MARK)
    tidying = threading.Thread(target=launch._remove_abandoned, args=(str(tmp_path),), daemon=True)
    tidying.start()
    tidying.join(60)
    assert not tidying.is_alive()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_restarts_that_bring_nothing_are_counted() -> None:
    restarts = Restarts(limit=2, began=20, saved=20, best=20)
    once = restarts.after(20)
    assert (
        once is not None
        and not once.resumes
        and once.restart("x").startswith("restart 1, from step 20 (1 of at most 2")
    )
    twice = once.after(40)
    assert twice is not None and twice.resumes and (twice.number, twice.without_progress) == (2, 1)
    thrice = once.after(20, held=30)
    assert thrice is not None and not thrice.resumes and (thrice.best, thrice.without_progress) == (30, 1)


def test_mistakes_are_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    bare = RUN[: RUN.index("--nproc")]
    assert main([*bare, "--max-restarts", "1"]) == 2
    assert "--max-restarts 1: needs --save" in capsys.readouterr().err
    assert main([*bare, "--hosts", "2"]) == 2
    assert "--hosts 2: needs --nproc" in capsys.readouterr().err
