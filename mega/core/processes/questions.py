"""The messages that running ranks exchange through their store: questions, answers, ranks that left, and the verdict.

    question/N  answer/N/RANK    questions are numbered in order; an answer is a `Position`
    host/RANK                    name and addresses of the rank's host, if there are several hosts
    left/RANK                    written by a rank that ends because it has lost another rank
    ended/RANK                   the report of a rank that ends because of its own error
    failed                       the first rank that ended because of its own error, and its report, as a message
    verdict                      why all ranks end; the first rank to write it decides

Each call may block forever if the store's host has stopped, so roll_call.py limits the time of calls.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from mega.core.processes.position import Position

if TYPE_CHECKING:
    from torch.distributed import Store


class Questions:
    """One rank's access to the messages in the store.

    position: function that returns the position of the rank's main thread. look: seconds between two polls by a rank.
    """

    def __init__(self, store: Store, rank: int, world: int, position: Callable[[], Position], look: float):
        self._store, self._rank, self._world, self._position, self._look = store, rank, world, position, look
        self._answered, self._answered_at = 0, -math.inf

    def introduce(self, host: str, addresses: Collection[str]) -> None:
        self._store.set(f"host/{self._rank}", json.dumps([host, sorted(addresses)]))

    def host(self, rank: int) -> str | None:
        """Return the name of the rank's host, or None if the rank has not written the name, as on a single host."""
        key = f"host/{rank}"
        return json.loads(self._store.get(key))[0] if self._store.check([key]) else None

    def hosts(self, keep: Callable[[list[str]], bool] = lambda addresses: True) -> dict[int, str]:
        """Return a map from ranks to the names of their hosts, for hosts whose addresses satisfy `keep`. The map is
        empty on a single host."""
        keys = {rank: f"host/{rank}" for rank in range(self._world)}
        hosts = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return {rank: name for rank, (name, addresses) in hosts.items() if keep(addresses)}

    def answer(self) -> None:
        """Answer all new questions from other ranks."""
        while self._store.check([f"question/{self._answered + 1}"]):
            self._answered, self._answered_at = self._answered + 1, time.monotonic()
            self._store.set(f"answer/{self._answered}/{self._rank}", self._position().dumps())

    def ask(
        self,
        seconds: float,
        stop: Callable[[Collection[int]], bool] = lambda answered: False,
        *,
        answers: bool = False,
    ) -> dict[int, Position]:
        """Ask all ranks, and return a map from ranks to positions for the ranks that answer before the timeout and
        before a rank writes the verdict.

        stop: function that returns whether the ranks that have answered are enough. answers: whether to answer
        questions while waiting, so that ranks can ask each other. If another rank has just asked, this rank uses the
        answers to that question.
        """
        # Ranks that suspect a fault at the same moment share one question, which limits the load of the store.
        if answers and time.monotonic() < self._answered_at + 2 * self._look:
            number = self._answered
        else:
            number = self._store.add("asked", 1)
            self._store.set(f"question/{number}", "")
        deadline, positions = time.monotonic() + seconds, {self._rank: self._position()}
        while len(positions) < self._world and time.monotonic() < deadline:
            if answers:
                self.answer()
            for rank in set(range(self._world)) - set(positions):
                key = f"answer/{number}/{rank}"
                if self._store.check([key]):
                    positions[rank] = Position.loads(self._store.get(key))
            if stop(positions) or self.verdict():
                break
            time.sleep(min(0.1, self._look))
        if answers:
            self.answer()
        return positions

    def silent(self, seconds: float) -> list[int]:
        """Return the ranks that have neither left, nor ended, nor answered within `seconds`."""
        return self.absent(self.ask(seconds, lambda answered: not self.absent(answered)[0]))[0]

    def leave(self) -> None:
        self._store.set(f"left/{self._rank}", "")

    def left(self) -> set[int]:
        """Return the ranks that have ended, or are ending because they have lost another rank."""
        return {rank for rank in range(self._world) if self._store.check([f"left/{rank}"])}

    def end(self, report: str) -> None:
        self._store.set(f"ended/{self._rank}", report)
        self._store.compare_set("failed", "", _ended(self._rank, report))

    def failure(self) -> str:
        """Return a message with the report of the first rank that has ended because of its own error, or "" if there is
        no such rank."""
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def absent(self, answered: Collection[int]) -> tuple[list[int], str]:
        """Return the ranks that have neither answered, nor left, nor ended, and a message with the report of the first
        rank that has ended, or "" if no rank has ended."""
        silent, ended = list[int](), ""
        for rank in sorted(set(range(self._world)) - set(answered)):
            if self._store.check([f"ended/{rank}"]):
                ended = ended or _ended(rank, self._store.get(f"ended/{rank}").decode())
            elif not self._store.check([f"left/{rank}"]):
                silent.append(rank)
        return silent, ended

    def lost(self, text: str, seconds: float) -> list[int]:
        """Return the ranks that are lost after a connection broke: those that do not answer and have not themselves
        ended because of the loss. Ranks of the host whose address is in the error message `text` are asked first. Also
        record that this rank has left."""
        self.leave()
        peers = set(range(self._world)) - {self._rank}
        at_address = set(self.hosts(lambda addresses: any(f"[{address}]" in text for address in addresses)))
        for candidates in (at_address & peers, peers):
            suspects = candidates - self.left()
            suspects -= set(self.ask(seconds, suspects.issubset)) if suspects else set()
            # Check again, because some ranks may have left while this rank waited for their answers.
            if suspects := suspects - self.left():
                return sorted(suspects)
        return []

    def verdict(self) -> str:
        """Return the verdict, or "" if no rank has written a verdict."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else ""

    def judge(self, line: Callable[[], str]) -> str:
        """Write the verdict unless another rank has already written one, and return the verdict in the store."""
        return self.verdict() or self._store.compare_set("verdict", "", line()).decode()


def _ended(rank: int, report: str) -> str:
    return f"rank {rank} has ended: {report}"
