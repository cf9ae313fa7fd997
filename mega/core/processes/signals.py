"""Signals that request a run to stop: which signals a process handles, and when a repeated signal requests an immediate
end.

This module depends neither on how a run stops (training/stop.py) nor on how ranks are started.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that request a run to stop, from Ctrl-C, a scheduler, SLURM's warning before the time limit
(--signal=USR1@120), and the closing of the terminal."""

SAME_SIGNAL_SECONDS = 2.0
"""Seconds within which a repeated signal counts as the same request, delivered twice."""


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of STOPPING that this process handles; SIGHUP is excluded if it is ignored, as under
    `nohup`."""
    return tuple(each for each in STOPPING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN)


def restore_signals(heeded: Iterable[signal.Signals]) -> None:
    """Handle these signals again in a new rank, because the rank's fork server ignores them."""
    for number in heeded:
        signal.signal(number, _interrupt if number == signal.SIGINT else signal.SIG_DFL)


def _interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt only once, because the terminal sends SIGINT to every process, and the launcher forwards
    SIGINT to ranks that are already ending."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay signals until the end of the `with` block, and then raise the first signal that arrived."""
    pending = list[int]()
    handlers = {number: signal.signal(number, lambda got, _: pending.append(got)) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for first in pending[:1]:
            signal.raise_signal(first)


class RepeatedSignal:
    """Distinguishes a second Ctrl-C from a signal that is delivered twice: once by the terminal or the scheduler, which
    signal every process of a job, and once by the launcher, which forwards the signal.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self.number = 0
        """The newest signal; 0 before the first signal."""

    def repeats(self, number: int) -> bool:
        """Record a signal, and return whether it requests an immediate end instead of an orderly stop."""
        arrival, self.number = time.monotonic(), number
        if self._first is None:
            self._first = arrival
        return number == signal.SIGINT and arrival > self._first + SAME_SIGNAL_SECONDS
