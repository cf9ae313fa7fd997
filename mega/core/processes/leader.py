"""The leader of several hosts, which accepts hosts, assigns ranks to them, and decides how to continue after an
attempt.

Every host runs a leader that listens for hosts, so that another leader can take over when the current one is lost. Only
one leader has members. Processes are started by the launcher of each host (hosts.py), not by the leader.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mega.core.processes.launch import STOPPED, Ending
from mega.core.processes.rendezvous import duration
from mega.core.processes.restarts import Restarts, at_launch, exit_code
from mega.core.processes.wire import BEAT, Wire

ENDING = 30.0
"""Seconds that a host has to end its ranks before it counts as lost."""

REPORTING = 1.0
"""Seconds that the ranks of other hosts have to report their errors and end, after the run has failed."""

LEAVING = 3.0
"""Seconds that the other hosts have to read the order to finish."""

SHOWN = 5
"""Maximum number of differences that a message lists."""

CALL = 5.0
"""Seconds between two checks of MASTER_ADDR by a leader that does not listen on this address."""

Place = tuple[str, int]

Events = queue.Queue[tuple[Wire, dict[str, Any] | None]]
"""The tuple (connection of a member, message from the member). A message of None means that the connection to the
member was lost."""


@dataclass(frozen=True)
class Size:
    """The settings that must be identical on all hosts of a run."""

    hosts: int
    """Number of hosts that run ranks."""
    nproc: int
    """Ranks per host."""
    minutes: float
    """Maximum time to wait for hosts, in minutes."""
    limit: int
    """Maximum number of consecutive restarts."""
    version: str
    alike: Mapping[str, str] = field(default_factory=dict)
    """`Job.alike`."""


@dataclass(eq=False)
class _Member:
    """A host that has joined the leader."""

    wire: Wire
    name: str
    address: str
    port: int
    """The port of the host's own leader, at `address`."""
    meet: int
    """A free port for the store of the ranks."""
    seat: int | None
    """The host's index among the hosts that run ranks; a surviving host keeps its index. None for a spare."""
    running: bool = False
    """Whether the host's ranks have started and have not yet been reported as ended."""
    spare: bool = False
    """Whether the host has been informed that it is a spare."""

    def listens_here(self, port: int) -> bool:
        """Whether this host is the host of the leader at `port`."""
        return self.port == port and self.wire.here == self.wire.there


class Leader:
    """Leads the hosts that join it, until the job ends.

    server: a listening socket. saved: a function that returns the newest saved step, and the newest step in this host's
        memory.
    """

    def __init__(self, server: socket.socket, size: Size, saved: Callable[[], tuple[int, int]], first: Place | None):
        """first: (MASTER_ADDR, MASTER_PORT) if this leader does not listen on this address, otherwise None."""
        self._server, self._size, self._saved, self._first = server, size, saved, first
        self.port: int = server.getsockname()[1]
        self._called = time.monotonic()
        self._events: Events = queue.Queue()
        self._members: dict[Wire, _Member] = {}
        self._restarts: Restarts | None = None
        self._reason = ""
        """The reason why the previous attempt ended."""
        self._endings: list[tuple[str, Ending]] | None = None
        """Tuples (host name, ending) of the hosts that have ended in the current attempt; None between attempts."""
        self._since = time.monotonic()
        """The time at which the members began to wait or were ordered to end their ranks."""
        self._launched = time.monotonic()
        self._stop_at: float | None = None
        """The time at which hosts with running ranks will be ordered to end them."""
        self._stopping = self._over = self._takes_over = False
        self._reach = ""
        """An address at which another host has connected to this host."""

    def start(self) -> Leader:
        threading.Thread(target=_accept, args=(self._server, self._events), name="accept", daemon=True).start()
        threading.Thread(target=self._lead, name="leader", daemon=True).start()
        return self

    def _lead(self) -> None:
        try:
            while not self._over:
                with contextlib.suppress(queue.Empty):
                    self._handle(*self._events.get(timeout=1.0))
                self._advance()
        except Exception as error:  # without this handler all hosts would wait forever
            self._finish(1, f"the host that leads the others failed: {error!r}")

    def _handle(self, wire: Wire, message: dict[str, Any] | None) -> None:
        """Handle a message from a host, or the loss of the host."""
        member = self._members.get(wire)
        if message is None:
            if member is not None:
                self._gone(member)
        elif member is None:
            try:
                if "led" in message:
                    self._called_by(wire, **message["led"])
                else:
                    self._join(wire, **message["join"])
            except (KeyError, TypeError, ValueError, OSError):  # not a message from a host, or the host is already lost
                wire.close()
        else:
            member.meet = int(message["meet"])
            if member.running:
                member.running = False
                self._ended(member.name, Ending(**message["ended"]))

    def _called_by(self, wire: Wire, port: int, runs: bool) -> None:
        """Answer another leader. runs: whether that leader's ranks are running. If so, this leader's members move to
        that leader."""
        wire.send({"come": bool(self._members) and not runs})
        if runs and self._endings is None:
            self._move((wire.there, port))

    def _join(self, wire: Wire, size: dict[str, Any], known: dict[str, Any], **found: Any) -> None:
        """Accept a host (phase 1 in hosts.py). known: the state from the host's former leader, if any."""
        leader_size = asdict(self._size)
        differ = _differ(size.get("alike", {}), leader_size["alike"]) or _differ(size, leader_size)
        if differ:
            wire.send({"refused": f"the hosts of a run must be started alike: {'; '.join(differ)}"})
            return
        if not self._members:
            self._since = time.monotonic()
        address, leader_address = wire.there, wire.here
        if not address.startswith("127."):
            self._reach = leader_address
        self._members[wire] = _Member(wire, address=address, **found)
        restarts = known["restarts"]
        if restarts is not None and (self._restarts is None or restarts["number"] > self._restarts.number):
            self._restarts, self._takes_over, self._reason = (
                Restarts.from_message(**restarts),
                known["failed"],
                known["reason"],
            )
        line = ""
        if self._takes_over:
            variables = f"MASTER_ADDR {leader_address} MASTER_PORT {self.port}"
            line = f"{self._reason}; this one leads now, and hosts that join later need {variables}"
        wire.send({"welcome": [member.name for member in self._members.values()][:1], "said": line})
        _send_leaders(self._members.values(), self._reach)
        if self._endings is not None and not self._stopping:
            assert self._restarts is not None
            _spare(self._members[wire], self._restarts, self._size.hosts)

    def _gone(self, member: _Member) -> None:
        """Handle the loss of a member (phase 4 in hosts.py)."""
        del self._members[member.wire]
        if member.running:
            self._ended(member.name, Ending(1, f"host {member.name} was lost", cause=True))
        _send_leaders(self._members.values(), self._reach)

    def _ended(self, name: str, ending: Ending) -> None:
        """Record that the ranks of a host have ended (phase 3 in hosts.py). After a signal to stop, the leader does not
        end the ranks of other hosts, because all ranks save and stop together."""
        assert self._endings is not None
        self._endings.append((name, ending))
        stops_by_signal = any(each.final and each.code in STOPPED for _, each in self._endings)
        if stops_by_signal and not self._stopping:
            self._stop_at = None
        elif ending.code and self._stop_at is None:
            self._stop_at = time.monotonic() + (REPORTING if ending.final else 0.0)

    def _advance(self) -> None:
        """Perform the next action that is due."""
        running = [member for member in self._members.values() if member.running]
        if self._endings is not None:
            if self._stop_at is not None and not self._stopping and time.monotonic() >= self._stop_at:
                self._stopping, self._since = True, time.monotonic()
                for member in running:
                    member.wire.send({"stop": ""})
            if running and self._stopping and time.monotonic() > self._since + ENDING:
                for member in running:  # a host with a closed connection counts as lost, so the next attempt can start
                    member.wire.close()
            elif not running:
                self._decide(self._endings)
                if not self._over:
                    self._advance()
            else:
                self._call_first()
        elif len(self._members) >= self._size.hosts:
            self._start()
        elif self._members and time.monotonic() > self._since + 60 * self._size.minutes:
            missing = self._size.hosts - len(self._members)
            waited = f"waited {duration(self._size.minutes)} (--timeout-minutes) for {missing} more"
            after = f", after {self._reason}" if self._reason else ""
            self._finish(1, f"{waited} of {self._size.hosts} hosts{after}")
        else:
            self._call_first()

    def _decide(self, endings: list[tuple[str, Ending]]) -> None:
        """Finish the job, or prepare the next attempt (phase 5 in hosts.py)."""
        self._endings, self._stop_at, self._stopping, self._since = None, None, False, time.monotonic()
        failed = [(name, ending) for name, ending in endings if ending.code]
        final = [ending for _, ending in failed if ending.final]
        if not failed or final:
            self._finish(exit_code(max(final, key=lambda ending: ending.cause)) if final else 0)
            return
        name, first = min(failed, key=lambda named: not named[1].cause)  # prefer a cause to a consequence
        self._reason = f"{first.reason}, on host {name}" if first.here else first.reason
        assert self._restarts is not None
        if (following := self._restarts.after(*self._saved())) is None:
            self._finish(first.code, self._restarts.given_up(self._reason))
            return
        self._restarts = following
        missing = self._size.hosts - len(self._members)
        if missing > 0:
            line = f"{self._reason}; waiting for {missing} more of {self._size.hosts} hosts"
            for member in self._members.values():
                member.wire.send({"said": line})

    def _start(self) -> None:
        """Assign ranks to hosts, then order all hosts to start their ranks (phase 2 in hosts.py)."""
        restarts = self._first_restarts()
        if restarts is None:
            return
        self._restarts, free, waiting = restarts, set(range(self._size.hosts)), list[_Member]()
        # Surviving hosts keep their ranks, because the state copies in their memory belong to these ranks.
        for member in self._members.values():
            if member.seat in free:
                free.discard(member.seat)
            else:
                waiting.append(member)
        for member in waiting:
            member.seat = min(free) if free else None
            free.discard(member.seat)
        seated = [member for member in self._members.values() if member.seat is not None]
        first = next(member for member in seated if member.seat == 0)
        place = {"address": _reached(first, self._reach), "port": first.meet, "restarts": restarts.to_message()}
        line = restarts.restart(self._reason) if restarts.number else ""
        self._endings = []
        for member in self._members.values():
            member.running = member.seat is not None
            if member.running:
                member.wire.send({"start": {**place, "seat": member.seat}, "said": line})
            else:
                _spare(member, restarts, self._size.hosts)

    def _first_restarts(self) -> Restarts | None:
        """Return the state of restarts for the next attempt, or None if the job has ended."""
        if self._restarts is None:
            return at_launch(self._size.limit, self._saved()[0], self._launched)
        if not self._takes_over:
            return self._restarts
        self._takes_over = False
        following = self._restarts.after(*self._saved())
        if following is None:
            self._finish(1, self._restarts.given_up(self._reason))
        return following

    def _move(self, place: Place) -> None:
        """Order all members to join another leader, and send them the state of this leader."""
        restarts = None if self._restarts is None else self._restarts.to_message()
        state = {"restarts": restarts, "failed": self._takes_over, "reason": self._reason}
        for member in self._members.values():
            member.wire.send({"move": place, "known": state})

    def _call_first(self) -> None:
        """Contact the leader at MASTER_ADDR, in case a host listens there again. If this leader's ranks are running,
        that leader's members move to this leader. Otherwise this leader's members move to that leader."""
        first = self._first
        if first is not None and self._members and time.monotonic() > self._called + CALL:
            if _is_to_come(first, self.port, self._endings is not None):
                self._move(first)
            self._called = time.monotonic()

    def _finish(self, code: int, line: str = "") -> None:
        """Order all hosts to finish. The leader's own host is last, because the leader ends with it."""
        self._over = True
        leader_hosts = [member for member in self._members.values() if member.listens_here(self.port)]
        remote_hosts = [member for member in self._members.values() if not member.listens_here(self.port)]
        for member in remote_hosts:
            member.wire.send({"finish": code, "said": line})
        deadline = time.monotonic() + LEAVING
        for member in remote_hosts:
            member.wire.wait_closed(max(0.0, deadline - time.monotonic()))
        for member in leader_hosts:
            member.wire.send({"finish": code, "said": line})


def _spare(member: _Member, restarts: Restarts, hosts: int) -> None:
    """Send a spare host the count of restarts and, the first time, a message that it is a spare."""
    line = "" if member.spare else f"this host is a spare; --hosts {hosts} others have come before it"
    member.wire.send({"said": line, "restarts": restarts.to_message()})
    member.spare = True


def _differ(joining: Mapping[str, object], leading: Mapping[str, object]) -> list[str]:
    """List the values that differ between two hosts, at most SHOWN of them."""
    names = [name for name in {**leading, **joining} if name != "alike" and joining.get(name) != leading.get(name)]
    parts = [f"{name} {joining.get(name)}, here {leading.get(name)}" for name in names[:SHOWN]]
    return [*parts, f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else parts


def listen_first(leader: Leader, server: socket.socket) -> None:
    """Also listen on MASTER_ADDR, after it has been found to be an address of this host."""
    leader._first = None
    threading.Thread(target=_accept, args=(server, leader._events), name="accept-first", daemon=True).start()


def outlast(leader: Leader, seconds: float) -> None:
    """Wait, at most `seconds`, until no other member runs ranks. If this leader ended earlier, other members would join
    another leader and restart a run that should stop."""
    deadline = time.monotonic() + seconds
    while any(member.running and not member.listens_here(leader.port) for member in list(leader._members.values())):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)


def _accept(server: socket.socket, events: Events) -> None:
    while server.fileno() >= 0:
        try:
            connection, _ = server.accept()
            wire = Wire(connection)
        except OSError:  # the host has already closed the connection, or no descriptor is free at the moment
            time.sleep(0.1)
            continue
        _listen_to(wire, events)


def _listen_to(wire: Wire, events: Events) -> None:
    wire.start(lambda message: events.put((wire, message)), lambda: events.put((wire, None)))


def _send_leaders(members: Collection[_Member], leader_address: str) -> None:
    """Send the addresses of all leaders to all hosts, in the order in which the hosts joined."""
    leaders = [[_reached(member, leader_address), member.port] for member in members]
    for member in members:
        member.wire.send({"leaders": leaders})


def _reached(member: _Member, leader_address: str) -> str:
    """Return the address at which other hosts reach a member. The leader's host may have joined through a loopback
    address."""
    return leader_address if leader_address and member.address.startswith("127.") else member.address


def _is_to_come(first: Place, port: int, runs: bool) -> bool:
    """Whether the leader at `first` waits for hosts. If so, the members of the leader at `port` should join the leader
    at `first`."""
    with contextlib.suppress(OSError, ValueError), socket.create_connection(first, 1.0) as connection:
        connection.sendall(json.dumps({"led": {"port": port, "runs": runs}}).encode() + b"\n")
        connection.settimeout(BEAT)
        for line in connection.makefile():
            if "come" in (message := json.loads(line)):
                return bool(message["come"])
    return False
