"""Print messages immediately after a signal with which a user interrupts a run.

A thread reads signal numbers from a pipe, so it can print while the main thread runs a kernel or waits for other ranks.
A signal handler would run only when the main thread executes Python code. This module depends neither on steps nor on
checkpoints; `Outlook` contains the texts.
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
"""Seconds that the main thread has to exit after a second Ctrl-C, before another thread ends the process."""

NOTICE_WITHIN = 5.0
"""Maximum number of seconds for which a run waits for the message about a signal to be printed."""

_MARK = 0
"""A byte that marks the end of the signals received so far. No signal has the number 0."""


@dataclass
class Outlook:
    """The current work and the newest save of the run. The training loop updates this object."""

    doing: str = "starting"
    """The work that the run completes before it stops."""
    place: str | None = None
    """The value of --save."""
    step: int = 0
    """The latest step."""
    saved_step: int = 0
    """The newest step from which the run could resume, or 0."""
    ending: bool = False
    """Whether the run ends after `doing`, without another save."""

    def first(self, number: int, silent: Sequence[int] = ()) -> str:
        """Return the message after the first signal. silent: ranks that do not answer; if they are lost, the run cannot
        be saved.

        >>> Outlook("finishing step 24", "runs/first").first(signal.SIGINT)
        'SIGINT received: finishing step 24, then saving to runs/first; Ctrl-C again leaves at once'
        >>> Outlook("finishing step 24", "runs/first").first(signal.SIGTERM, [3])
        'SIGTERM received: finishing step 24, then saving to runs/first, if rank 3 answers again'
        """
        condition = f", if {name_ranks(list(silent))} answer{'s' * (len(silent) == 1)} again" if silent else ""
        then = f"saving to {self.place}{condition}" if self.place else "ending; without --save no weights are kept"
        advice = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
        then = "ending" if self.ending else then
        return f"{signal.Signals(number).name} received: {self.doing}, then {then}{advice}"

    def lost(self) -> str:
        """Return the message after a second Ctrl-C.

        >>> Outlook(step=24, saved_step=20, place="runs/first").lost()
        'leaving at once: lost is what was trained after step 20, the newest in runs/first; step 24 was the last'
        >>> Outlook(step=24).lost()
        'leaving at once: all 24 steps are lost, since none was saved'
        """
        if self.step == self.saved_step:
            return "leaving at once: nothing is lost" if self.saved_step else "leaving at once: no step had been taken"
        if not self.saved_step:
            return f"leaving at once: all {self.step} steps are lost, since none was saved"
        origin = f"the newest in {self.place}" if self.place else "where this run began"
        text = f"leaving at once: lost is what was trained after step {self.saved_step}, {origin}"
        return f"{text}; step {self.step} was the last"


class SignalNotice:
    """Prints messages about signals until `close`.

    heeded: signals that stop the run. prints: whether this rank prints; other ranks only exit at a second Ctrl-C.
    silent: a function that returns the ranks that do not answer. The object must be constructed on the main thread.
    """

    def __init__(
        self,
        heeded: Collection[int],
        outlook: Outlook,
        *,
        prints: bool,
        silent: Callable[[], Sequence[int]] = lambda: (),
    ):
        self._silent = silent
        self._heeded, self._outlook, self._prints = frozenset(heeded), outlook, prints
        self._signals = RepeatedSignal()
        self._said = threading.Lock()
        """A lock acquired, and never released, by the thread that prints the message about lost steps."""
        self._settled = threading.Event()
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._reporting: threading.Thread | None = None
        threading.Thread(target=self._listen, args=(reading,), name="signal-notice", daemon=True).start()

    def report_lost(self) -> None:
        """Print the message about lost steps, only once, after a second Ctrl-C."""
        if self._prints and self._said.acquire(blocking=False):
            write_error(f"mega: {self._outlook.lost()}\n")

    def settle(self) -> None:
        """Wait, at most NOTICE_WITHIN seconds, until the messages about all signals so far are printed. On a busy
        machine the printing thread might otherwise not run before the run ends."""
        if not self._prints:
            return
        self._settled.clear()
        with contextlib.suppress(BlockingIOError):  # the pipe is full of signals
            os.write(self._writing, bytes([_MARK]))
            self._settled.wait(NOTICE_WITHIN)
        if self._reporting is not None:
            self._reporting.join(NOTICE_WITHIN)

    def close(self) -> None:
        """Stop reading signals from the pipe. Signal handlers are still called."""
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
                    elif self._prints and not reported:
                        reported = True
                        if not launchers_note():  # otherwise the launcher has reported why this rank ends
                            # Querying the ranks takes time, so another thread does it while this thread reads signals.
                            self._reporting = threading.Thread(target=self._report_first, args=(number,), daemon=True)
                            self._reporting.start()

    def _report_first(self, number: int) -> None:
        write_error(f"mega: {self._outlook.first(number, self._silent())}\n")
