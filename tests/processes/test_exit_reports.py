"""Failures of ranks are read once: the cause, with the rank's number where ranks differ, before or without all else."""

from __future__ import annotations

import doctest
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega import cli
from mega.core.activity import ACTIVITY, Activity
from mega.core.checkpoint.own.store import CheckpointStore, SaveError
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Axis
from mega.core.processes import exit_reports, position, rendezvous, roll_call
from mega.core.processes import launch as launcher
from mega.core.processes.connect import connect, disconnect
from mega.core.processes.launch import run_attempt
from mega.core.processes.world import MEETING_FILE, World


def _patient() -> None:
    """Of ranks that all have an error to report: on a busy machine one may come seconds after the others."""
    exit_reports.GRACE, exit_reports.LIMIT = 30.0, 60.0


def _same_mistake() -> int:
    _patient()
    connect("cpu")
    raise ValueError("--load here: does not fit\n--hidden 8: must be 16")


def _same_fault() -> int:
    _patient()
    connect("cpu")
    raise KeyError("ours")


def _own_mistakes() -> int:
    _patient()
    world, _, _ = connect("cpu")
    raise OSError(f"{'even' if world.rank % 2 == 0 else 'odd'} disks are full")


def _one_mistake() -> int:
    """Rank 2 alone; the others wait for it in an exchange and lose it there."""
    exit_reports.GRACE = BRIEF
    world, _, _ = connect("cpu")
    if world.rank == 2:
        raise ValueError("--data-path bad: damaged")
    return _exchange()


def _mistake_before_they_met() -> int:
    exit_reports.GRACE = BRIEF
    if os.environ["RANK"] == "1":
        raise ValueError("--data-path bad: damaged here")
    connect("cpu")
    return _exchange()


def _killed() -> int:
    _patient()  # the launcher, which knows more, may come late
    world, _, _ = connect("cpu")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _exchange()


def _killed_along_with_a_fault() -> int:
    _patient()  # the launcher, which knows more, may come late
    world, _, _ = connect("cpu")
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 2:
        raise OSError("no space left on device")
    return _exchange()


def _lost(port: int) -> int:
    """Ranks without a supervisor, as of srun: one ends silently, the others know no cause."""
    _meet_at(port)
    world, _, _ = connect("cpu")
    if world.rank == 1:
        signal.pause()
    raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1234")


def _same_mistake_at_an_address(port: int) -> int:
    """Before they have met there, and at the same time."""
    _patient()
    connect("cpu")
    _exchange()  # or else a slow rank finds the others gone
    disconnect()
    _meet_at(port)
    raise ValueError("--lr 0: must be positive")


def _stopped() -> int:
    """Rank 1 stands still, as under a debugger or on a host that swaps."""
    exit_reports.GRACE = BRIEF
    world, _, groups = connect("cpu", timeout_minutes=SECONDS / 60)
    groups.create([(0, 1)], "own")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=groups.get((0, 1), "own"))
    return 0


def _slow_save() -> int:
    """Rank 0 takes longer than ranks have to answer, but not longer than a save may take."""
    return _save_for(SLOW_SECONDS, 60 * SLOW_SECONDS)


def _endless_save() -> int:
    return _save_for(600.0, SLOW_SECONDS)


def _save_for(seconds: float, phase_seconds: float) -> int:
    world, _, groups = connect("cpu", timeout_minutes=SECONDS / 60, phase_timeout_minutes=phase_seconds / 60)
    groups.create([(0, 1, 2)], "own")
    ACTIVITY.phase, ACTIVITY.step = "training", 8
    if world.rank == 0:
        with ACTIVITY.during("saving"):
            time.sleep(seconds)
    all_reduce(torch.ones(1), Axis("own", (0, 1, 2), world.rank, groups.get((0, 1, 2), "own")))
    return 0


def _endless_step() -> int:
    """Without end, in a phase that is to be short."""
    world, _, groups = connect("cpu", timeout_minutes=SECONDS / 60, phase_timeout_minutes=60)
    groups.create([(0, 1, 2)], "own")
    ACTIVITY.phase, ACTIVITY.step = "training", 8
    if world.rank == 2:
        time.sleep(600)
    all_reduce(torch.ones(1), Axis("own", (0, 1, 2), world.rank, groups.get((0, 1, 2), "own")))
    return 0


def _never_came(port: int) -> int:
    """Three ranks of four."""
    exit_reports.COMING = 3.0  # what is said later, on a busy machine, would be a line of its own
    connect("cpu")  # all are there when the clock starts, on the busiest machine
    _exchange()
    disconnect()
    _meet_at(port)
    os.environ["WORLD_SIZE"] = "4"
    connect("cpu", timeout_minutes=0.05)
    return 0


def _server_killed() -> int:
    """By one of the ranks, when all have started."""
    world, _, _ = connect("cpu")
    if world.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    return 0


def _meet_at(port: int) -> None:
    del os.environ[MEETING_FILE]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _exchange() -> int:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    return 0


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


CASES: tuple[Callable[..., int], ...] = (
    *(_same_mistake, _same_fault, _own_mistakes, _one_mistake, _mistake_before_they_met, _killed),
    *(_killed_along_with_a_fault, _same_mistake_at_an_address, _lost, _stopped, _never_came),
    *(_slow_save, _endless_save, _endless_step, _server_killed),
)
BRIEF = 0.5
"""Seconds for reports of others, of a rank that alone has one."""

SECONDS, SLOW_SECONDS = 2.4, 4.0
"""Of --timeout-minutes, and of a save that takes longer."""

STUCK = (_stopped, _endless_save, _endless_step)
"""Cases with a rank that heeds no signal: it is killed at last, here after one second of asking."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, list[str]]]:
    """Case -> exit code of three ranks, lines on stderr. All in one process: its ranks write where it does."""
    environ = {name: value for name, value in os.environ.items() if name != "MEGA_DEBUG"}
    environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line sets it
    command = [sys.executable, "-c", f"from {__name__} import play; play()"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    found = {}
    for part in done.stderr.split("== ")[1:]:
        name, *lines, code = part.splitlines()
        # A rank that still meets the others when one of them ends says so through torch's own log, on a busy machine.
        found[name] = int(code), [line for line in lines if not re.match(r"\[E\d{4} .* ProcessGroupGloo", line)]
    return found


@pytest.mark.parametrize("module", [exit_reports, launcher, rendezvous, roll_call, position])
def test_examples(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_what_all_report_is_read_once(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    lines = ["mega: --load here: does not fit", "mega: --hidden 8: must be 16"]
    assert outcomes["_same_mistake"] == (2, lines)
    assert outcomes["_same_mistake_at_an_address"] == (2, ["mega: --lr 0: must be positive"])


def test_a_fault_of_ours_shows_one_traceback(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    code, lines = outcomes["_same_fault"]
    assert code == 1 and lines[0].startswith("Traceback") and lines[-1] == "KeyError: 'ours'"
    assert sum("Traceback" in line for line in lines) == 1


def test_what_differs_is_reported_with_its_ranks(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    assert outcomes["_own_mistakes"] == (
        1,
        ["mega: ranks 0, 2: even disks are full", "mega: rank 1: odd disks are full"],
    )


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("_one_mistake", "mega: rank 2: --data-path bad: damaged"),
        ("_mistake_before_they_met", "mega: rank 1: --data-path bad: damaged here"),
    ],
)
def test_what_one_rank_met_is_reported_without_its_peers_losing_it(
    case: str, line: str, outcomes: dict[str, tuple[int, list[str]]]
) -> None:
    assert outcomes[case] == (2, [line])


def test_a_killed_rank_is_named_and_its_peers_report_nothing(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    code, (line,) = outcomes["_killed"]
    assert code == 128 + signal.SIGKILL
    assert line.startswith("mega: rank 1 was killed by SIGKILL: ") and "memory" in line


def test_a_peer_with_a_reason_of_its_own_reports_it_too(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    _, lines = outcomes["_killed_along_with_a_fault"]
    assert len(lines) == 2, lines
    assert lines[0].startswith("mega: rank 1 was killed") and lines[1] == "mega: rank 2: no space left on device"


def test_a_save_that_failed_on_another_rank_is_left_to_that_one(tmp_path: Path) -> None:
    """The second rank is well, and hears that the first is not."""
    with pytest.raises(SaveError) as found:
        CheckpointStore(tmp_path).save(1, [], {}, rank=1, world=2, agree=lambda fine: False)
    other = exit_reports.report_of(found.value)
    own = exit_reports.report_of(SaveError("step 1 was not saved: disk full"))
    assert exit_reports.format_exits({0: own, 1: other}, 2) == "mega: rank 0: step 1 was not saved: disk full\n"


def test_a_lost_peer_is_reported_where_no_rank_knows_more(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    code, (line,) = outcomes["_lost"]
    assert code == 1 and line.startswith("mega: rank 0: lost another rank, which has ended")


def test_a_stopped_rank_ends_the_run_in_time_and_is_named(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    """In a group of its own, whose time-out torch does not take from the first."""
    code, (line,) = outcomes["_stopped"]
    stopped = (
        "rank 1 has not answered for 2.4 seconds (--timeout-minutes): it is stopped, or its host cannot be reached"
    )
    exchange = "exchange 1 of ranks 0,1 (own) (all_reduce of [1]) was called by rank 0; rank 1 does not say"
    assert code == 1 and line.endswith(f"{stopped}; {exchange}")


def test_a_save_may_take_longer_than_an_answer(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    """The time-out of its phase counts; beyond it the rank that saves is named, and no other one."""
    assert outcomes["_slow_save"] == (0, [])
    code, (line,) = outcomes["_endless_save"]
    assert code == 1 and line.startswith(
        "mega: the other ranks have waited 4 seconds (--phase-timeout-minutes) for rank 0, which answers: saving, "
        "step 8, at mega/"
    )


def test_a_rank_that_answers_but_keeps_others_waiting_in_a_step_is_named(
    outcomes: dict[str, tuple[int, list[str]]],
) -> None:
    code, (line,) = outcomes["_endless_step"]
    assert code == 1 and line.startswith(
        "mega: the other ranks have waited 2.4 seconds (--timeout-minutes) for rank 2, which answers: training, step 8"
    )


def test_a_rank_that_never_comes_is_named(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    code, (line, own) = outcomes["_never_came"]  # a world of four is taken for one of several hosts
    who = f"mega: ranks 0, 1, 2 on host {socket.gethostname()}"
    assert code == 1 and line.startswith(f"{who}: waited 3 seconds (--timeout-minutes) at 127.0.0.1:")
    assert " for rank 3 of 4, which did not come; " in line
    assert re.fullmatch(r"mega: rank \d, on host .+, was at: starting", own)


def test_what_ranks_are_forked_from_is_named_when_it_dies(outcomes: dict[str, tuple[int, list[str]]]) -> None:
    code, (line,) = outcomes["_server_killed"]
    assert code == 1 and line.startswith("mega: the process that ranks are forked from (pid ")
    assert ") was killed by SIGKILL: " in line


REPOSITORY = Path(__file__).parents[2]


class _Pinned:
    """A page-locked tensor after a failed kernel: its destructor ends the process."""

    def __del__(self) -> None:
        os.abort()


def _failed_kernel(**_: object) -> int:
    pinned = _Pinned()
    raise RuntimeError(f"CUDA error: an illegal memory access was encountered (with {type(pinned).__name__} in use)")


def _failed_command() -> int:
    cli.app = _failed_kernel  # type: ignore[assignment]
    return cli.main(["presets"])


@pytest.mark.parametrize("entry", ["_failed_command()", "launcher.launch(1, _failed_kernel)"])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_failed_kernel_is_reported_and_aborts_no_process(entry: str, debug: str) -> None:
    """torch throws where a page-locked tensor is freed after a CUDA error, as when the error's frames are deleted."""
    names = "_failed_command, _failed_kernel, launcher"
    program = f"import sys; from {__name__} import {names}; sys.exit({entry})"
    command, variables = [sys.executable, "-c", program], {**os.environ, "MEGA_DEBUG": debug}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done
    assert lines[-1].startswith("RuntimeError: CUDA error: an illegal memory access"), done.stderr
    assert sum(line.startswith("Traceback") for line in lines) == 1, done.stderr


def test_a_rank_that_a_library_aborts_names_its_line() -> None:
    command = "import os; from mega.core.processes.connect import connect; connect('cpu'); os.abort()"
    done = subprocess.run([sys.executable, "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT and 'File "<string>", line 1 in <module>' in done.stderr, done


def test_devices_that_are_full_are_reported_in_one_line() -> None:
    """Ranks run out of memory together, each with figures of its own, which torch prints after what they share."""
    own = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU {0} has a total capacity of 139.80 GiB of which {0} MiB"
    reports = {rank: exit_reports.report_of(torch.OutOfMemoryError(own.format(rank))) for rank in range(2)}
    (line,) = exit_reports.format_exits(reports, 2).splitlines()
    assert line.startswith("mega: CUDA out of memory. Tried to allocate 2.50 GiB; mega memory-estimate shows")


def test_a_host_that_is_full_is_reported_in_one_line() -> None:
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        report = exit_reports.report_of(error)
    assert report.kind == "line" and report.text.startswith("DefaultCPUAllocator: can't allocate memory: ")


def test_the_stores_host_is_a_peer_too() -> None:
    error = RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?")
    assert exit_reports.report_of(error).kind == "consequence"


def _silent(world: object) -> Any:
    """Of a host that was cut off: no answer, and no end of the connection."""
    threading.Event().wait()


def _absent(world: object) -> Any:
    raise AttributeError("module 'torch.distributed' has no attribute 'FileStore'")


@pytest.mark.parametrize("store", [_silent, _absent])
def test_a_store_that_does_not_work_holds_no_rank(
    store: Callable[[object], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MEGA_DEBUG", raising=False)
    monkeypatch.setattr(exit_reports, "_store", store)
    monkeypatch.setattr(exit_reports, "LIMIT", 0.2)
    assert exit_reports.report_exit(exit_reports.ExitReport(2, "--lr 0: must be positive")) == 2
    assert capsys.readouterr().err == "mega: rank 1: --lr 0: must be positive\n"


def test_a_rank_that_comes_late_finds_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks of srun that read torch from one slow disk: the first, whose store it is, has spoken long ago."""
    for name in (MEETING_FILE, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(_port()))
    monkeypatch.setattr(exit_reports, "GRACE", 0.1)

    def come(rank: int) -> int:
        time.sleep(rank)
        reports = exit_reports.ExitReport(2, "--lr 0: must be positive")
        return exit_reports._report_together(
            reports, World(rank, 2, rank, 2, "torchrun"), threading.Event(), threading.Event()
        )

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(come, range(2))) == [2, 2]
    assert capsys.readouterr().err == "mega: rank 0: --lr 0: must be positive\n"


def test_every_host_has_the_reason_in_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with what its first rank was doing."""
    store = dist.HashStore()
    monkeypatch.setattr(exit_reports, "_store", lambda world: store)
    monkeypatch.setattr(exit_reports, "_hosting", lambda world: False)
    monkeypatch.setattr(exit_reports.socket, "gethostname", lambda: f"host{threading.current_thread().name[-1]}")
    monkeypatch.setattr(exit_reports, "ACTIVITY", Activity("saving", 8))
    lost = exit_reports.ExitReport(1, "lost", "consequence")
    reports = [lost, exit_reports.ExitReport(1, "disk full"), lost, lost]

    def come(rank: int) -> None:
        world = World(rank, 4, rank % 2, 2, "torchrun")
        exit_reports._report_together(reports[rank], world, threading.Event(), threading.Event())

    ranks = [threading.Thread(target=come, args=(rank,), name=f"on {'aabb'[rank]}") for rank in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("mega: rank 1 on host hosta: disk full") == 2 and len(lines) == 4
    places = sorted(re.sub(r"rank \d", "rank", line) for line in lines if "was at" in line)
    assert places == [f"mega: rank, on host host{host}, was at: saving, step 8" for host in "ab"]


def play() -> None:
    """All cases, in this process. Not as a script, which each rank would import again."""
    for case in CASES:
        print("==", case.__name__, file=sys.stderr, flush=True)
        places = launcher.local_environments(2 if case is _stopped else 3)
        ports = (_port(),) if case.__code__.co_argcount else ()
        ending = run_attempt(places, case, ports, patience=1.0 if case in STUCK else 5.0)
        assert ending is not None
        print(ending.code, file=sys.stderr, flush=True)
