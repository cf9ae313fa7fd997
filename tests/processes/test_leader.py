"""What the leading host says to hosts that join, end and are lost; hosts are connections of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from mega.core.processes import leader as module
from mega.core.processes.launch import Ending
from mega.core.processes.leader import Leader, Size, outlast
from mega.core.processes.restarts import Restarts
from mega.core.processes.wire import Wire

SIZE = Size(hosts=2, nproc=1, minutes=1.0, limit=2, version="1")

UNKNOWN = {"restarts": None, "failed": True, "reason": ""}


class Joined:
    """A host that has joined a leader."""

    def __init__(self, leader: Leader, name: str, known: dict[str, Any] = UNKNOWN, size: Size = SIZE):
        self.socket = socket.create_connection(("127.0.0.1", leader.port), 5.0)
        self.socket.settimeout(60.0)
        self.lines = self.socket.makefile()
        found = {"name": name, "port": 1, "meet": 2, "seat": None, "size": asdict(size), "known": known}
        self.closed = threading.Event()
        self.send({"join": found})
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self.closed.wait(1.0):
            with contextlib.suppress(OSError):
                self.send({})

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def ends(self, ending: Ending) -> None:
        self.send({"ended": asdict(ending), "meet": 3})

    def hears(self, key: str) -> dict[str, Any]:
        """The next message that has it."""
        for line in self.lines:
            if key in (message := json.loads(line)):
                return dict(message)
        raise AssertionError(f"closed before {key}")

    def hears_until(self, key: str) -> list[dict[str, Any]]:
        """All messages up to one that has it."""
        messages = []
        for line in self.lines:
            messages.append(json.loads(line))
            if key in messages[-1]:
                return messages
        raise AssertionError(f"closed before {key}")

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def led(first: Leader | None = None, saved: int = 0) -> Leader:
    server = _listening()
    place = None if first is None else ("127.0.0.1", first.port)
    return Leader(server, SIZE, lambda: (saved, 0), place).start()


@pytest.fixture
def pair() -> Iterator[tuple[Leader, Joined, Joined]]:
    """Two hosts whose ranks have begun."""
    leader = led()
    a = Joined(leader, "a")
    a.hears("welcome")
    b = Joined(leader, "b")
    assert [host.hears("start")["start"]["seat"] for host in (a, b)] == [0, 1]
    yield leader, a, b
    a.close()
    b.close()


def test_all_end_well(pair: tuple[Leader, Joined, Joined]) -> None:
    _, a, b = pair
    a.ends(Ending(0, final=True))
    b.ends(Ending(0, final=True))
    assert (a.hears("finish")["finish"], b.hears("finish")["finish"]) == (0, 0)


def test_a_failure_starts_all_again_and_names_its_host(pair: tuple[Leader, Joined, Joined]) -> None:
    _, a, b = pair
    b.ends(Ending(137, "rank 1 was killed by SIGKILL", cause=True, here=True))
    a.hears("stop")
    a.ends(Ending(1, "rank 0: lost another rank"))
    line = "rank 1 was killed by SIGKILL, on host b"
    for host, seat in ((a, 0), (b, 1)):
        order = host.hears("start")
        assert (order["start"]["seat"], order["start"]["restarts"]["number"]) == (seat, 1)
        assert order["said"].endswith(line)


def test_a_mistake_is_final(pair: tuple[Leader, Joined, Joined]) -> None:
    _, a, b = pair
    for host in (a, b):
        host.ends(Ending(2, "--lr -1: must be positive", cause=True, final=True))
    assert a.hears("finish") == {"finish": 2, "said": ""}


def test_a_spare_takes_the_seat_of_a_lost_host(pair: tuple[Leader, Joined, Joined]) -> None:
    leader, a, b = pair
    spare = Joined(leader, "c")
    assert "this host is a spare" in spare.hears("said")["said"] + spare.hears("restarts")["said"]
    a.close()
    b.hears("stop")
    b.ends(Ending(1, "rank 1: lost another rank"))
    assert spare.hears("start")["start"]["seat"] == 0 and b.hears("start")["start"]["seat"] == 1


def test_it_gives_up_without_progress(pair: tuple[Leader, Joined, Joined]) -> None:
    _, a, b = pair
    for _ in range(SIZE.limit + 1):
        for host in (a, b):
            host.ends(Ending(1, "rank 0: disk full", cause=True, here=True))
        if _ < SIZE.limit:
            assert [host.hears("start")["start"]["seat"] for host in (a, b)] == [0, 1]
    assert "gave up after 2 restarts in a row" in a.hears("finish")["said"]


@pytest.mark.parametrize("code", [143, 2], ids=["signal", "mistake"])
def test_ranks_that_end_by_themselves_are_not_ended(
    code: int, pair: tuple[Leader, Joined, Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were asked to stop have a save to end; those with a mistake say so within a moment."""
    monkeypatch.setattr(module, "REPORTING", 60.0)
    leader, a, b = pair
    b.ends(Ending(code, final=True))
    outlast(leader, 0.5)  # a's ranks run for longer
    a.ends(Ending(code, final=True))
    heard = a.hears_until("finish")
    assert heard[-1]["finish"] == code and not any("stop" in message for message in heard)
    outlast(leader, 60.0)


def test_a_host_with_other_flags_is_refused() -> None:
    """As a spare it would end the run when it is needed."""
    one = replace(SIZE, alike={"--lr": "0.1", "--seed": "1"})
    leader = Leader(_listening(), one, lambda: (0, 0), None).start()
    for alike, differ in (({**one.alike, "--lr": "0.2"}, "--lr 0.2, here 0.1"), ({}, "--lr None, here 0.1; --seed")):
        other = Joined(leader, "a", size=replace(one, alike=alike))
        assert f"must be started alike: {differ}" in other.hears("refused")["refused"]
        other.close()


def test_hosts_of_another_size_are_refused() -> None:
    leader = led()
    other = Joined(leader, "a", size=Size(2, 4, 1.0, 2, "1"))
    assert other.hears("refused")["refused"].endswith("must be started alike: nproc 4, here 1")


def test_what_is_no_host_is_left(pair: tuple[Leader, Joined, Joined]) -> None:
    leader, a, b = pair
    for words in (b"GET / HTTP/1.0\r\n\r\n", b'{"join": 3}\n', b"[1]\n"):
        with socket.create_connection(("127.0.0.1", leader.port), 5.0) as stranger:
            stranger.sendall(words)
            stranger.settimeout(20.0)
            while stranger.recv(100):  # signs of life, then the end
                pass
    for host in (a, b):
        host.ends(Ending(0, final=True))
    assert a.hears("finish")["finish"] == 0


def test_those_that_wait_go_to_the_first_place_when_it_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container with the address at which hosts join is started again."""
    monkeypatch.setattr(module, "CALL", 0.1)
    first = led(saved=10)
    back, second = Joined(first, "a"), led(first)
    known = {"restarts": asdict(Restarts(limit=2, number=1)), "failed": True, "reason": "host a was lost"}
    survivor = Joined(second, "b", known)
    order = survivor.hears("move")
    assert order["move"] == ["127.0.0.1", first.port]
    again = Joined(first, "b", order["known"])
    assert [host.hears("start")["start"]["restarts"]["number"] for host in (back, again)] == [2, 2]


def test_one_that_comes_back_goes_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL", 0.1)
    first = led()
    back, second = Joined(first, "a"), led(first)
    for host in [Joined(second, name) for name in ("b", "c")]:
        host.hears("start")
    assert back.hears("move")["move"] == ["127.0.0.1", second.port]


def test_a_host_that_leaves_at_once_ends_no_run() -> None:
    """It has gone when the leader reads that it joined, so its connection has no addresses any more."""
    leader, name = Leader(server := _listening(), SIZE, lambda: (0, 0), None), server.getsockname()
    with socket.create_connection(name, 5.0) as host:
        wire = Wire(server.accept()[0])
        host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end resets the connection
    found = {"name": "c", "port": 1, "meet": 2, "seat": None, "size": asdict(SIZE), "known": UNKNOWN}
    for message in ({"join": found}, None, {"led": {"port": 1, "runs": True}}):
        leader._handle(wire, message)
    leader.start()
    pair = [Joined(leader, "a"), Joined(leader, "b")]
    assert [host.hears("start")["start"]["seat"] for host in pair] == [0, 1]
    for host in pair:
        host.close()
