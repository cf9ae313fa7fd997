"""Which rank the others wait for: every rank has a thread that answers a question put into their store.

    1 a rank suspects            its main thread has stood at one place for nearly --timeout-minutes, or an exchange has
                                 run out of time
    2 it asks                    every rank that lives answers with the place at which its main thread stands
    3 a rank that is silent      was stopped, or cannot be reached: who asked ends the run and names it, in time

Where all answer, a step may simply be long; the exchange's own time-out then ends it, and says where each rank stood.
A server waits for requests, not for a step, so where a main thread stands says nothing: its ranks ask again and again
(`keep_asking`), and a rank that has not answered for --timeout-minutes is lost. The store itself may be what is silent,
where the rank or the host that has it was stopped or cut off: no call to it is waited for without end. It knows no
collectives and no training.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import mega
from mega.core.config.world import MEETING_FILE, name_ranks
from mega.core.processes.exit_reports import LIMIT, ExitReport, report_exit
from mega.core.processes.rendezvous import duration

LOOK = 0.5
"""Seconds between two looks of a rank; a large world takes longer, for its store's sake, a short time-out less."""

ANSWER = 20.0
"""Seconds in which a rank that lives answers, on the busiest machine; at most a third of the time-out."""

LOST = ".lost"
"""What the file is called, next to that in which local ranks meet, where their launcher notes that one was killed."""

SILENT = 10.0
"""Seconds beyond which a store that lives has answered, on the busiest machine too."""

INTERVAL = 120.0
"""Seconds between the questions of a rank that keeps asking; at most a quarter of the time-out."""

Result = TypeVar("Result")

_SOURCE = Path(mega.__file__).parent.parent


class RollCall:
    """One rank's part, from `start` to `close`. store: one that no other thread waits in."""

    def __init__(self, store: Any, rank: int, world: int, minutes: float, hosted: bool = True, remote: bool = True):
        """hosted: by rank 0, and not by a launcher's agent. remote: the store may be silent; not so a file."""
        self.minutes, self._hosted, self._remote = minutes, hosted, remote
        self._store, self._rank, self._world = store, rank, world
        self._main = threading.main_thread().ident
        self._answer_seconds = min(ANSWER, 20 * minutes)
        self._look = max(min(LOOK, minutes), world / 500)
        self._answered = 0
        self._failed_at: str | None = None
        self._interval: float | None = None
        self._lost: Callable[[str], None] = _exit
        self._heeds_launcher = False
        self._reported = ""
        self._closed = threading.Event()

    def start(self) -> RollCall:
        threading.Thread(target=self._watch, name="roll-call", daemon=True).start()
        return self

    def close(self) -> None:
        self._closed.set()

    def keep_asking(self, lost: Callable[[str], None] | None = None) -> None:
        """From now on ask all ranks regularly, wherever this one's main thread stands. lost: called once, on the thread
        that asks, with the line about ranks that have not answered, or of which their launcher says that they were
        killed; None: prints it and ends the process."""
        self._heeds_launcher, self._lost = lost is not None, lost or _exit
        self._interval = min(INTERVAL, 15 * self.minutes)

    def explain(self, error: BaseException) -> str:
        """Why an exchange has run out of time; where this rank stood is in its error."""
        if self._reported:
            if self._lost is _exit:
                time.sleep(LIMIT)  # the other thread is about to end this process, with the same report
            return self._reported
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self._failed_at = next(filter(None, map(_own_place, reversed(frames))), None)
        try:
            positions = self._asked(self._answer_seconds)
        except TimeoutError:
            return self._silent_store()
        silent = sorted(set(range(self._world)) - set(positions))
        return silence(silent, self.minutes) if silent else standstill(positions, self.minutes)

    def _silent_store(self) -> str:
        return silence([0], self.minutes) if self._hosted else store_silence(self.minutes)

    def _asked(self, seconds: float, answer: Callable[[], None] = lambda: None) -> dict[int, str]:
        """As of `_ask`. Errors: TimeoutError where the store does not answer."""
        return self._in_time(lambda: self._ask(seconds, answer), seconds + SILENT)

    def _in_time(self, act: Callable[[], Result], seconds: float) -> Result:
        return in_time(act, seconds) if self._remote else act()

    def _ask(self, seconds: float, answer: Callable[[], None]) -> dict[int, str]:
        """Rank -> where its main thread stands, of those that answer in time. answer: called again and again, so that
        ranks that ask each other hear each other."""
        number = self._store.add("asked", 1)
        self._store.set(f"question/{number}", "")
        deadline, found = time.monotonic() + seconds, {self._rank: self._place()}
        while len(found) < self._world and time.monotonic() < deadline and not self._closed.is_set():
            answer()
            for rank in set(range(self._world)) - set(found):
                key = f"answer/{number}/{rank}"
                if self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
            time.sleep(0.1)
        answer()
        return found

    def _watch(self) -> None:
        """Answer; suspect."""
        patience = 60 * self.minutes - 1.5 * self._answer_seconds
        stood, since = None, time.monotonic()
        while not self._closed.wait(self._look):
            try:
                self._in_time(self._answer, 60 * self.minutes + SILENT)
                now = self._standing()
                if self._heeds_launcher:
                    self._end(launchers_note())
                if self._interval is not None:
                    if time.monotonic() > since + self._interval:
                        self._suspect(60 * self.minutes - self._interval)
                        since = time.monotonic()
                elif now != stood:
                    stood, since = now, time.monotonic()
                elif time.monotonic() > since + patience:
                    since = time.monotonic()
                    self._suspect(self._answer_seconds)
            except TimeoutError:
                self._end(self._silent_store())
            except Exception:
                return  # the store has gone; its host's end ends the others too

    def _answer(self) -> None:
        while self._store.check([f"question/{self._answered + 1}"]):
            self._answered += 1
            self._store.set(f"answer/{self._answered}/{self._rank}", self._place())

    def _suspect(self, seconds: float) -> None:
        try:
            silent = sorted(set(range(self._world)) - set(self._asked(seconds, self._answer)))
        except TimeoutError:
            self._end(self._silent_store())
        else:
            self._end(silence(silent, self.minutes) if silent else "")

    def _end(self, line: str) -> None:
        if line and not self._closed.is_set():
            self._reported = line
            self._closed.set()
            self._lost(line)

    def _standing(self) -> tuple[int, int] | None:
        """A value that changes when the main thread moves."""
        frame = sys._current_frames().get(self._main or 0)
        return None if frame is None else (id(frame), frame.f_lasti)

    def _place(self) -> str:
        """The innermost place of ours at which the main thread stands, or stood when its exchange failed."""
        frame = sys._current_frames().get(self._main or 0)
        while self._failed_at is None and frame is not None:
            if (place := _own_place(frame)) is not None:
                return place
            frame = frame.f_back
        return self._failed_at or "elsewhere"


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


def _exit(line: str) -> None:
    """End this process, even while its main thread waits."""
    os._exit(report_exit(ExitReport(1, line)))


def launchers_note() -> str:
    """What the launcher of local ranks says of one that was killed; nothing where it says nothing."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[MEETING_FILE] + LOST).read_text()
    return ""


def _own_place(frame: FrameType) -> str | None:
    """Such as `mega/core/data/batches.py:80 (take)`; None outside of our source."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(_SOURCE / "mega"):
        return None
    return f"{path.relative_to(_SOURCE)}:{frame.f_lineno} ({frame.f_code.co_name})"


def silence(silent: list[int], minutes: float) -> str:
    """The line about ranks that do not answer.

    >>> silence([1], 10)
    'rank 1 has not answered for 10 minutes (--timeout-minutes): it is stopped, or its host cannot be reached'
    """
    have, why = "have", "they are stopped, or their hosts cannot be reached"
    if len(silent) == 1:
        have, why = "has", "it is stopped, or its host cannot be reached"
    return f"{name_ranks(silent)} {have} not answered for {duration(minutes)} (--timeout-minutes): {why}"


def store_silence(minutes: float) -> str:
    """The line about a store that does not answer, of a launcher's agent."""
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return (
        f"the launcher's store at {place} has not answered for {duration(minutes)} (--timeout-minutes): its host is "
        "stopped, or cannot be reached"
    )


def standstill(positions: Mapping[int, str], minutes: float) -> str:
    """The line about an exchange that has run out of time while every rank answers.

    >>> standstill({0: "a.py:1 (f)", 1: "b.py:2 (g)"}, 1)
    'an exchange of ranks has not ended within 1 minute (--timeout-minutes): rank 0 at a.py:1 (f), rank 1 at b.py:2 (g)'
    """
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(positions.items()):
        ranks.setdefault(place, []).append(rank)
    where = ", ".join(f"{name_ranks(who)} at {place}" for place, who in ranks.items())
    return f"an exchange of ranks has not ended within {duration(minutes)} (--timeout-minutes): {where}"
