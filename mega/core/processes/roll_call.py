"""A watchdog that finds the rank for which other ranks wait. A thread of every rank answers questions in a shared
store.

    1 a rank suspects            its main thread has not moved for a quarter of --timeout-minutes, or an exchange has
                                 timed out
    2 it asks                    every running rank answers with the position of its main thread (position.py)
    3 a rank is silent           for the rest of the timeout, so it was stopped or cannot be reached; or it has reported
                                 its own error and ended, which ends the others immediately
    4 all ranks answer           the waiting rank asks again until --timeout-minutes are over, or
                                 --phase-timeout-minutes if any rank is in a phase that may take long (activity.py)
    5 a rank has failed          and has reported its own error: a rank that waits and has not moved for FAILED seconds
                                 ends without asking
    6 the verdict                the first rank to decide writes to the store which rank is at fault; all ranks end with
                                 that message

The timeouts of exchanges therefore matter only if this thread or the store has failed. The main thread of a server may
not move for a long time while it waits for requests. The ranks of a server therefore ask regularly (`keep_asking`), and
a rank that has not answered for --timeout-minutes is lost. Every call to the store has a time limit, because the store
does not answer if its rank or host was stopped or disconnected. This module depends neither on collectives nor on
training.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mega.core.activity import ACTIVITY
from mega.core.processes.exit_reports import GRACE, LIMIT, ExitReport, report_exit
from mega.core.processes.flight import missing
from mega.core.processes.position import Position, own_place, own_position, silence, standstill, store_silence
from mega.core.processes.questions import Questions
from mega.core.processes.rendezvous import duration
from mega.core.processes.world import LAUNCHER_FILE
from mega.core.words import name_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK = 0.5
"""Seconds between two polls of the store by a rank. The interval is longer in a large world, to limit the load of the
store, and shorter for a short timeout."""

ANSWER = 20.0
"""Seconds within which a running rank answers, even on a very busy machine; at most a third of the timeout."""

LOST = ".lost"
"""Suffix of the file in which the launcher of local ranks reports a rank that was killed."""

SOON = 0.02
"""Seconds between two looks for the name of rank 0's host."""

SILENT = 10.0
"""Seconds within which a running store answers, even on a very busy machine."""

INTERVAL = 120.0
"""Seconds between two questions of a rank that asks regularly; at most a quarter of the timeout."""

LEAVING = 2.0
"""Time limit, in seconds, for recording in the store that a rank has left."""

FAILED = 3 * GRACE
"""Seconds after which a waiting rank ends if another rank has failed; at most a quarter of the timeout. This is longer
than GRACE, within which ranks report their own errors, and longer than the launcher of local ranks needs to end
them."""

PEERS = 4.0
"""Seconds within which ranks answer after a connection has broken."""

Result = TypeVar("Result")


class RollCall:
    """The watchdog of one rank, from `start` to `close`. store: a store client that no other thread uses."""

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
        """
        hosted: whether rank 0 hosts the store, rather than a launcher's agent.
        remote: whether the store is on a network and may stop answering; False for a file.
        phase_minutes: time limit of phases that may take long; None for no limit on ranks that answer.
        host: name and addresses of this host, if there are several hosts.
        """
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
        """Rank 0 -> the name of its host. The name is cached, because the store cannot be read after that host has
        stopped."""
        self._interval: float | None = None
        self._lost: Callable[[str], None] | None = None
        """Function that is called with the message about lost ranks, instead of ending this process."""
        self._store_is_silent = False
        self._reported = ""
        self._ending = threading.Lock()
        """A lock that is acquired, and never released, by the first thread that reports."""
        self._closed = threading.Event()

    def start(self) -> RollCall:
        threading.Thread(target=self._watch, name="roll-call", daemon=True).start()
        return self

    def close(self, report: str = "") -> None:
        """Stop answering, and record in the store that this rank has left. report: the report of a rank that ends
        because of its own error. This report shows waiting ranks that this rank was not stopped."""
        self._closed.set()
        with contextlib.suppress(Exception):  # the store is lost, or does not answer
            in_time(lambda: self.questions.end(report) if report else self.questions.leave(), LEAVING)

    def keep_asking(self, lost: Callable[[str], None] | None = None) -> None:
        """Start to ask all ranks regularly, even while this rank's main thread moves.

        lost: called once, on the watchdog thread, with the message about ranks that have not answered or were killed;
        if None, print the message and end the process.
        """
        self._lost = lost
        self._interval = min(INTERVAL, 15 * self.minutes)

    # -- called by the main thread

    def explain(self, error: BaseException) -> str:
        """Explain why an exchange has timed out. The position of this rank is in the traceback of `error`."""
        if self._reported:
            if self._closed.is_set() and self._lost is None:
                time.sleep(LIMIT)  # the watchdog thread is about to end this process with the same report
            return self._reported
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self._failed_at = next(filter(None, map(own_place, reversed(frames))), None)
        try:
            line = self._judged(self._ask(self._answer_seconds), _limit(self.minutes, self._phase_minutes))
        except TimeoutError:
            line = self._silent_store()
        if not self._ending.acquire(blocking=False):
            return self.explain(error)  # the watchdog thread reported first
        self._reported = line
        return line

    def explain_loss(self, error: BaseException) -> str | None:
        """Return a message that names the rank whose connection broke, or None if the store does not answer.

        If the connection to the store breaks as well, rank 0 is lost, unless the store belongs to a launcher.
        """
        questions = self.questions

        def ask() -> str | None:
            ranks = questions.lost(str(error), PEERS)
            end = f"which {'has' if len(ranks) == 1 else 'have'} ended or cannot be reached"
            return f"lost {name_ranks(ranks, questions.hosts())}, {end}" if ranks else None

        try:
            return self._in_time(ask, 2 * PEERS + SILENT)
        except TimeoutError:
            return None
        except RuntimeError:
            if self._hosted and self._rank:
                return f"lost {name_ranks([0], self._first)}, which has ended or cannot be reached"
            raise

    # -- the watchdog thread

    def _watch(self) -> None:
        """Run the thread's main loop: answer other ranks' questions, and whenever this rank's main thread has not moved
        for too long, ask all ranks for their positions."""
        try:
            if self._host is not None:
                name, addresses = self._host
                self._in_time(lambda: self.questions.introduce(name, addresses), self._silence)
            stood, since, ask = None, time.monotonic(), math.inf  # position, when it was reached, when to ask next
            still = self._standing(), time.monotonic()
            # The name of rank 0's host cannot be read after that host has stopped, so it is looked for more often.
            while not self._closed.wait(self._look if self._host is None or self._first else min(self._look, SOON)):
                standing, moment = self._standing(), time.monotonic()
                still = still if standing == still[0] else (standing, moment)
                waited = moment > still[1] + min(FAILED, 15 * self.minutes)
                self._end(self._in_time(partial(self._answer, waited), self._silence))
                if self._lost is not None:
                    self._end(launchers_note())
                if self._interval is not None:
                    if moment > since + self._interval:
                        self._suspect(60 * self.minutes - self._interval)
                        since = time.monotonic()
                elif standing != stood:
                    stood, since, ask = standing, moment, moment + 15 * self.minutes
                elif moment > ask:
                    limit = self._suspect(45 * self.minutes, since)
                    ask = min(time.monotonic() + 15 * self.minutes, max(limit, time.monotonic()))
        except TimeoutError:
            self._store_is_silent = True
            self._end(self._silent_store())
        except Exception:
            # The store is lost. Usually all exchanges fail as well, but a device may wait in an exchange forever.
            if not self._closed.wait(60 * self.minutes):
                reason = f"{name_ranks([0], self._first)}, or its host, has ended"
                self._end(reason if self._hosted else "the launcher's store has gone")

    def _answer(self, waited: bool = False) -> str:
        """Answer new questions. Return the verdict, or "" if no verdict has been written yet. waited: whether this
        rank's main thread has not moved for FAILED seconds, so that the failure of another rank becomes the verdict."""
        if self._host is not None and not self._first and (name := self.questions.host(0)) is not None:
            self._first = {0: name}
        self.questions.answer()
        failure = self.questions.failure() if waited and own_position().waits else ""
        return self.questions.judge(lambda: failure) if failure else self.questions.verdict()

    def _suspect(self, seconds: float, since: float = math.inf) -> float:
        """Ask all ranks for their positions, and end the run if some ranks do not answer for `seconds`, or if the main
        thread waits for too long.

        since: the time at which this rank's main thread reached its position, or math.inf to ignore the position.
        Returns the time until which the main thread may stay at that position.
        """
        stood, standing, moves = self._standing(), since < math.inf, list[bool]()

        def stop(answered: Collection[int]) -> bool:
            moves.extend([True] if self._closed.is_set() or (standing and self._standing() != stood) else [])
            silent, ended = self.questions.absent(answered)
            return bool(moves or (ended and not silent))

        positions = self._ask(seconds, stop, answers=True)
        if moves:
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
        self, seconds: float, stop: Callable[[Collection[int]], bool] = lambda answered: False, answers: bool = False
    ) -> dict[int, Position]:
        """Call `Questions.ask` with a time limit. Errors: TimeoutError if the store does not answer."""
        return self._in_time(lambda: self.questions.ask(seconds, stop, answers=answers), seconds + SILENT)

    def _judged(self, positions: Mapping[int, Position], limit: str = "") -> str:
        """Write the verdict, or return the verdict of another rank. positions: rank -> position, for the ranks that
        answered. The verdict names the ranks that do not answer. If all of these ranks have ended because of their own
        errors, the verdict contains the report of one of them instead. If all ranks answer and `limit` is given, the
        verdict names the ranks for which others wait. Without `limit`, the result is another rank's verdict, or "".
        Errors: TimeoutError if the store does not answer.
        """

        def judge() -> str:
            silent, ended = self.questions.absent(positions)
            if ended and not silent:
                return self.questions.judge(lambda: ended)
            exchange = missing({rank: each.exchanges for rank, each in positions.items()}, tuple(silent))
            suffix = f"; {exchange}" if exchange else ""
            if silent:
                return self.questions.judge(lambda: silence(silent, self.minutes, self.questions.hosts()) + suffix)
            if limit:
                return self.questions.judge(lambda: standstill(positions, limit, self.questions.hosts()) + suffix)
            return self.questions.verdict()

        return self._in_time(judge, SILENT)

    def _end(self, line: str) -> None:
        if line and not self._closed.is_set() and self._ending.acquire(blocking=False):
            self._closed.set()
            self._reported = line
            if self._lost is not None:
                self._lost(line)
                return
            # Use os._exit, because the main thread may wait forever. Ranks agree through their store which of them
            # prints.
            os._exit(report_exit(ExitReport(1, line, "verdict"), together=not self._store_is_silent))

    def _in_time(self, act: Callable[[], Result], seconds: float) -> Result:
        return in_time(act, seconds) if self._remote else act()

    def _silent_store(self) -> str:
        return silence([0], self.minutes, self._first) if self._hosted else store_silence(self.minutes)

    def _standing(self) -> tuple[int, int, int] | None:
        """Return a value that changes when the main thread moves. The value includes ACTIVITY.moves, because the frame
        of a wait may be the same in every step."""
        frame = sys._current_frames().get(self._main or 0)
        return None if frame is None else (id(frame), frame.f_lasti, ACTIVITY.moves)


def _limit(minutes: float, phase_minutes: float | None) -> str:
    if phase_minutes is not None:
        return f"{duration(phase_minutes)} (--phase-timeout-minutes)"
    return f"{duration(minutes)} (--timeout-minutes)"


def in_time(act: Callable[[], Result], seconds: float) -> Result:
    """Call `act` on another thread with a time limit, because a call to a stopped or disconnected store never returns.

    Errors: those of `act`; TimeoutError if the time limit passes.
    """
    results: queue.Queue[tuple[Result | None, Exception | None]] = queue.Queue()

    def run() -> None:
        try:
            results.put((act(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, name="ask-store", daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def launchers_note() -> str:
    """Return the launcher's report of a local rank that was killed, or "" if the launcher has not written one."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[LAUNCHER_FILE] + LOST).read_text()
    return ""
