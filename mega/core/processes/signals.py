"""Signals that ask a run to stop: which ones a process heeds, and when one that comes again means more.

What a run does when it is asked is not known here (training/stop.py), nor how ranks are started.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to stop: Ctrl-C, a scheduler, SLURM's warning ahead of the end (--signal=USR1@120), and a terminal
that was closed."""

SAME_SIGNAL_SECONDS = 2.0
"""A signal that comes again within this time is the same wish, by another way."""


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Those of STOPPING that this process heeds: not SIGHUP where that is ignored, as `nohup` has it."""
    return tuple(each for each in STOPPING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN)


def hear_signals(heeded: Iterable[signal.Signals]) -> None:
    """In a new rank: of what its server ignores, these count again."""
    for number in heeded:
        signal.signal(number, _interrupt if number == signal.SIGINT else signal.SIG_DFL)


def _interrupt(number: int, _: object) -> None:
    """Ctrl-C, once: a terminal sends it to every process, and the launcher passes it on to ranks that are ending."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """A signal that comes in this block acts when the block has ended; of several, the first."""
    came = list[int]()
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


class RepeatedSignal:
    """Distinguishes a second Ctrl-C from one signal that came twice: from the terminal or the scheduler, which reach
    every process of a job, and from the launcher.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self.number = 0
        """The newest one that came; 0 is none."""

    def repeats(self, number: int) -> bool:
        """Note a signal; whether it means that the user will not wait for what the first one began."""
        now, self.number = time.monotonic(), number
        if self._first is None:
            self._first = now
        return number == signal.SIGINT and now > self._first + SAME_SIGNAL_SECONDS
