"""Requests to stop early: a signal, a time limit, or a fault that does not affect the state of the run. All ranks
receive a request at the same point of the program, and end with the same exit code.

    flag = stop.poll()     every rank contributes its request; the flags are reduced while the next work runs
    flag.read()            every rank reads whether any rank had a request

This module depends neither on steps nor on validation; `notice.py` prints the messages about requests.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.device import HostArray
from mega.core.parallel.collectives import CollectiveHandle, all_reduce
from mega.core.parallel.mesh import Axis
from mega.core.processes.connect import silent_ranks
from mega.core.processes.signals import RepeatedSignal, handled_signals
from mega.core.processes.world import LAUNCHED
from mega.core.training.notice import Outlook, SignalNotice

_TIME_IS_UP, _SIGNAL, _FAULT = 1, 128, 512
"""Codes of requests; the number of a signal is added to _SIGNAL. The largest code among all ranks takes effect."""


ANSWER_SECONDS = 1.5
"""Seconds within which all ranks must answer; otherwise the message after a signal names the missing ranks."""


class StoppedByFault(OSError):
    """Raised on ranks that stop because of the fault of another rank."""

    elsewhere = True


class StopSignal:
    """The requests that may end this run before its last step.

    on_signal: whether to handle signals from a terminal or a scheduler. minutes: time limit, counted from now or, for a
    run with restarts, from its launch. prints: whether this rank prints a message immediately after a signal.
    """

    def __init__(self, everyone: Axis, device: torch.device, *, on_signal: bool, minutes: int | None, prints: bool):
        self.outlook = Outlook()
        """The content of the message after a signal. The training loop updates this object."""
        self.reason = ""
        self.requested = False
        """Whether the run must stop; identical on all ranks."""
        self.code = 0
        """The exit code of a run that was asked to stop: 128 + the signal; 0 after the time limit."""
        self.fault: Exception | None = None
        self.seconds: NDArray[np.float64] = np.zeros(everyone.size)
        """Working time of each rank, as exchanged with the last flag that was read."""
        self._everyone, self._device = everyone, device
        self._request = 0
        self._signals = RepeatedSignal()
        launched = float(os.environ.get(LAUNCHED, time.monotonic()))
        self._deadline = launched + 60 * minutes if minutes else math.inf
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._notice: SignalNotice | None = None
        if on_signal and threading.current_thread() is threading.main_thread():
            self._notice = SignalNotice(
                handled_signals(), self.outlook, prints=prints, silent=lambda: silent_ranks(ANSWER_SECONDS)
            )
            self._before = {number: signal.signal(number, self._note) for number in handled_signals()}

    def poll(self, seconds: float = 0.0) -> StopFlag:
        """Start to exchange the requests of all ranks. All ranks must call this together. seconds: working time of this
        rank, which is exchanged as well."""
        if not self._request and time.monotonic() > self._deadline:
            self._request = _TIME_IS_UP
        # The flag is filled on the device, because the host would wait for a copy from host memory.
        flag = torch.zeros(1 + self._everyone.size, device=self._device)
        flag[0], flag[1 + self._everyone.index] = float(self._request), seconds
        return StopFlag(self, flag, all_reduce(flag, self._everyone, "max", wait=False))

    def fail(self, fault: Exception) -> None:
        """Make all ranks stop and save, because this rank cannot continue; `raise_fault` raises the fault later."""
        self.fault = self.fault or fault
        self._request = _FAULT

    def raise_fault(self) -> None:
        """Raise the fault of this rank, or StoppedByFault if another rank had a fault."""
        if self.fault is not None:
            raise self.fault
        if self.code == 1:
            raise StoppedByFault("another rank could not continue")

    def receive(self, flag: NDArray[np.float32]) -> None:
        """Record the reduced flags of all ranks."""
        self.seconds = flag[1:].astype(np.float64)
        self.apply(int(flag[0]))

    def apply(self, request: int) -> None:
        """Set the exit code and the reason for a request that is the same on all ranks. request: code of the request; 0
        if no rank has a request."""
        if not request:
            return
        self.requested = True
        self.code, self.reason = 0, "--exit-minutes are over"
        if request == _FAULT:
            self.code, self.reason = 1, str(self.fault or "another rank cannot continue")
        elif request > _SIGNAL:
            self.code, self.reason = request, f"{signal.Signals(request - _SIGNAL).name} was received"

    def settle(self) -> None:
        """Wait, for a few seconds at most, until the messages about this rank's signals are printed, so that they
        precede later messages."""
        if self._notice is not None:
            self._notice.settle()

    def close(self) -> None:
        """Restore the signal handlers. After a stop by a signal, that signal stays ignored, because the launcher's copy
        of the signal may still arrive, and must not kill a rank that has saved."""
        handlers, self._before = self._before, {}
        for number, handler in handlers.items():
            stopped = self._everyone.size > 1 and self.code == _SIGNAL + number
            signal.signal(number, _ignore if stopped else handler)
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    def _note(self, number: int, _: object) -> None:
        if self._signals.repeats(number):
            if self._notice is not None:
                self._notice.report_lost()
            ignore_signals()  # until `close`, because a third signal must not interrupt the exit
            raise KeyboardInterrupt
        self._request = max(self._request, _SIGNAL + number)


def ignore_signals() -> None:
    """Ignore all later signals that ask the run to stop."""
    for number in handled_signals():
        signal.signal(number, _ignore)


def _ignore(number: int, frame: object) -> None:
    """A signal handler that does nothing. With SIG_IGN, Python would print a traceback for a signal that is already
    pending."""


class StopFlag:
    """The requests of all ranks during their reduction."""

    def __init__(self, stop: StopSignal, flag: torch.Tensor, work: CollectiveHandle):
        self._stop, self._flag, self._work = stop, flag, work
        self._reading = self._read() if flag.is_cuda else None  # on a GPU, this makes only the stream wait

    @property
    def cheap(self) -> bool:
        """Whether the flag can be read without making a GPU wait."""
        return not self._flag.is_cuda

    def read(self) -> None:
        """Wait for the reduction; if any rank has a request, `requested` becomes true on all ranks."""
        self._reading = self._reading or self._read()
        self._stop.receive(self._reading.numpy())

    def _read(self) -> HostArray:
        self._work.wait()
        return HostArray(self._flag)
