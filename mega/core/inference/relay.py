"""Send rank 0's steps to the other ranks as arrays of integers, so that nothing is unpickled.

On one host, the relay uses a ring buffer in shared memory. Rank 0 waits only if the ring is full, that is, if the
slowest rank is a whole ring behind. Across hosts, the relay broadcasts over a separate gloo group. The first array has
a fixed length and contains [kind, length of the content, beginning of the content]. If necessary, a second array
contains the remaining content. Ranks wait for the next message without a time limit.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mega.core.ops.paged_attention import Integers
from mega.core.ops.trial import first_line
from mega.core.parallel import shared_memory
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.parallel.shared_memory import SharedMemory, is_dead
from mega.core.processes.exit_reports import names_lost_peer

STOP, STEP, DRAFT = 0, 1, 2
"""Kinds of messages. DRAFT: a step that guesses tokens; the content begins with the depth."""

FIRST = 2048
"""Length of the first array that is broadcast for a message."""

RING, PIECE = 16, 1 << 14
"""Number of slots in the ring, and number of integers per slot. The first integer of a slot is the length of its
content."""

PATIENCE = timedelta(days=365)
"""Timeout of the process group, so long that in practice a rank waits for the next message without a limit."""


ENDING = 0.5
"""Seconds to wait for a process to end after its connections were lost."""

LOOK = 0.1
"""Minimum interval, in seconds, between rank 0's checks that the other processes are alive."""

log = logging.getLogger(__name__)


class LostRank(RuntimeError):
    """Raised if another rank has ended or cannot be reached."""


class Relay:
    """The connection by which the first rank of a model replica sends messages to the other ranks. All ranks of `mesh`
    must call the constructor. shared: whether to use shared memory where possible."""

    def __init__(self, mesh: Mesh, shared: bool = True):
        replica = mesh.model.ranks
        groups = Groups("gloo", PATIENCE)
        groups.create(mesh.slices("tp", "pp"), "relay")
        self.axis = Axis("relay", replica, mesh.model.index, groups.get(replica, "relay"))
        process = [socket.gethostname(), os.getpid()]
        self.processes: list[list[object]] = gather_json(process, self.axis, torch.device("cpu"))
        self._ring = self._mapped() if shared and len({host for host, _ in self.processes}) == 1 else None
        self._number, self._looked = 0, 0.0

    def _mapped(self) -> SharedMemory | None:
        try:
            return SharedMemory(self.axis, RING * PIECE * 8, torch.device("cpu"))
        except RuntimeError as error:
            if self.axis.first:
                log.warning("steps reach other ranks by messages: memory cannot be shared (%s)", first_line(error))
            return None

    def send(self, kind: int, content: Integers) -> None:
        """Send a message. Errors: LostRank."""
        if self._ring is not None:
            self._put(self._ring, kind, content)
            return
        first = np.zeros(FIRST, dtype=np.int64)
        first[:2] = kind, len(content)
        first[2 : 2 + len(content)] = content[: FIRST - 2]
        self._broadcast(first)
        if len(content) > FIRST - 2:
            self._broadcast(np.ascontiguousarray(content[FIRST - 2 :]))

    def hear(self) -> tuple[int, Integers]:
        """Wait for the next message. Errors: LostRank."""
        if self._ring is not None:
            return self._taken(self._ring)
        first = np.zeros(FIRST, dtype=np.int64)
        self._broadcast(first)
        kind, length = int(first[0]), int(first[1])
        content = first[2 : 2 + length]
        if length > FIRST - 2:
            rest = np.zeros(length - FIRST + 2, dtype=np.int64)
            self._broadcast(rest)
            content = np.concatenate([content, rest])
        return kind, content

    def _put(self, ring: SharedMemory, kind: int, content: Integers) -> None:
        time_now = time.monotonic()
        if time_now - self._looked > LOOK:
            self._looked = time_now
            if dead_ranks := self._gone():
                raise LostRank(f"rank {', '.join(map(str, dead_ranks))} has ended: it takes no more steps")
        whole = np.concatenate([[kind, len(content)], content])
        for start in range(0, len(whole), PIECE - 1):
            part = whole[start : start + PIECE - 1]
            self._number += 1
            for rank in range(1, self.axis.size):
                self._wait(ring, rank, self._number - RING, patient=False)
            piece = self._piece(ring)
            piece[0], piece[1 : 1 + len(part)] = len(part), part
            ring.mark(self._number)

    def _taken(self, ring: SharedMemory) -> tuple[int, Integers]:
        parts: list[Integers] = []
        while not parts or sum(map(len, parts)) < 2 + int(parts[0][1]):
            self._number += 1
            self._wait(ring, 0, self._number, patient=not parts)
            piece = self._piece(ring)
            parts.append(piece[1 : 1 + int(piece[0])].copy())
            ring.mark(self._number)
        whole = np.concatenate(parts)
        return int(whole[0]), whole[2:]

    def _piece(self, ring: SharedMemory) -> Integers:
        first = self._number % RING * PIECE * 8
        return np.frombuffer(ring.bytes[first : first + PIECE * 8], dtype=np.int64)

    def _wait(self, ring: SharedMemory, rank: int, number: int, *, patient: bool) -> None:
        try:
            ring.wait(rank, number, None if patient else shared_memory.PATIENCE)
        except RuntimeError as error:
            raise self.explained(error) from None

    def _broadcast(self, array: Integers) -> None:
        try:
            dist.broadcast(torch.from_numpy(array), self.axis.ranks[0], group=self.axis.group)
        except RuntimeError as error:
            raise self.explained(error) from None

    def _gone(self) -> list[int]:
        this_host = socket.gethostname()
        return [
            rank
            for rank, (host, pid) in zip(self.axis.ranks, self.processes, strict=True)
            if host == this_host and is_dead(pid)
        ]

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Convert a communication error to LostRank, naming the ranks on this host that have ended. Other errors, such
        as lack of memory on this rank, are returned unchanged."""
        if isinstance(error, LostRank):
            return error
        deadline = time.monotonic() + ENDING
        while not (dead_ranks := self._gone()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not dead_ranks and not names_lost_peer(error):
            return error
        names = (
            f"rank {', '.join(map(str, dead_ranks))} has ended"
            if dead_ranks
            else "another rank has ended or cannot be reached"
        )
        return LostRank(f"{names}: {str(error).splitlines()[0]}")


def relay_of(mesh: Mesh) -> Relay | None:
    """Return a new relay, whose process groups exist until the process ends. Return None if each rank has the whole
    model."""
    return Relay(mesh) if mesh.model.size > 1 else None
