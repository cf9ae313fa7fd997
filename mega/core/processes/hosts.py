"""Starts the ranks of a job on several hosts, and restarts them after a failure. Spare hosts replace lost hosts.

Each host runs the same command once, which starts --nproc ranks whenever the leader orders a start.

    1 a host joins         it connects to the leader, which listens on MASTER_ADDR, MASTER_PORT
    2 an attempt           once --hosts have joined, each gets a seat, which is its block of ranks. Further hosts wait
                           as spares
    3 an ending            a host reports how its ranks ended; then the ranks of all other hosts are stopped
    4 a lost host          its connection broke, or it was silent for some seconds
    5 the next attempt     if restarts.py allows it; surviving hosts keep their seats, and a spare gets the seat of a
                           lost host
    6 a lost leader        its hosts join the next leader in a list that all hosts have, and send it the count of
                           restarts

leader.py implements the leader. This module does not restore the data in a lost host's memory.
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
from mega.core.processes.launch import Ending, fork_server, launcher_folder, module_of, run_attempt
from mega.core.processes.leader import ENDING, Leader, Place, Size, listen_first, outlast
from mega.core.processes.rendezvous import HANDSHAKE, duration
from mega.core.processes.restarts import (
    PATIENCE,
    Job,
    Restarts,
    Stopped,
    attempt_variables,
    exit_code,
    memory,
    noted_step,
    stopping_on_signals,
)
from mega.core.processes.wire import Wire
from mega.core.processes.world import LAUNCHER_FILE

ORDERS = frozenset({"start", "stop", "finish", "move"})
"""Orders that a leader sends. Each order also ends the ranks that are running."""

FAITHFUL = 2.0
"""Seconds for which a host tries to reach its old leader before it joins another leader."""


def supervise_hosts(hosts: int, nproc: int, limit: int, minutes: float, job: Job) -> int:
    """Run a job on `hosts` hosts of `nproc` ranks each, where this host is one of them or a spare. Return the exit
    code.

    minutes: time to wait for hosts. Errors: OSError if no leader can be reached; ValueError if the leader rejects this
        host.
    """
    first = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size = Size(hosts, nproc, minutes, limit, __version__, job.alike)
    with stopping_on_signals(), memory(job) as folder:
        fork_server(module_of(job.target))  # the server imports torch while this host waits, even as a spare
        server = _listen(first)
        elsewhere = None if server.getsockname()[1] == first[1] else first
        leader = Leader(server, size, lambda: (job.saved(), noted_step(folder)), elsewhere).start()
        host = Supervisor(size, job, folder, leader.port)

        def look() -> None:
            """Listen on MASTER_ADDR if its name resolves to this host, which may take a while for a Kubernetes pod."""
            if elsewhere is not None and is_own(first[0]) and (first_server := _bound(first[1])) is not None:
                listen_first(leader, first_server)

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
    """Return the listening socket of this host's leader. Its port is MASTER_PORT if MASTER_ADDR is this host and the
    port is free, otherwise any free port."""
    for port in (first[1], 0) if is_own(first[0]) else (0,):
        if (server := _bound(port)) is not None:
            return server
    raise OSError("this host has no free port")


def _bound(port: int) -> socket.socket | None:
    """Return a socket that listens on `port`, or None if the port is in use, for example by another launcher on this
    machine."""
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
    """One host of a job, which follows the orders of a leader. port: the port of this host's own leader."""

    def __init__(self, size: Size, job: Job, folder: Path | None, port: int):
        self._size, self._job, self._folder, self._port = size, job, folder, port
        self._wire: Wire | None = None
        self._leader, self._leader_name = ("", 0), ""
        self._leaders: list[Place] = []
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._bell, self._ring = multiprocessing.Pipe(duplex=False)
        """A pipe to which one byte is written per order, so that a function that waits for ranks also detects
        orders."""
        self._moved: dict[str, Any] | None = None
        """State of the leader that ordered this host to join another leader, until this host has joined; otherwise
        None."""
        self._seat: int | None = None
        self._attempted = -1
        self._restarts: Restarts | None = None
        self._final: int | None = None
        """The exit code if the ranks of this host have ended in a way that forbids a restart, otherwise None."""

    def join(self, place: Place, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Join a leader. look: function that is called before each retry. Errors: OSError if no leader answers in
        time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._join(place)
            except (OSError, UnicodeError) as error:  # UnicodeError if the host name is invalid
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
            """Report the loss of the leader once, if this host has joined this leader."""
            if wire is self._wire and first.acquire(blocking=False):
                self._order({"lost": True})

        wire.start(heard, lost)
        name = socket.gethostname()
        member = {"name": name, "port": self._port, "meet": _free_port(), "seat": self._seat}
        wire.send({"join": {**member, "size": asdict(self._size), "known": self._known()}})
        try:
            answer = welcome.get(timeout=HANDSHAKE)
        except queue.Empty:
            wire.close()
            raise OSError("what listens there does not lead a run") from None
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self._wire, self._leader, self._leader_name = wire, place, answer["welcome"][0]
        if wire.closed:  # the connection broke before `self._wire` was set, so `lost` ignored it
            lost()

    def _known(self) -> dict[str, Any]:
        """Return the state that this host sends to a new leader."""
        if self._moved is not None:
            return self._moved
        restarts = None if self._restarts is None else self._restarts.to_message()
        reason = f"host {self._leader_name}, which led the others, was lost"
        return {"restarts": restarts, "failed": True, "reason": reason}

    def _hear(self, message: dict[str, Any]) -> None:
        """Handle a message on the reader thread; orders are queued for the main thread."""
        if message.get("said"):
            write_error(f"mega: {message['said']}\n")
        if "leaders" in message:
            self._leaders = [(address, port) for address, port in message["leaders"]]
        elif "restarts" in message:
            self._restarts = Restarts.from_message(**message["restarts"])
        elif ORDERS & set(message):
            self._order(message)

    def _order(self, message: dict[str, Any]) -> None:
        self._orders.put(message)
        self._ring.send_bytes(b".")

    def play(self) -> int:
        """Execute the leader's orders until the job ends, and return the exit code."""
        while True:
            self._bell.recv_bytes()
            order = self._orders.get()
            if "finish" in order:
                return int(order["finish"])
            if "lost" in order:
                if self._final is not None:
                    return self._final
                self._rejoin()
            elif "move" in order:
                self._move(order["known"], tuple(order["move"]))
            elif "start" in order:
                self._attempt(**order["start"])

    def _attempt(self, seat: int, address: str, port: int, restarts: Mapping[str, Any]) -> None:
        """Run the ranks of this host, and report how they ended (phases 2 and 3 in the module's docstring)."""
        self._seat, self._restarts = seat, Restarts.from_message(**restarts)
        if self._folder is not None and self._restarts.number != self._attempted + 1:
            # This host has missed an attempt, in which other hosts may have stored newer copies of rank states.
            for path in self._folder.glob("rank-*"):
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

    def _rejoin(self) -> None:
        """Try to join the old leader again, then all other leaders, including the leader on this host (phase 6 in the
        module's docstring). Errors: OSError if no leader can be reached."""
        former, leaders = self._leader, [place for place in self._leaders if place != self._leader]
        at_once, patiently = [(place, 0.0) for place in leaders], [(place, FAITHFUL) for place in leaders]
        for place, seconds in ((former, FAITHFUL), *at_once, *patiently):
            try:
                return self.join(place, seconds)
            except OSError:
                continue
        raise OSError(f"host {self._leader_name}, which led the others, was lost, and no other host is reached")

    def _move(self, state: dict[str, Any], place: Place) -> None:
        """Join another leader, as the current leader has ordered. state: the state to send to the new leader."""
        former, self._moved = self._wire, state
        try:
            self._join(place)
        except OSError:  # the new leader is already lost, so stay with the current one
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
