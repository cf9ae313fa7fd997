"""Several hosts that start a job's ranks together, and again after a failure; spare ones take the place of lost ones.

Each host runs the same command once; it starts --nproc ranks as often as the leader says so.

    1 a host joins         it connects to the leader, which listens at MASTER_ADDR, MASTER_PORT
    2 an attempt           as soon as --hosts have come, each is given a seat: its block of ranks. Others wait as spares
    3 an ending            a host reports how its ranks ended; those of the others are ended too
    4 a lost host          its connection broke, or it was silent for some seconds
    5 the next attempt     as restarts.py decides; survivors keep their seats, a spare takes that of a lost host
    6 a lost leader        its hosts go to the next of a list that all have; the count of restarts goes with them

The leader is leader.py. What a lost host had in memory is not known here.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mega import __version__
from mega.core.processes.exit_reports import write_error
from mega.core.processes.interface import is_own
from mega.core.processes.launch import Ending, fork_server, launcher_folder, run_attempt
from mega.core.processes.leader import ENDING, Leader, Place, Size, listen_first, outlast
from mega.core.processes.rendezvous import HANDSHAKE, duration
from mega.core.processes.restarts import (
    PATIENCE,
    Job,
    Restarts,
    Stopped,
    attempt_variables,
    exit_code,
    heeding_signals,
    memory,
    noted_step,
)
from mega.core.processes.wire import Wire
from mega.core.processes.world import LAUNCHER_FILE

ORDERS = frozenset({"start", "stop", "finish", "move"})
"""What a leader asks for; where ranks run, each means that they are to end."""

FAITHFUL = 2.0
"""Seconds in which a host tries the leader that it knows, before it goes to another one."""


def supervise_hosts(hosts: int, nproc: int, limit: int, minutes: float, job: Job) -> int:
    """Run a job on `hosts` hosts of `nproc` ranks each, this being one of them or a spare; the exit code.

    minutes: to wait for hosts. Errors: OSError where the leader is not reached; ValueError where it refuses this host.
    """
    first = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size = Size(hosts, nproc, minutes, limit, __version__, job.alike)
    with heeding_signals(), memory(job) as folder:
        fork_server(job.target.__module__)  # imports torch while this host waits, as a spare too
        server = _listen(first)
        elsewhere = None if server.getsockname()[1] == first[1] else first
        leader = Leader(server, size, lambda: (job.saved(), noted_step(folder)), elsewhere).start()
        host = Supervisor(size, job, folder, leader.port)

        def look() -> None:
            """A name may resolve to this host only later, as that of a Kubernetes pod does."""
            if elsewhere is not None and is_own(first[0]) and (there := _bound(first[1])) is not None:
                listen_first(leader, there)

        try:
            host.join(first, 60 * minutes, look)
            return host.play()
        except Stopped as stopped:
            host.close()
            outlast(leader, ENDING)
            return stopped.code
        finally:
            host.close()


def _listen(first: Place) -> socket.socket:
    """Where the leader of this host listens: at the address that all hosts know, if that is this host's and free."""
    for port in (first[1], 0) if is_own(first[0]) else (0,):
        if (server := _bound(port)) is not None:
            return server
    raise OSError("this host has no free port")


def _bound(port: int) -> socket.socket | None:
    """None where a host that shares this machine leads at that port."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen(128)
        return server
    except OSError:
        server.close()
        return None


class Supervisor:
    """This host among those of a job. port: of its own leader."""

    def __init__(self, size: Size, job: Job, folder: Path | None, port: int):
        self._size, self._job, self._folder, self._port = size, job, folder, port
        self._wire: Wire | None = None
        self._leader, self._leader_name = ("", 0), ""
        self._leaders: list[Place] = []
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._bell, self._ring = multiprocessing.Pipe(duplex=False)
        """Has one byte for each order, which a wait for ranks hears of."""
        self._moved: dict[str, Any] | None = None
        """What the leader knew that has sent this host to another one, while it goes there."""
        self._seat: int | None = None
        self._attempted = -1
        self._restarts: Restarts | None = None
        self._final: int | None = None
        """The exit code of ranks that are not to be started again, wherever the leader is."""

    def join(self, place: Place, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """look: called before each further attempt. Errors: OSError, where no leader answers in time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._join(place)
            except (OSError, UnicodeError) as error:  # a name that no resolver takes is the latter
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"waited {duration(seconds / 60)} for the host that leads the others at {place[0]}:{place[1]}: "
                        f"{getattr(error, 'strerror', None) or error}"
                    ) from None
            time.sleep(0.2)
            look()

    def _join(self, place: Place) -> None:
        connection = socket.create_connection(place, 2.0)
        connection.settimeout(None)
        wire, welcome = Wire(connection), queue.SimpleQueue[dict[str, Any]]()

        def heard(message: dict[str, Any]) -> None:
            if "welcome" in message or "refused" in message:
                welcome.put(message)
            self._hear(message)

        first = threading.Lock()

        def lost() -> None:
            """Of a leader that this host has joined; once."""
            if wire is self._wire and first.acquire(blocking=False):
                self._order({"lost": True})

        wire.start(heard, lost)
        name = socket.gethostname()
        found = {"name": name, "port": self._port, "meet": _free_port(), "seat": self._seat}
        wire.send({"join": {**found, "size": asdict(self._size), "known": self._known()}})
        try:
            answer = welcome.get(timeout=HANDSHAKE)
        except queue.Empty:
            wire.close()
            raise OSError("what listens there does not lead a run") from None
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self._wire, self._leader, self._leader_name = wire, place, answer["welcome"][0]
        if wire.closed:  # since it was welcome
            lost()

    def _known(self) -> dict[str, Any]:
        """What another leader is to know."""
        if self._moved is not None:
            return self._moved
        restarts = None if self._restarts is None else self._restarts.sent()
        reason = f"host {self._leader_name}, which led the others, was lost"
        return {"restarts": restarts, "failed": True, "reason": reason}

    def _hear(self, message: dict[str, Any]) -> None:
        """On the thread that reads: what does not wait for the main thread's turn, nor disturb ranks that run."""
        if message.get("said"):
            write_error(f"mega: {message['said']}\n")
        if "leaders" in message:
            self._leaders = [(address, port) for address, port in message["leaders"]]
        elif "restarts" in message:
            self._restarts = Restarts.heard(**message["restarts"])
        elif ORDERS & set(message):
            self._order(message)

    def _order(self, message: dict[str, Any]) -> None:
        self._orders.put(message)
        self._ring.send_bytes(b".")

    def play(self) -> int:
        """Heed orders until all is over; the exit code."""
        while True:
            self._bell.recv_bytes()
            order = self._orders.get()
            if "finish" in order:
                return int(order["finish"])
            if "lost" in order:
                if self._final is not None:
                    return self._final
                self._go_on()
            elif "move" in order:
                self._move(order["known"], tuple(order["move"]))
            elif "start" in order:
                self._attempt(**order["start"])

    def _attempt(self, seat: int, address: str, port: int, restarts: Mapping[str, Any]) -> None:
        """Phases 2 and 3."""
        self._seat, self._restarts = seat, Restarts.heard(**restarts)
        if self._folder is not None and self._restarts.number != self._attempted + 1:
            for path in self._folder.glob("rank-*"):  # of an attempt before the last one, which others have gone beyond
                path.unlink()
        self._attempted = self._restarts.number
        nproc, world = self._size.nproc, self._size.nproc * self._size.hosts
        prefix = os.path.join(launcher_folder(), f"attempt-{self._restarts.number}")
        shared = {
            **attempt_variables(self._restarts, self._folder),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            LAUNCHER_FILE: prefix,
        }
        ranks = [{**shared, "LOCAL_RANK": str(local), "RANK": str(seat * nproc + local)} for local in range(nproc)]
        args = self._job.args(self._restarts.resumes)
        ending = run_attempt(ranks, self._job.target, args, self._bell, PATIENCE) or Ending(1)
        if ending.final and ending.code:
            self._final = exit_code(ending)
        assert self._wire is not None
        self._wire.send({"ended": asdict(ending), "meet": _free_port()})

    def _go_on(self) -> None:
        """Phase 6: try the leader again, then the others, this host's own among them. Errors: OSError."""
        lost, others = self._leader, [place for place in self._leaders if place != self._leader]
        at_once, patiently = [(place, 0.0) for place in others], [(place, FAITHFUL) for place in others]
        for place, seconds in ((lost, FAITHFUL), *at_once, *patiently):
            try:
                return self.join(place, seconds)
            except OSError:
                continue
        raise OSError(f"host {self._leader_name}, which led the others, was lost, and no other host is reached")

    def _move(self, known: dict[str, Any], place: Place) -> None:
        """To a leader that this one's has met."""
        former, self._moved = self._wire, known
        try:
            self._join(place)
        except OSError:  # it has gone again
            return
        finally:
            self._moved = None
        if former is not None:
            former.close()

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])
