"""The leading host's part: who has joined, which ranks each host starts, and what follows when an attempt has ended.

Every host has a leader that listens, so that another one can lead when the first is lost; all but one have no members.
It starts no process: each host's launcher does (hosts.py).
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
"""Seconds in which a host ends its ranks; beyond it, the host counts as lost."""

REPORTING = 1.0
"""Seconds in which ranks of other hosts end by themselves, and say why, when the run ends with a failure."""

LEAVING = 3.0
"""Seconds in which the other hosts read that all is over."""

SHOWN = 5
"""Differences of a host that are named."""

CALL = 5.0
"""Seconds between two looks at the place where hosts join, of a leader that is not there."""

Place = tuple[str, int]

Events = queue.Queue[tuple[Wire, dict[str, Any] | None]]
"""What members say; None when one is lost."""


@dataclass(frozen=True)
class Size:
    """hosts: that run; nproc: ranks of each. minutes: to wait for hosts. limit: of restarts in a row. alike: Job's."""

    hosts: int
    nproc: int
    minutes: float
    limit: int
    version: str
    alike: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class _Member:
    """A host that has joined. address, port: where its own leader listens. meet: a free port for its ranks. seat: its
    place among the hosts that run, which a survivor keeps. running: its ranks are not known to have ended."""

    wire: Wire
    name: str
    address: str
    port: int
    meet: int
    seat: int | None
    running: bool = False
    spare: bool = False
    """It knows that it is one."""

    def listens_here(self, port: int) -> bool:
        """Whether it is the host of the leader that listens at `port`."""
        return self.port == port and self.wire.here == self.wire.there


class Leader:
    """Leads those that join until the job is over. server: a listening socket. saved: the newest step; and the newest
    that this host has in memory."""

    def __init__(self, server: socket.socket, size: Size, saved: Callable[[], tuple[int, int]], first: Place | None):
        """first: where hosts join at the launch, if that is not here."""
        self._server, self._size, self._saved, self._first = server, size, saved, first
        self.port: int = server.getsockname()[1]
        self._called = time.monotonic()
        self._events: Events = queue.Queue()
        self._members: dict[Wire, _Member] = {}
        self._restarts: Restarts | None = None
        self._reason = ""
        """Why the attempt before has ended."""
        self._endings: list[tuple[str, Ending]] | None = None
        """Of the attempt that runs, with the names of hosts; None while none runs."""
        self._since = time.monotonic()
        """When the hosts that are there began to wait, or were asked to end their ranks."""
        self._launched = time.monotonic()
        self._stop_at: float | None = None
        """When the hosts whose ranks run are asked to end them."""
        self._stopping = self._over = self._takes_over = False
        self._reach = ""
        """An address of this host by which another one has reached it."""

    def start(self) -> Leader:
        threading.Thread(target=_accept, args=(self._server, self._events), name="accept", daemon=True).start()
        threading.Thread(target=self._lead, name="leader", daemon=True).start()
        return self

    def _lead(self) -> None:
        try:
            while not self._over:
                with contextlib.suppress(queue.Empty):
                    self._heed(*self._events.get(timeout=1.0))
                self._advance()
        except Exception as error:  # or else all hosts would wait for this thread
            self._finish(1, f"the host that leads the others failed: {error!r}")

    def _heed(self, wire: Wire, message: dict[str, Any] | None) -> None:
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
            except (KeyError, TypeError, ValueError, OSError):  # not a host's words, or it has gone already
                wire.close()
        else:
            member.meet = int(message["meet"])
            if member.running:
                member.running = False
                self._ended(member.name, Ending(**message["ended"]))

    def _called_by(self, wire: Wire, port: int, runs: bool) -> None:
        """By another leader, whose run goes on or waits for hosts."""
        wire.send({"come": bool(self._members) and not runs})
        if runs and self._endings is None:
            self._move((wire.there, port))

    def _join(self, wire: Wire, size: dict[str, Any], known: dict[str, Any], **found: Any) -> None:
        """Phase 1. known: to a host that had another leader."""
        own = asdict(self._size)
        differ = _differ(size.get("alike", {}), own["alike"]) or _differ(size, own)
        if differ:
            wire.send({"refused": f"the hosts of a run must be started alike: {'; '.join(differ)}"})
            return
        if not self._members:
            self._since = time.monotonic()
        address, here = wire.there, wire.here
        if not address.startswith("127."):
            self._reach = here
        self._members[wire] = _Member(wire, address=address, **found)
        restarts = known["restarts"]
        if restarts is not None and (self._restarts is None or restarts["number"] > self._restarts.number):
            self._restarts, self._takes_over, self._reason = (
                Restarts.heard(**restarts),
                known["failed"],
                known["reason"],
            )
        line = ""
        if self._takes_over:
            now = f"MASTER_ADDR {here} MASTER_PORT {self.port}"
            line = f"{self._reason}; this one leads now, and hosts that join later need {now}"
        wire.send({"welcome": [member.name for member in self._members.values()][:1], "said": line})
        _send_leaders(self._members.values(), self._reach)
        if self._endings is not None and not self._stopping:
            assert self._restarts is not None
            _spare(self._members[wire], self._restarts, self._size.hosts)

    def _gone(self, member: _Member) -> None:
        """Phase 4."""
        del self._members[member.wire]
        if member.running:
            self._ended(member.name, Ending(1, f"host {member.name} was lost", cause=True))
        _send_leaders(self._members.values(), self._reach)

    def _ended(self, name: str, ending: Ending) -> None:
        """Phase 3. Ranks that were asked to stop do so together: no host ends those of another one before they have
        saved."""
        assert self._endings is not None
        self._endings.append((name, ending))
        asked = any(each.final and each.code in STOPPED for _, each in self._endings)
        if asked and not self._stopping:
            self._stop_at = None
        elif ending.code and self._stop_at is None:
            self._stop_at = time.monotonic() + (REPORTING if ending.final else 0.0)

    def _advance(self) -> None:
        """What is due now."""
        running = [member for member in self._members.values() if member.running]
        if self._endings is not None:
            if self._stop_at is not None and not self._stopping and time.monotonic() >= self._stop_at:
                self._stopping, self._since = True, time.monotonic()
                for member in running:
                    member.wire.send({"stop": ""})
            if running and self._stopping and time.monotonic() > self._since + ENDING:
                for member in running:
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
        """Phase 5."""
        self._endings, self._stop_at, self._stopping, self._since = None, None, False, time.monotonic()
        failed = [(name, ending) for name, ending in endings if ending.code]
        final = [ending for _, ending in failed if ending.final]
        if not failed or final:
            self._finish(exit_code(max(final, key=lambda ending: ending.cause)) if final else 0)
            return
        name, first = min(failed, key=lambda found: not found[1].cause)
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
        """Phase 2: seats, then the word to all."""
        restarts = self._first_restarts()
        if restarts is None:
            return
        self._restarts, free, waiting = restarts, set(range(self._size.hosts)), list[_Member]()
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
        place = {"address": _reached(first, self._reach), "port": first.meet, "restarts": restarts.sent()}
        line = restarts.restart(self._reason) if restarts.number else ""
        self._endings = []
        for member in self._members.values():
            member.running = member.seat is not None
            if member.running:
                member.wire.send({"start": {**place, "seat": member.seat}, "said": line})
            else:
                _spare(member, restarts, self._size.hosts)

    def _first_restarts(self) -> Restarts | None:
        """That of the attempt that begins; None where all is over."""
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
        """All members go to another leader, which begins with what is known here."""
        restarts = None if self._restarts is None else self._restarts.sent()
        known = {"restarts": restarts, "failed": self._takes_over, "reason": self._reason}
        for member in self._members.values():
            member.wire.send({"move": place, "known": known})

    def _call_first(self) -> None:
        """A host that has come back to where hosts join has no members: it goes where the run is, or, if it runs
        nowhere, all go to it."""
        first = self._first
        if first is not None and self._members and time.monotonic() > self._called + CALL:
            if _is_to_come(first, self.port, self._endings is not None):
                self._move(first)
            self._called = time.monotonic()

    def _finish(self, code: int, line: str = "") -> None:
        """Tell all hosts that all is over; this one, which ends with its leader, last."""
        self._over = True
        own = [member for member in self._members.values() if member.listens_here(self.port)]
        others = [member for member in self._members.values() if not member.listens_here(self.port)]
        for member in others:
            member.wire.send({"finish": code, "said": line})
        deadline = time.monotonic() + LEAVING
        for member in others:
            member.wire.wait_closed(max(0.0, deadline - time.monotonic()))
        for member in own:
            member.wire.send({"finish": code, "said": line})


def _spare(member: _Member, restarts: Restarts, hosts: int) -> None:
    line = "" if member.spare else f"this host is a spare; --hosts {hosts} others have come before it"
    member.wire.send({"said": line, "restarts": restarts.sent()})
    member.spare = True


def _differ(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """What is not the same on two hosts; of many, the first ones."""
    names = [name for name in {**here, **there} if name != "alike" and there.get(name) != here.get(name)]
    parts = [f"{name} {there.get(name)}, here {here.get(name)}" for name in names[:SHOWN]]
    return [*parts, f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else parts


def listen_first(leader: Leader, server: socket.socket) -> None:
    """Listen also where hosts join: that turned out to be here."""
    leader._first = None
    threading.Thread(target=_accept, args=(server, leader._events), name="accept-first", daemon=True).start()


def outlast(leader: Leader, seconds: float) -> None:
    """Wait until no other host that is led here runs ranks, `seconds` at most: without a leader they would start again
    elsewhere what has been asked to stop."""
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
        except OSError:  # a host that has gone already, or no free descriptor for a moment
            time.sleep(0.1)
            continue
        _listen_to(wire, events)


def _listen_to(wire: Wire, events: Events) -> None:
    wire.start(lambda message: events.put((wire, message)), lambda: events.put((wire, None)))


def _send_leaders(members: Collection[_Member], here: str) -> None:
    """All hosts know where the others' leaders listen, the first to have joined first."""
    leaders = [[_reached(member, here), member.port] for member in members]
    for member in members:
        member.wire.send({"leaders": leaders})


def _reached(member: _Member, here: str) -> str:
    """The address by which other hosts reach a member: the leading host may have joined itself by a loopback one."""
    return here if here and member.address.startswith("127.") else member.address


def _is_to_come(first: Place, port: int, runs: bool) -> bool:
    """Whether a leader is there that waits for hosts, when the one at `port` here does not have enough of them."""
    with contextlib.suppress(OSError, ValueError), socket.create_connection(first, 1.0) as way:
        way.sendall(json.dumps({"led": {"port": port, "runs": runs}}).encode() + b"\n")
        way.settimeout(BEAT)
        for line in way.makefile():
            if "come" in (message := json.loads(line)):
                return bool(message["come"])
    return False
