"""How rank 0's steps reach the other ranks: as arrays of integers, so that nothing is ever unpickled.

A message is a first array of fixed length, [kind, length of the rest, the rest as far as it fits], and a second one
where it does not. On a group of its own, on the host, whose ranks may wait for the next message as long as it takes.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mega.core.ops.paged_attention import Integers
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.exit_reports import names_lost_peer
from mega.core.parallel.mesh import Axis, Groups, Mesh

STOP, STEP = 0, 1

FIRST = 2048
"""Length of a message's first array."""

PATIENCE = timedelta(days=365)
"""How long a rank may wait for the next message."""


ENDING = 0.5
"""Seconds from the end of a process's connections to its own, at most."""


class LostRank(RuntimeError):
    """Another rank has ended, or cannot be reached."""


class Relay:
    """All ranks of `mesh` make one together; those of a replica of the model hear what its first rank sends."""

    def __init__(self, mesh: Mesh):
        replica = mesh.model.ranks
        groups = Groups("gloo", PATIENCE)
        groups.make(mesh.slices("tp", "pp"), "relay")
        self.axis = Axis("relay", replica, mesh.model.index, groups.get(replica, "relay"))
        process = [socket.gethostname(), os.getpid()]
        self.processes: list[list[object]] = gather_json(process, self.axis, torch.device("cpu"))

    def send(self, kind: int, content: Integers) -> None:
        """Errors: LostRank."""
        first = np.zeros(FIRST, dtype=np.int64)
        first[:2] = kind, len(content)
        first[2 : 2 + len(content)] = content[: FIRST - 2]
        self._broadcast(first)
        if len(content) > FIRST - 2:
            self._broadcast(np.ascontiguousarray(content[FIRST - 2 :]))

    def hear(self) -> tuple[int, Integers]:
        """The next message. Errors: LostRank."""
        first = np.zeros(FIRST, dtype=np.int64)
        self._broadcast(first)
        kind, length = int(first[0]), int(first[1])
        content = first[2 : 2 + length]
        if length > FIRST - 2:
            rest = np.zeros(length - FIRST + 2, dtype=np.int64)
            self._broadcast(rest)
            content = np.concatenate([content, rest])
        return kind, content

    def _broadcast(self, array: Integers) -> None:
        try:
            dist.broadcast(torch.from_numpy(array), self.axis.ranks[0], group=self.axis.group)
        except RuntimeError as error:
            raise self.explained(error) from None

    def _gone(self) -> list[int]:
        here = socket.gethostname()
        return [
            rank
            for rank, (host, pid) in zip(self.axis.ranks, self.processes, strict=True)
            if host == here and _dead(pid)
        ]

    def explained(self, error: RuntimeError) -> RuntimeError:
        """An error of an exchange as LostRank, with the ranks of this host that are there no longer; one of this rank's
        own, such as memory that is used up, as it is."""
        if isinstance(error, LostRank):
            return error
        deadline = time.monotonic() + ENDING
        while not (gone := self._gone()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not gone and not names_lost_peer(error):
            return error
        names = f"rank {', '.join(map(str, gone))} has ended" if gone else "another rank has ended or cannot be reached"
        return LostRank(f"{names}: {str(error).splitlines()[0]}")


def relay_of(mesh: Mesh) -> Relay | None:
    """A new one, with process groups of its own that stay to the end; None where a rank holds the whole model."""
    return Relay(mesh) if mesh.model.size > 1 else None


def _dead(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except OSError:
        return False
