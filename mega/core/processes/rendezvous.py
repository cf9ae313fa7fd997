"""The rendezvous of ranks, which provides their shared store and checks that all of them have joined.

    1 a store                     a file, for ranks of `launch`; the agent's store, under torchrun; otherwise a store
                                  that rank 0 hosts
    2 every rank enters           its world size, and a token that is unique to the process
    3 rank 0 lists the tokens     and updates the list after changes, because a store may hold tokens of an attempt that
                                  was killed
    4 every listed rank           acknowledges the list, which proves that the rank is alive
    5 rank 0 decides              to start or to fail; any rank whose time is over decides to fail. The first decision
                                  counts
    6 a rank that has failed      before all ranks have joined writes its failure to the store (exit_reports.py), and
                                  every waiting rank ends

All later keys have a prefix that is unique to this rendezvous, so ranks never read keys of another rendezvous in the
same store. No rank waits longer than --timeout-minutes; after that time, all ranks report the same message with the
missing ranks. A rank that was killed does not write its failure, so only its launcher can end the other ranks early.
This module does not depend on process groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mega.core.processes.world import MEETING_FILE, World, check_address, point_to_first_host, restart_count
from mega.core.words import name_ranks

HANDSHAKE = 15.0
"""Timeout in seconds for the first answer of a store after connecting. The store has its own thread, so it is never
busy."""

NAMED_WITHIN = 10.0
"""Seconds within which the host of rank 0 must know the name in MASTER_ADDR, because a name server may be late."""

_POLL = (0.01, 0.3)
"""Seconds between two polls: the first interval, and the longest interval."""


_HOSTED: list[dist.Store] = []
"""Stores that this process hosts; other ranks may read these stores until the process ends."""


_UNREACHABLE: list[OSError] = []
"""The error if this process could not reach its store. It is kept so that exit reports do not wait for the store
again."""


class StoreLost(ConnectionError):
    """Raised if the store is lost during the rendezvous."""

    elsewhere = True


class RankFailed(ConnectionError):
    """Raised if another rank fails before all ranks have joined."""

    elsewhere = True


_FAILED = "failed"
"""Store key for the failure of the first rank that failed before it had joined. The value contains the rank, its host
and the reason."""


def publish_failure(store: dist.Store, rank: int, reason: str) -> None:
    """Record in the store that a rank failed before all ranks had joined, so that waiting ranks end. store: see
    `attempt_store`."""
    line = (reason.rstrip().splitlines() or [""])[-1]
    store.compare_set(_FAILED, "", json.dumps([rank, socket.gethostname(), line]))


def _failure(store: dist.Store) -> RankFailed | None:
    """Return the failure that a rank has written, as an exception for the ranks that wait for that rank."""
    if _restarts_left() or (failure := _read(store, _FAILED)) is None:
        return None
    rank, host, line = failure
    return RankFailed(f"rank {rank} on host {host} failed before all ranks had joined: {line}")


def _restarts_left() -> bool:
    """Whether torchrun will restart all ranks after a failure. Ranks must then ignore written failures, because
    torchrun's agents end the ranks. Each host's agent counts attempts separately, so the failure may be from an earlier
    attempt."""
    return restart_count() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def attempt_store(store: dist.Store) -> dist.Store:
    """Return the store for this attempt, with a key prefix if the launcher's store outlives attempts. A file store is
    new for each attempt."""
    return store if MEETING_FILE in os.environ else dist.PrefixStore(str(restart_count()), store)


def meet(world: World, minutes: float) -> dist.Store:
    """Wait for all ranks, and return a store for the ranks of this attempt only.

    Errors: ValueError if ranks disagree about the world size, or if the host of rank 0 does not know MASTER_ADDR;
        TimeoutError naming the missing ranks; RankFailed naming a rank that failed, with its host and its reason;
        OSError.
    """
    deadline = time.monotonic() + 60 * minutes
    opened = open_store(world, deadline, minutes)
    store = dist.PrefixStore("meeting", opened)
    try:
        return _meet(store, attempt_store(opened), world, minutes, deadline)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise StoreLost(f"rank 0 or its host ended before all ranks had come: {reason}") from None


def _meet(store: dist.Store, attempt: dist.Store, world: World, minutes: float, deadline: float) -> dist.Store:
    token, pause = uuid.uuid4().hex, _POLL[0]
    # 2 enter
    store.set(f"enter/{world.rank}", json.dumps([token, world.size]))
    host = _Host(store, world) if world.rank == 0 else None
    acknowledged: dict[str, Any] = {}
    while True:
        # 3 rank 0 lists the tokens
        if host is not None:
            host.look()
        members = _read(store, "list")
        if members and members["tokens"].get(str(world.rank)) == token and members != acknowledged:
            # 4 acknowledge
            acknowledged = members
            store.set(f"here/{acknowledged['name']}/{world.rank}", token)
        if _read(store, f"enter/{world.rank}")[0] != token:
            raise ValueError(f"RANK {world.rank}: another process has come as this rank; each needs its own number")
        # 5 read the decision, but failures first, because the decision may make a rank fail
        failure = _failure(attempt)
        if acknowledged and (word := _read(store, f"word/{acknowledged['name']}")) is not None:
            break
        # 6 raise another rank's failure
        if failure is not None:
            raise failure
        if time.monotonic() > deadline:
            problem = _missing(store, world, acknowledged, minutes)
            if not acknowledged:
                raise TimeoutError(problem)
            store.compare_set(f"word/{acknowledged['name']}", "", json.dumps({"late": problem}))
        time.sleep(pause)
        pause = min(2 * pause, _POLL[1])
    if "late" in word:
        raise TimeoutError(word["late"])
    if "wrong" in word:
        raise ValueError(word["wrong"])
    return dist.PrefixStore(acknowledged["name"], store)


class _Host:
    """Performs phases 3 and 5 of the rendezvous, on rank 0 only."""

    def __init__(self, store: dist.Store, world: World):
        self._store, self._world, self._name = store, world, uuid.uuid4().hex
        self._entries: dict[int, list[Any]] = {}
        self._unknown = ""
        """Why this host does not know the name in MASTER_ADDR; empty while it may."""
        if hosts_store(world):
            threading.Thread(target=self._find_name, name="find-name", daemon=True).start()

    def _find_name(self) -> None:
        """Set `_unknown` if the name in MASTER_ADDR remains unknown for `NAMED_WITHIN` seconds."""
        address, deadline = os.environ["MASTER_ADDR"], time.monotonic() + NAMED_WITHIN
        while True:
            try:
                socket.getaddrinfo(address, None)
                return
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
            if time.monotonic() > deadline:
                self._unknown = (
                    f"MASTER_ADDR {address}: the host of rank 0 does not know this name ({reason}), and no other rank "
                    "has come; must be a name or an address of rank 0's host, on every host"
                )
                return
            time.sleep(min(0.5, NAMED_WITHIN / 4))

    def look(self) -> None:
        """Update the list of tokens, and write the decision when all ranks have acknowledged the list. Errors:
        ValueError if this host does not know MASTER_ADDR, and no other rank has entered."""
        store, world, name = self._store, self._world, self._name
        entries = {rank: entry for rank in range(world.size) if (entry := _read(store, f"enter/{rank}")) is not None}
        if self._unknown and len(entries) == 1 < world.size:
            raise ValueError(self._unknown)
        if entries != self._entries:
            self._entries = entries
            store.set("list", json.dumps({"name": name, "tokens": {rank: entry[0] for rank, entry in entries.items()}}))
        present = [rank for rank, entry in entries.items() if _text(store, f"here/{name}/{rank}") == entry[0]]
        other = [rank for rank in present if entries[rank][1] != world.size]
        if other:
            size = entries[other[0]][1]
            wrong = f"WORLD_SIZE is {size} for {name_ranks(other)} and {world.size} for rank 0; must be the same"
            store.compare_set(f"word/{name}", "", json.dumps({"wrong": wrong}))
        elif len(present) == world.size:
            store.compare_set(f"word/{name}", "", "{}")


def _file_store(path: str, size: int) -> dist.Store:
    """Open the store of a launcher's local ranks. Errors: StoreLost if the launcher has ended and its folder is gone.

    For such a folder, the constructor of `FileStore` would retry for minutes without releasing Python's lock, so that
    no other thread, such as the one that ends a rank after its launcher, could run."""
    try:
        open(path, "ab").close()
    except FileNotFoundError:
        raise StoreLost("the launcher of this rank has ended") from None
    return dist.FileStore(path, size)


def open_store(world: World, deadline: float, minutes: float | None = None) -> dist.Store:
    """Open the store that the launcher or rank 0 hosts. minutes: the time limit that the message names if `deadline`
    passes.

    Errors: ValueError if the address is missing or invalid; OSError, naming the address, if the store cannot be
    reached.
    """
    if MEETING_FILE in os.environ:
        return _file_store(os.environ[MEETING_FILE], world.size)
    point_to_first_host(world)
    check_address(world)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    hosting = hosts_store(world)
    if _UNREACHABLE:
        raise _UNREACHABLE[0]
    try:
        if not hosting:
            reach(address, int(port), deadline, minutes)
        return _connect("127.0.0.1" if hosting else address, int(port), hosting, deadline)
    except OSError as error:
        _UNREACHABLE.append(error)
        raise


def hosts_store(world: World) -> bool:
    """Whether this rank hosts the store, so that the store ends with this rank."""
    elsewhere = MEETING_FILE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return world.rank == 0 and not elsewhere


def _connect(address: str, port: int, hosting: bool, deadline: float) -> dist.Store:
    """Open a TCPStore on a thread, because torch would wait forever for a listener that is not a store."""
    patience = min(HANDSHAKE, max(1.0, deadline - time.monotonic()))
    results: queue.Queue[dist.Store | Exception] = queue.Queue()

    def connect() -> None:
        seconds = timedelta(seconds=patience)
        try:
            results.put(dist.TCPStore(address, port, None, hosting, seconds, wait_for_workers=False, multi_tenant=True))
        except Exception as error:
            results.put(error)

    threading.Thread(target=connect, name="connect-store", daemon=True).start()
    try:
        store = results.get(timeout=patience)
    except queue.Empty:
        store = TimeoutError()
    if not isinstance(store, Exception):
        if hosting:
            _HOSTED.append(store)
        return store
    if hosting and "EADDRINUSE" in str(store):
        raise OSError(
            f"MASTER_PORT {port}: another process of this host listens there, so ranks cannot meet; name a free port"
        ) from None
    raise OSError(
        f"MASTER_ADDR {address}, MASTER_PORT {port}: what listens there is not rank 0 of this run; has another program "
        f"taken the port? ({str(store).splitlines()[0] if str(store) else f'no answer within {patience:.0f} s'})"
    ) from None


def reach(address: str, port: int, deadline: float, minutes: float | None = None) -> None:
    """Wait until the store's host listens. Without this wait, torch would report a timeout with C++ frames. Errors:
    TimeoutError if the host does not listen before `deadline`."""
    while True:
        try:
            return socket.create_connection((address, port), 2.0).close()
        except (OSError, UnicodeError) as error:  # UnicodeError if the host name is invalid
            if time.monotonic() > deadline:
                how_long = f" {duration(minutes)} (--timeout-minutes)" if minutes else ""
                raise TimeoutError(
                    f"waited{how_long} for rank 0 at MASTER_ADDR {address}, MASTER_PORT {port}, where nothing answers "
                    f"({getattr(error, 'strerror', None) or error})"
                ) from None
        time.sleep(0.1)


def _missing(store: dist.Store, world: World, acknowledged: Mapping[str, Any], minutes: float) -> str:
    """Return the message about ranks that are missing after the time limit."""
    missing = [0]  # rank 0 has not written the list
    if acknowledged:
        name, tokens = acknowledged["name"], acknowledged["tokens"]
        present = [rank for rank in map(int, tokens) if _text(store, f"here/{name}/{rank}") == tokens[str(rank)]]
        missing = sorted(set(range(world.size)) - set(present))
    address = "" if MEETING_FILE in os.environ else f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"waited {duration(minutes)} (--timeout-minutes){address} for {name_ranks(missing)} of {world.size}, "
        f"{'which' if len(missing) == 1 else 'none of which'} {'did not come' if len(missing) == 1 else 'came'}; see "
        "that every rank is started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def duration(minutes: float) -> str:
    """Format a duration for a message.

    >>> duration(10), duration(1), duration(0.05)
    ('10 minutes', '1 minute', '3 seconds')
    """
    if minutes < 1:
        return f"{60 * minutes:.3g} seconds"
    return f"{minutes:g} minute{'s' if minutes > 1 else ''}"


def _read(store: dist.Store, key: str) -> Any:
    """Return the JSON value under `key`, or None if the value is absent or only partly written."""
    with contextlib.suppress(ValueError):
        return json.loads(_text(store, key) or "")
    return None


def _text(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
