"""Ranks that cannot meet end in time, and say who waits for whom. Threads play the ranks, which share only a store."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mega.core.processes import connect, exit_reports, launch, rendezvous, roll_call
from mega.core.processes.exit_reports import ExitReport, report_of
from mega.core.processes.launch import rank_environment
from mega.core.processes.position import Position
from mega.core.processes.rendezvous import meet
from mega.core.processes.world import LAUNCHER_FILE, MEETING_FILE, World

SHORT = 0.02
"""Minutes of patience, where it is to end."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port, to which the launcher's variables point."""
    for name in (MEETING_FILE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    yield number
    rendezvous._HOSTED.clear()
    rendezvous._UNREACHABLE.clear()


def _come(*ranks: tuple[int, int], minutes: float = SHORT) -> list[str]:
    """What each of some (rank, world size) says; "met" where it goes on."""

    def come(one: tuple[int, int]) -> str:
        rank, size = one
        try:
            meet(World(rank, size, rank, size, "torchrun"), minutes)
        except Exception as error:
            return report_of(error).text
        return "met"

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(come, ranks))


def test_all_meet(port: int) -> None:
    assert _come((0, 3), (1, 3), (2, 3), minutes=1) == ["met"] * 3


def test_missing_ranks_are_named_by_all_that_wait(port: int) -> None:
    first, second = _come((0, 4), (2, 4))
    assert first == second
    assert first.startswith(f"waited 1.2 seconds (--timeout-minutes) at 127.0.0.1:{port} for ranks 1, 3 of 4, none of")


def test_a_name_that_rank_0_does_not_know_ends_its_wait(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks cannot reach rank 0 by that name; if one has come by it all the same, rank 0 waits on."""
    monkeypatch.setattr(rendezvous, "NAMED_WITHIN", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    begin = time.monotonic()
    (said,) = _come((0, 2), minutes=1)
    assert said.startswith("MASTER_ADDR no-such-host.invalid: the host of rank 0 does not know this name ("), said
    assert time.monotonic() - begin < 20
    rendezvous._HOSTED.clear()
    monkeypatch.setattr(rendezvous, "reach", lambda *_: monkeypatch.setenv("MASTER_ADDR", "127.0.0.1"))
    monkeypatch.setattr(rendezvous, "NAMED_WITHIN", 0.0)
    connect_to = rendezvous._connect
    monkeypatch.setattr(rendezvous, "_connect", lambda _, *rest: connect_to("127.0.0.1", *rest))
    said, other = _come((0, 3), (1, 3))
    assert said == other and said.startswith("waited 1.2 seconds"), said


def _fail(rank: int, size: int, text: str) -> None:
    """The end of a rank that fails before it meets the others."""
    world = World(rank, size, rank, size, "torchrun")
    exit_reports._report_together(ExitReport(2, text), world, threading.Event(), threading.Event())


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_it_comes_ends_those_that_wait(
    failing: int, file: bool, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Long before the time is over, and with its host and its reason; also where that rank hosts the store."""
    monkeypatch.setattr(exit_reports, "GRACE", 0.5)
    if file:
        monkeypatch.setenv(MEETING_FILE, str(tmp_path / "meeting"))
    began, others = time.monotonic(), [(rank, 3) for rank in range(3) if rank != failing]
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(_fail, failing, 3, "Traceback\n  of this\n--data-path bad: damaged\n")
        said = _come(*others, minutes=1)
        if failing == 0 and not file:
            for rank, _ in others:
                _fail(rank, 3, "lost")  # as ranks do; the host of the store waits for them
        failed.result()
    line = f"rank {failing} on host {socket.gethostname()} failed before all ranks had joined: --data-path bad: damaged"
    assert said == [line, line] and time.monotonic() < began + 30


def test_ranks_that_torchrun_will_restart_do_not_hear_of_failures(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store is kept, and each of its agents has a count of its own: the failure may be that of another attempt."""
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    rendezvous.publish_failure(rendezvous.attempt_store(agent), 1, "disk full")
    assert _come((0, 2), (1, 2), minutes=1) == ["met", "met"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _come((0, 2), (1, 2), minutes=1) == ["met", "met"]
    rendezvous.publish_failure(rendezvous.attempt_store(agent), 1, "disk full")
    assert _come((0, 2))[0].endswith("failed before all ranks had joined: disk full")


def test_ranks_answer_before_their_process_group_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails to build it ends the others, which wait for it there."""
    store = dist.HashStore()
    for name, value in rank_environment(1, 2, str(tmp_path), "meeting").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connect, "meet", lambda world, minutes: store)
    monkeypatch.setattr(exit_reports, "_store", lambda world: store)
    monkeypatch.setattr(exit_reports, "GRACE", 0.1)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("Unable to find address for: eth7")

    monkeypatch.setattr(dist, "init_process_group", fail)
    try:
        with pytest.raises(ValueError, match="eth7") as failed:
            connect.connect("cpu")
        assert exit_reports.report_exit(report_of(failed.value)) == 2
    finally:
        connect.disconnect()
    other = roll_call.RollCall(dist.PrefixStore("roll-call", store), 0, 2, 1.0)
    assert other.questions.absent([0]) == ([], f"rank 1 has ended: {failed.value}")
    assert capsys.readouterr().err == f"mega: rank 1: {failed.value}\n"


def test_ranks_of_worlds_of_different_sizes_do_not_wait(port: int) -> None:
    assert set(_come((0, 2), (1, 3), minutes=1)) == {"WORLD_SIZE is 3 for rank 1 and 2 for rank 0; must be the same"}


def test_a_rank_that_comes_twice_is_refused(port: int) -> None:
    said = _come((0, 3), (1, 3), (1, 3))
    assert "RANK 1: another process has come as this rank; each needs its own number" in said[1:]


def test_nobody_at_the_address(port: int) -> None:
    (line,) = _come((1, 2))
    where = f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}"
    assert line.startswith(f"waited 1.2 seconds (--timeout-minutes) for rank 0 at {where}, where nothing answers (")
    with pytest.raises(OSError, match="waited"):  # for its exit report it does not wait again
        exit_reports._store(World(1, 2, 1, 2, "torchrun"))


def test_another_program_has_the_port(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would wait for its answer without end."""
    with socket.create_server(("", port)):
        first = _come((0, 2))
        rendezvous._UNREACHABLE.clear()
        second = _come((1, 2))
    assert first == [
        f"MASTER_PORT {port}: another process of this host listens there, so ranks cannot meet; name a free port"
    ]
    assert second[0].startswith(
        f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: what listens there is not rank 0 of this run"
    )


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("MASTER_PORT", "", "MASTER_PORT '': must be a free port on the first rank's host, where 2 ranks meet"),
        ("MASTER_PORT", "99999", "MASTER_PORT 99999: must be 1 to 65535"),
        ("MASTER_ADDR", "", "MASTER_ADDR '': must be the first rank's host, where 2 ranks meet"),
    ],
)
def test_an_address_that_is_none(name: str, value: str, line: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert _come((1, 2)) == [line]


def test_an_interface_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME nowhere0: is not a network interface of .*; valid: .*lo"):
        connect._check_interfaces()


def test_an_interface_that_is_down() -> None:
    line = r"^GLOO_SOCKET_IFNAME lo: .* has no address, .*`ip link set lo up`"
    with pytest.raises(ValueError, match=line), connect._naming_interface():
        raise RuntimeError("[enforce fail at gloo/device.cc:84] ifa != nullptr. Unable to find address for: lo")
    with pytest.raises(RuntimeError, match=r"^another$"), connect._naming_interface():
        raise RuntimeError("another")


def test_a_temporary_folder_that_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 75)
    with pytest.raises(ValueError, match=r"TMPDIR /x+: .* may have at most 75 bytes"):
        launch.fork_server()


def test_what_a_killed_attempt_left_in_the_agents_store_is_passed_over(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --max-restarts` keeps its store: the addresses in it are those of processes that are gone."""
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for _ in range(3):
        stores: list[Any] = [None, None]

        def come(rank: int, stores: list[Any] = stores) -> None:
            stores[rank] = meet(World(rank, 2, rank, 2, "torchrun"), 1)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(come, range(2)))
        assert not stores[0].check(["address of rank 1"])
        stores[1].set("address of rank 1", "gone")
        stores[0].wait(["address of rank 1"], timedelta(seconds=60))
    assert agent.num_keys()


def test_a_rank_answers_while_its_main_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the one that does not is found, within the time-out; where all do, their places are read."""
    monkeypatch.setattr(roll_call.ACTIVITY, "phase", "starting")
    monkeypatch.setattr(roll_call.ACTIVITY, "step", 0)  # of another test's run in this process
    store = dist.HashStore()
    calls = [roll_call.RollCall(store, rank, 2, 0.02) for rank in range(2)]
    assert calls[0].explain(RuntimeError()).startswith("rank 1 has not answered for 1.2 seconds")
    told = roll_call.RollCall(store, 0, 2, 0.02).explain(RuntimeError())
    assert told == calls[0].explain(RuntimeError()), "the first that judges counts for all"
    store = dist.HashStore()
    calls = [roll_call.RollCall(store, rank, 2, 0.02) for rank in range(2)]
    heard: queue.Queue[str] = queue.Queue()
    calls[1]._lost = heard.put
    calls[1].start()
    told = calls[0].explain(RuntimeError())
    assert heard.get(timeout=60) == told
    line = re.fullmatch(
        r"an exchange of ranks has not ended within 1.2 seconds \(--timeout-minutes\), though all answer: (.*)", told
    )
    assert line is not None, told
    # Both ranks share one main thread, which may have moved between their looks or not.
    place = r"starting, at mega/core/processes/\w+\.py:\d+ \(\w+\)"
    assert re.fullmatch(rf"rank 0: {place}; rank 1: {place}|ranks 0, 1: {place}", line[1]), told


def test_a_rank_that_has_reported_its_error_is_not_called_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for it end before the time is over, with its report."""
    store, reports = dist.HashStore(), queue.Queue[ExitReport]()
    calls = [roll_call.RollCall(store, rank, 2, 1.0) for rank in range(2)]
    calls[1].close("--data-path bad: damaged")
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(roll_call, "report_exit", lambda report, **how: reports.put(report))
    calls[0]._suspect(45.0)
    assert reports.get(timeout=30).text == "rank 1 has ended: --data-path bad: damaged"
    assert calls[0].questions.silent(30.0) == []


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_wait_for_a_failed_rank_end_at_once(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Without a question, which comes after a quarter of 10 minutes; a rank that works goes on."""
    store, reports = dist.HashStore(), queue.Queue[ExitReport]()
    calls = [roll_call.RollCall(store, rank, 3, 10.0, remote=False) for rank in range(3)]
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(roll_call, "report_exit", lambda report, **how: reports.put(report))
    monkeypatch.setattr(roll_call, "FAILED", 0.2)
    monkeypatch.setattr(roll_call, "own_position", lambda failed_at=None: Position(waits=waits))
    calls[0].start()
    calls[1].close("--data-path bad: damaged")
    calls[2].close("--data-path worse: damaged as well")
    try:
        if waits:
            assert reports.get(timeout=30) == ExitReport(1, "rank 1 has ended: --data-path bad: damaged", "verdict")
        else:
            with pytest.raises(queue.Empty):
                reports.get(timeout=2)
    finally:
        calls[0].close()
    assert not store.check(["question/1"])


class SilentStore:
    """Of a host that was cut off: calls do not return."""

    def add(self, key: str, number: int) -> int:
        return int(threading.Event().wait())

    def check(self, keys: list[str]) -> bool:
        return threading.Event().wait()

    def set(self, key: str, text: str) -> None:
        threading.Event().wait()


@pytest.mark.parametrize(("hosted", "who"), [(True, "rank 0"), (False, "the launcher's store at a:1")])
def test_a_store_that_does_not_answer_keeps_no_rank(
    hosted: bool, who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the one whose exchange ran out of time, nor one whose main thread stands still."""
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "1")
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(roll_call, "SILENT", 0.2)
    store: Any = SilentStore()
    call = roll_call.RollCall(store, 1, 2, 0.005, hosted)
    line = f"{who} has not answered for 0.3 seconds (--timeout-minutes)"
    assert call.explain(RuntimeError()).startswith(line)
    call = roll_call.RollCall(store, 1, 2, 0.005, hosted)
    call.start()
    assert ended.get(timeout=60) == 1
    call.close()
    assert line in capsys.readouterr().err


def test_ranks_that_keep_asking_find_the_one_that_is_silent() -> None:
    """Wherever main threads stand, and although two of them ask at the same time."""
    store, lost = dist.HashStore(), [list[str](), list[str]()]
    calls = [roll_call.RollCall(store, rank, 3, 0.02) for rank in range(3)]
    for call, lines in zip(calls, lost, strict=False):
        call.keep_asking(lines.append)
    for call in calls:
        call.start()
    time.sleep(2.0)
    assert lost == [[], []]
    calls[2]._closed.set()
    began = time.monotonic()
    while not all(lost) and time.monotonic() < began + 20:
        time.sleep(0.05)
    told = "rank 2 has not answered for 1.2 seconds (--timeout-minutes): it is stopped, or its host cannot be reached"
    assert lost == [[told], [told]]


def test_a_rank_that_is_stopped_when_others_have_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its launcher waits for it without end."""
    store = dist.HashStore()
    calls = [roll_call.RollCall(store, rank, 3, 0.02) for rank in range(3)]
    monkeypatch.setattr(connect, "_CALLS", calls[:1])
    calls[1].close()
    with pytest.raises(TimeoutError, match=r"^rank 2 has not answered for 1.2 seconds"):
        connect.end_together(0, 0.02)
    calls[2].close()
    connect.end_together(0, 0.02)
    assert connect.silent_ranks(0.02) == []


def test_a_server_hears_of_a_killed_rank_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its device waits for that rank, which no exchange of the host's reports."""
    monkeypatch.setenv(LAUNCHER_FILE, str(tmp_path / "meeting"))
    lost: queue.Queue[str] = queue.Queue()
    call = roll_call.RollCall(dist.HashStore(), 0, 1, 0.02)
    call.keep_asking(lost.put)
    call.start()
    time.sleep(0.2)
    assert lost.empty()
    (tmp_path / f"meeting{roll_call.LOST}").write_text("rank 1 was killed by SIGKILL: unless by hand")
    assert lost.get(timeout=60) == "rank 1 was killed by SIGKILL: unless by hand"


class Explanation:
    def explain(self, error: BaseException) -> str:
        return "rank 3 is silent"

    def explain_loss(self, error: BaseException) -> str | None:
        return "lost rank 3"

    def close(self, report: str) -> None:
        raise AssertionError


def test_only_time_outs_are_explained() -> None:
    late = RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete")
    exit_reports.explain_exchanges_by(Explanation())
    try:
        assert report_of(late) == exit_reports.ExitReport(1, "rank 3 is silent", "consequence")
        assert report_of(RuntimeError("other")).kind == "trace"
    finally:
        exit_reports.explain_exchanges_by(None)
    assert report_of(late).kind == "trace"


def test_a_rank_whose_launcher_has_ended_does_not_wait_for_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's FileStore would wait for minutes, without releasing the lock that a thread needs to end the rank."""
    monkeypatch.setattr(dist, "FileStore", lambda *_: pytest.fail("waits"))
    monkeypatch.setenv(MEETING_FILE, str(tmp_path / "gone" / "meeting"))
    with pytest.raises(rendezvous.StoreLost, match="the launcher of this rank has ended"):
        rendezvous.open_store(World(1, 2, 1, 2, "local"), time.monotonic() + 5)


class _Started:
    """A rank that Ctrl-C interrupts while it starts."""

    def __init__(self, **_: object) -> None:
        self.pid: int | None = None
        self.sentinel, self._end = os.pipe()
        self.ended = False

    def start(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.pid = 1

    def is_alive(self) -> bool:
        return not self.ended

    def terminate(self) -> None:
        self.ended = True
        os.close(self._end)

    def kill(self) -> None: ...

    def join(self) -> None: ...


def test_a_rank_that_is_interrupted_while_it_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[_Started] = []

    def process(**values: object) -> _Started:
        started.append(_Started(**values))
        return started[-1]

    monkeypatch.setattr(launch, "fork_server", lambda *_: SimpleNamespace(Process=process))
    environments = [rank_environment(rank, 2, str(tmp_path), "meeting") for rank in range(2)]
    with pytest.raises(KeyboardInterrupt):
        launch.run_attempt(environments, print, ())
    assert [(each.pid, each.ended) for each in started] == [(1, True), (None, False)]
