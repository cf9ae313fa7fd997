"""What ranks write for each other into their store while they run: questions, answers, who has left, and the verdict.

    question/N  answer/N/RANK    who asks next increments the number; an answer is a `Position`
    host/RANK                    its host's name and addresses, where ranks are on several
    left/RANK                    it ends since it has lost another rank
    verdict                      why all end: of the first rank that judges

Each call may wait without end where the store's host was stopped: roll_call.py limits them.
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
    """One rank's access to them. position: where its main thread is now. look: seconds between two looks of a rank."""

    def __init__(self, store: Store, rank: int, world: int, position: Callable[[], Position], look: float):
        self._store, self._rank, self._world, self._position, self._look = store, rank, world, position, look
        self._answered, self._answered_at = 0, -math.inf

    def introduce(self, host: str, addresses: Collection[str]) -> None:
        self._store.set(f"host/{self._rank}", json.dumps([host, sorted(addresses)]))

    def host(self, rank: int) -> str | None:
        """The name of its host; None where it has not said, as where all are on one host."""
        key = f"host/{rank}"
        return json.loads(self._store.get(key))[0] if self._store.check([key]) else None

    def hosts(self, keep: Callable[[list[str]], bool] = lambda addresses: True) -> dict[int, str]:
        """Rank -> its host's name, of those whose addresses are kept; none where all are on one host."""
        keys = {rank: f"host/{rank}" for rank in range(self._world)}
        found = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return {rank: name for rank, (name, addresses) in found.items() if keep(addresses)}

    def answer(self) -> None:
        """Every question that has come since."""
        while self._store.check([f"question/{self._answered + 1}"]):
            self._answered, self._answered_at = self._answered + 1, time.monotonic()
            self._store.set(f"answer/{self._answered}/{self._rank}", self._position().dumps())

    def ask(
        self,
        seconds: float,
        stop: Callable[[Collection[int]], bool] = lambda found: False,
        *,
        answers: bool = False,
    ) -> dict[int, Position]:
        """Rank -> where its main thread is, of those that answer in time, or until some rank has judged.

        stop: whether those that have answered are enough. answers: meanwhile, so that ranks that ask each other hear
        each other; then it also takes the answers to a question that another rank has just put.
        """
        if answers and time.monotonic() < self._answered_at + 2 * self._look:
            number = self._answered
        else:
            number = self._store.add("asked", 1)
            self._store.set(f"question/{number}", "")
        deadline, found = time.monotonic() + seconds, {self._rank: self._position()}
        while len(found) < self._world and time.monotonic() < deadline:
            if answers:
                self.answer()
            for rank in set(range(self._world)) - set(found):
                key = f"answer/{number}/{rank}"
                if self._store.check([key]):
                    found[rank] = Position.loads(self._store.get(key))
            if stop(found) or self.verdict():
                break
            time.sleep(min(0.1, self._look))
        if answers:
            self.answer()
        return found

    def silent(self, seconds: float) -> list[int]:
        """The ranks that do not answer so fast, and have not ended well."""
        ranks = set(range(self._world))
        found = self.ask(seconds, lambda found: ranks - self.left() <= set(found))
        return sorted(ranks - set(found) - self.left())

    def leave(self) -> None:
        self._store.set(f"left/{self._rank}", "")

    def left(self) -> set[int]:
        """The ranks that end since they have lost another one."""
        return {rank for rank in range(self._world) if self._store.check([f"left/{rank}"])}

    def lost(self, text: str, seconds: float) -> list[int]:
        """The ranks to which connections broke, of an error that names an address or not: those that neither answer
        nor end for the same reason. This rank ends too."""
        self.leave()
        others = set(range(self._world)) - {self._rank}
        at_address = set(self.hosts(lambda addresses: any(f"[{address}]" in text for address in addresses)))
        for candidates in (at_address & others, others):
            lost = candidates - self.left()
            lost -= set(self.ask(seconds, lost.issubset)) if lost else set()
            if lost := lost - self.left():
                return sorted(lost)
        return []

    def verdict(self) -> str:
        """What a rank has judged, if one has."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else ""

    def judge(self, line: Callable[[], str]) -> str:
        """The verdict: this one if no other rank was faster."""
        return self.verdict() or self._store.compare_set("verdict", "", line()).decode()
