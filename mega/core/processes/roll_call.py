"""Which rank the others wait for: every rank has a thread that answers a question put into their store.

    1 a rank suspects            its main thread has stood at one place for a quarter of --timeout-minutes, or an
                                 exchange has run out of time
    2 it asks                    every rank that lives answers with where its main thread is (position.py)
    3 a rank that is silent      for the rest of the time-out was stopped, or cannot be reached
    4 where all answer           the rank that waits asks again, until --timeout-minutes are over, or where any is in
                                 one of the phases that may take long (activity.py), --phase-timeout-minutes
    5 the first rank to judge    names who is waited for, in the store; all ranks end with that one line

So exchanges have time-outs only in case the thread, or the store, is no more. A server waits for requests, not for a
step, so where a main thread stands says nothing: its ranks ask again and again (`keep_asking`), and a rank that has not
answered for --timeout-minutes is lost. The store itself may be what is silent, where the rank or the host that has it
was stopped or cut off: no call to it is waited for without end. It knows no collectives and no training.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mega.core.activity import ACTIVITY
from mega.core.processes.exit_reports import LIMIT, ExitReport, report_exit
from mega.core.processes.flight import missing
from mega.core.processes.position import Position, named, own_place, own_position, silence, standstill, store_silence
from mega.core.processes.questions import Questions
from mega.core.processes.rendezvous import duration
from mega.core.processes.world import LAUNCHER_FILE

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK = 0.5
"""Seconds between two looks of a rank; a large world takes longer, for its store's sake, a short time-out less."""

ANSWER = 20.0
"""Seconds in which a rank that lives answers, on the busiest machine; at most a third of the time-out."""

LOST = ".lost"
"""How the name of the file ends where the launcher of local ranks notes that one was killed."""

SILENT = 10.0
"""Seconds beyond which a store that lives has answered, on the busiest machine too."""

INTERVAL = 120.0
"""Seconds between the questions of a rank that keeps asking; at most a quarter of the time-out."""

LEAVING = 2.0
"""Seconds that a rank that ends well takes to say so."""

PEERS = 4.0
"""Seconds in which ranks answer one whose connection to one of them has broken."""

Result = TypeVar("Result")


class RollCall:
    """One rank's part, from `start` to `close`. store: one that no other thread waits in."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        minutes: float,
        hosted: bool = True,
        remote: bool = True,
        *,
        phase_minutes: float | None = None,
        host: tuple[str, Collection[str]] | None = None,
    ):
        """hosted: by rank 0, and not by a launcher's agent. remote: the store may be silent; not so a file.
        phase_minutes: of patience with phases that may take long; None: ranks that answer are never given up. host:
        this one's name and addresses, where there are several."""
        self.minutes, self._hosted, self._remote = minutes, hosted, remote
        self._rank, self._world, self._host = rank, world, host
        self._phase_minutes = None if phase_minutes is None else max(minutes, phase_minutes)
        self._main = threading.main_thread().ident
        self._answer_seconds = min(ANSWER, 20 * minutes)
        self._look = max(min(LOOK, minutes), world / 500)
        self._silence = max(60 * minutes, SILENT)
        self.questions = Questions(store, rank, world, lambda: own_position(self._failed_at), self._look)
        self._failed_at: str | None = None
        self._first: dict[int, str] = {}
        """Rank 0 -> its host's name, which its store can no longer say when that host has stopped."""
        self._interval: float | None = None
        self._lost: Callable[[str], None] | None = None
        """What is called with the reason instead of ending this process."""
        self._store_is_silent = False
        self._reported = ""
        self._ending = threading.Lock()
        """Taken by the thread that reports."""
        self._closed = threading.Event()

    def start(self) -> RollCall:
        threading.Thread(target=self._watch, name="roll-call", daemon=True).start()
        return self

    def close(self) -> None:
        """From now on this rank does not answer, and no other rank expects it to."""
        self._closed.set()
        with contextlib.suppress(Exception):  # of a store that has gone, or is silent
            in_time(self.questions.leave, LEAVING)

    def keep_asking(self, lost: Callable[[str], None] | None = None) -> None:
        """From now on ask all ranks regularly, wherever this one's main thread stands. lost: called once, on the thread
        that asks, with the line about ranks that have not answered, or of which their launcher says that they were
        killed; None: prints it and ends the process."""
        self._lost = lost
        self._interval = min(INTERVAL, 15 * self.minutes)

    # -- what the main thread asks

    def explain(self, error: BaseException) -> str:
        """Why an exchange has run out of time; where this rank stood is in its error."""
        if self._reported:
            if self._closed.is_set() and self._lost is None:
                time.sleep(LIMIT)  # the other thread is about to end this process, with the same report
            return self._reported
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self._failed_at = next(filter(None, map(own_place, reversed(frames))), None)
        try:
            line = self._judged(self._ask(self._answer_seconds), _limit(self.minutes, self._phase_minutes))
        except TimeoutError:
            line = self._silent_store()
        if not self._ending.acquire(blocking=False):
            return self.explain(error)  # the other thread was faster
        self._reported = line
        return line

    def explain_loss(self, error: BaseException) -> str | None:
        """Which rank it is to which the connection broke, of an error that has its address or not; None where the
        store does not say. A store that breaks, too, has gone with rank 0, unless it is a launcher's."""
        questions = self.questions

        def ask() -> str | None:
            lost = questions.lost(str(error), PEERS)
            end = f"which {'has' if len(lost) == 1 else 'have'} ended or cannot be reached"
            return f"lost {named(lost, questions.hosts())}, {end}" if lost else None

        try:
            return self._in_time(ask, 2 * PEERS + SILENT)
        except TimeoutError:
            return None
        except RuntimeError:
            if self._hosted and self._rank:
                return f"lost {named([0], self._first)}, which has ended or cannot be reached"
            raise

    # -- the thread

    def _watch(self) -> None:
        """Answer; suspect."""
        try:
            if self._host is not None:
                name, addresses = self._host
                self._in_time(lambda: self.questions.introduce(name, addresses), self._silence)
            stood, since, ask = None, time.monotonic(), math.inf
            while not self._closed.wait(self._look):
                self._end(self._in_time(self._answer, self._silence))
                now, moment = self._standing(), time.monotonic()
                if self._lost is not None:
                    self._end(launchers_note())
                if self._interval is not None:
                    if moment > since + self._interval:
                        self._suspect(60 * self.minutes - self._interval)
                        since = time.monotonic()
                elif now != stood:
                    stood, since, ask = now, moment, moment + 15 * self.minutes
                elif moment > ask:
                    limit = self._suspect(45 * self.minutes, since)
                    ask = min(time.monotonic() + 15 * self.minutes, max(limit, time.monotonic()))
        except TimeoutError:
            self._store_is_silent = True
            self._end(self._silent_store())
        except Exception:  # the store has gone; its host's end ends the others too, unless a device keeps them waiting
            if not self._closed.wait(60 * self.minutes):
                gone = f"{named([0], self._first)}, or its host, has ended"
                self._end(gone if self._hosted else "the launcher's store has gone")

    def _answer(self) -> str:
        """What another rank has judged, if one has."""
        if self._host is not None and not self._first and (name := self.questions.host(0)) is not None:
            self._first = {0: name}
        self.questions.answer()
        return self.questions.verdict()

    def _suspect(self, seconds: float, since: float = math.inf) -> float:
        """Ask all ranks, and judge those that are silent for so long. since: when this rank's main thread has come to
        where it stands; then, judge also how long that is. The time until which it may stand there."""
        stood, standing, moved = self._standing(), since < math.inf, list[bool]()

        def stop(found: Collection[int]) -> bool:
            moved.extend([True] if self._closed.is_set() or (standing and self._standing() != stood) else [])
            return bool(moved)

        positions = self._ask(seconds, stop, answers=True)
        if moved:
            return math.inf
        if len(positions) < self._world:
            self._end(self._judged(positions))
        if not standing or self._phase_minutes is None:
            return math.inf
        patient = any(position.patient for position in positions.values())
        until = since + 60 * (self._phase_minutes if patient else self.minutes)
        if time.monotonic() >= until:
            self._end(self._judged(positions, _limit(self.minutes, self._phase_minutes if patient else None)))
        return until

    def _ask(
        self, seconds: float, stop: Callable[[Collection[int]], bool] = lambda found: False, answers: bool = False
    ) -> dict[int, Position]:
        """As of `Questions.ask`. Errors: TimeoutError where the store does not answer."""
        return self._in_time(lambda: self.questions.ask(seconds, stop, answers=answers), seconds + SILENT)

    def _judged(self, positions: Mapping[int, Position], limit: str = "") -> str:
        """The verdict of all ranks, of which these are where they are: about those that are silent, or else, where a
        limit is given, about those that others wait for. "" for neither. Errors: TimeoutError."""

        def judge() -> str:
            silent = sorted(set(range(self._world)) - set(positions) - self.questions.left())
            called = missing({rank: each.exchanges for rank, each in positions.items()}, tuple(silent))
            more = f"; {called}" if called else ""
            if silent:
                return self.questions.judge(lambda: silence(silent, self.minutes, self.questions.hosts()) + more)
            if limit:
                return self.questions.judge(lambda: standstill(positions, limit, self.questions.hosts()) + more)
            return self.questions.verdict()

        return self._in_time(judge, SILENT)

    def _end(self, line: str) -> None:
        if line and not self._closed.is_set() and self._ending.acquire(blocking=False):
            self._closed.set()
            self._reported = line
            if self._lost is not None:
                self._lost(line)
                return
            # This process, even while its main thread waits. Ranks agree in their store on which of them prints.
            os._exit(report_exit(ExitReport(1, line, "verdict"), together=not self._store_is_silent))

    def _in_time(self, act: Callable[[], Result], seconds: float) -> Result:
        return in_time(act, seconds) if self._remote else act()

    def _silent_store(self) -> str:
        return silence([0], self.minutes, self._first) if self._hosted else store_silence(self.minutes)

    def _standing(self) -> tuple[int, int, int] | None:
        """A value that changes when the main thread moves: where it waits once a step, its frame may be the same."""
        frame = sys._current_frames().get(self._main or 0)
        return None if frame is None else (id(frame), frame.f_lasti, ACTIVITY.moves)


def _limit(minutes: float, phase_minutes: float | None) -> str:
    if phase_minutes is not None:
        return f"{duration(phase_minutes)} (--phase-timeout-minutes)"
    return f"{duration(minutes)} (--timeout-minutes)"


def in_time(act: Callable[[], Result], seconds: float) -> Result:
    """What `act` gives, on a thread of its own: a call to a store that has stopped, or was cut off, never returns.

    Errors: those of `act`; TimeoutError.
    """
    found: queue.Queue[tuple[Result | None, Exception | None]] = queue.Queue()

    def run() -> None:
        try:
            found.put((act(), None))
        except Exception as error:
            found.put((None, error))

    threading.Thread(target=run, name="ask-store", daemon=True).start()
    try:
        result, error = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def launchers_note() -> str:
    """What the launcher of local ranks says of one that was killed; nothing where it says nothing."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[LAUNCHER_FILE] + LOST).read_text()
    return ""
