"""What one who asks a run to stop is told, within a moment of the signal.

A thread reads the numbers of signals as they come, so it speaks while the main thread is in a kernel or waits for other
ranks: the handler itself runs only when Python does. It knows neither steps nor checkpoints; `Outlook` has the words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mega.core.processes.exit_reports import write_error
from mega.core.processes.roll_call import launchers_note
from mega.core.processes.signals import RepeatedSignal
from mega.core.words import name_ranks

LEAVES_WITHIN = 1.0
"""Seconds that the main thread has, after a second Ctrl-C, to end by itself."""

NOTICE_WITHIN = 5.0
"""Seconds that a run waits for its notice of a signal to be written."""

_MARK = 0
"""In the pipe after signals that have come: the number of none."""


@dataclass
class Outlook:
    """What the run is doing, and what it has kept, as the loop comes along.

    doing: with what it will be done before it stops. place: --save. step: the newest that was taken. kept: the newest
    from which it could resume. ending: nothing is left but to end.
    """

    doing: str = "starting"
    place: str | None = None
    step: int = 0
    kept: int = 0
    ending: bool = False

    def first(self, number: int, silent: Sequence[int] = ()) -> str:
        """silent: ranks that may be lost, without which nothing is saved.

        >>> Outlook("finishing step 24", "runs/first").first(signal.SIGINT)
        'SIGINT received: finishing step 24, then saving to runs/first; Ctrl-C again leaves at once'
        >>> Outlook("finishing step 24", "runs/first").first(signal.SIGTERM, [3])
        'SIGTERM received: finishing step 24, then saving to runs/first, if rank 3 answers again'
        """
        condition = f", if {name_ranks(list(silent))} answer{'s' * (len(silent) == 1)} again" if silent else ""
        then = f"saving to {self.place}{condition}" if self.place else "ending; without --save no weights are kept"
        more = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
        then = "ending" if self.ending else then
        return f"{signal.Signals(number).name} received: {self.doing}, then {then}{more}"

    def lost(self) -> str:
        """
        >>> Outlook(step=24, kept=20, place="runs/first").lost()
        'leaving at once: lost is what was trained after step 20, the newest in runs/first; step 24 was the last'
        >>> Outlook(step=24).lost()
        'leaving at once: all 24 steps are lost, since none was saved'
        """
        if self.step == self.kept:
            return "leaving at once: nothing is lost" if self.kept else "leaving at once: no step had been taken"
        if not self.kept:
            return f"leaving at once: all {self.step} steps are lost, since none was saved"
        where = f"the newest in {self.place}" if self.place else "where this run began"
        return (
            f"leaving at once: lost is what was trained after step {self.kept}, {where}; step {self.step} was the last"
        )


class SignalNotice:
    """Speaks for a run until `close`. heeded: signals that stop it. speaks: false on all ranks but one, which only
    leave at a second Ctrl-C. silent: gives the ranks that do not answer. To be made on the main thread."""

    def __init__(
        self,
        heeded: Collection[int],
        outlook: Outlook,
        *,
        speaks: bool,
        silent: Callable[[], Sequence[int]] = lambda: (),
    ):
        self._silent = silent
        self._heeded, self._outlook, self._speaks = frozenset(heeded), outlook, speaks
        self._signals = RepeatedSignal()
        self._said = threading.Lock()
        """Taken by the one who says what is lost."""
        self._settled = threading.Event()
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._reporting: threading.Thread | None = None
        threading.Thread(target=self._listen, args=(reading,), name="signal-notice", daemon=True).start()

    def report_lost(self) -> None:
        """Once, by the first process to notice the second Ctrl-C."""
        if self._speaks and self._said.acquire(blocking=False):
            write_error(f"mega: {self._outlook.lost()}\n")

    def settle(self) -> None:
        """Return when the notice of every signal that has come is written, after NOTICE_WITHIN seconds at the latest: a
        busy machine may give the thread that writes it a core only when the run has ended."""
        if not self._speaks:
            return
        self._settled.clear()
        with contextlib.suppress(BlockingIOError):  # so many signals lie in the pipe
            os.write(self._writing, bytes([_MARK]))
            self._settled.wait(NOTICE_WITHIN)
        if self._reporting is not None:
            self._reporting.join(NOTICE_WITHIN)

    def close(self) -> None:
        """Signals reach only their handlers again."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writing)

    def _listen(self, reading: int) -> None:
        reported = False
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if number == _MARK:
                        self._settled.set()
                    if number not in self._heeded:
                        continue
                    if self._signals.repeats(number):
                        self.report_lost()
                        threading.Timer(LEAVES_WITHIN, os._exit, [128 + number]).start()
                    elif self._speaks and not reported:
                        reported = True
                        if not launchers_note():  # else the launcher has said why this rank ends
                            self._reporting = threading.Thread(target=self._report_first, args=(number,), daemon=True)
                            self._reporting.start()  # asking ranks takes a while, in which a second Ctrl-C counts

    def _report_first(self, number: int) -> None:
        write_error(f"mega: {self._outlook.first(number, self._silent())}\n")
