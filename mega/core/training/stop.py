"""Requests to stop early: a signal, the time is up, a fault that does not touch the state of the run. One rank's
request becomes everyone's at the same moment, and every rank then knows with which code to end.

    flag = stop.poll()     every rank contributes whether it was asked; the flags are reduced while the next work runs
    flag.read()            every rank learns, at the same place of its program, whether any was

It knows neither steps nor validation: what the user is told of them at once is in notice.py.
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
from mega.core.processes.signals import RepeatedSignal, heeded_signals
from mega.core.processes.world import LAUNCHED
from mega.core.training.notice import Outlook, SignalNotice

_TIME_IS_UP, _SIGNAL, _FAULT = 1, 128, 512
"""What a rank asks for, as a number; a signal's is added. The largest of all ranks counts."""


ANSWER_SECONDS = 1.5
"""In which all ranks answer before a save is promised without a condition."""


class StoppedByFault(OSError):
    """On the ranks that have no fault of their own."""

    elsewhere = True


class StopSignal:
    """What may end this run before its last step.

    on_signal: heed what a terminal or a scheduler sends. minutes: how long the run may take, from now on, or from the
    launch of ranks that may be started again. speaks: whether this rank tells the user at once that a signal has come.
    """

    def __init__(self, everyone: Axis, device: torch.device, *, on_signal: bool, minutes: int | None, speaks: bool):
        self.outlook = Outlook()
        """What a user would be told now; the loop keeps it true."""
        self.reason = ""
        self.requested = False
        """All ranks know that the run is to stop."""
        self.code = 0
        """The exit code of a run that was asked to stop: 128 + the signal; 0 where the time is up."""
        self.fault: Exception | None = None
        self.seconds: NDArray[np.float64] = np.zeros(everyone.size)
        """Of each rank's own work, as of the newest flag that was read."""
        self._everyone, self._device = everyone, device
        self._wish = 0
        self._signals = RepeatedSignal()
        launched = float(os.environ.get(LAUNCHED, time.monotonic()))
        self._deadline = launched + 60 * minutes if minutes else math.inf
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._notice: SignalNotice | None = None
        if on_signal and threading.current_thread() is threading.main_thread():
            self._notice = SignalNotice(
                heeded_signals(), self.outlook, speaks=speaks, silent=lambda: silent_ranks(ANSWER_SECONDS)
            )
            self._before = {number: signal.signal(number, self._note) for number in heeded_signals()}

    def poll(self, seconds: float = 0.0) -> StopFlag:
        """Ask all ranks whether one of them was asked to stop; every rank does so at the same place. seconds: of this
        rank's own work, which all ranks are told of along with it."""
        if not self._wish and time.monotonic() > self._deadline:
            self._wish = _TIME_IS_UP
        # Filled, not copied: a GPU's host would wait.
        flag = torch.zeros(1 + self._everyone.size, device=self._device)
        flag[0], flag[1 + self._everyone.index] = float(self._wish), seconds
        return StopFlag(self, flag, all_reduce(flag, self._everyone, "max", wait=False))

    def fail(self, fault: Exception) -> None:
        """Have all ranks stop and save, since this one cannot continue; `raise_fault` ends it."""
        self.fault = self.fault or fault
        self._wish = _FAULT

    def raise_fault(self) -> None:
        """Raise what stopped this rank, or that another rank was stopped."""
        if self.fault is not None:
            raise self.fault
        if self.code == 1:
            raise StoppedByFault("another rank could not continue")

    def heard(self, flag: NDArray[np.float32]) -> None:
        """What all ranks said together."""
        self.seconds = flag[1:].astype(np.float64)
        self.heed(int(flag[0]))

    def heed(self, wish: int) -> None:
        """All ranks have learned of a wish; 0 is none."""
        if not wish:
            return
        self.requested = True
        self.code, self.reason = 0, "--exit-minutes are over"
        if wish == _FAULT:
            self.code, self.reason = 1, str(self.fault or "another rank cannot continue")
        elif wish > _SIGNAL:
            self.code, self.reason = wish, f"{signal.Signals(wish - _SIGNAL).name} was received"

    def settle(self) -> None:
        """Wait, for some seconds at most, until the user has read that the signals of this rank have come: what the run
        does and says next comes after that."""
        if self._notice is not None:
            self._notice.settle()

    def close(self) -> None:
        """Signals mean again what they meant before; but after a stop by one, a launcher's copy of it may still come,
        and a rank that has saved must not die of that."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            stopped = self._everyone.size > 1 and self.code == _SIGNAL + number
            signal.signal(number, _deaf if stopped else handler)
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    def _note(self, number: int, _: object) -> None:
        if self._signals.repeats(number):
            if self._notice is not None:
                self._notice.report_lost()
            deafen()  # until `close`: a third one would only break the way out
            raise KeyboardInterrupt
        self._wish = max(self._wish, _SIGNAL + number)


def deafen() -> None:
    """Heed no signal from here on."""
    for number in heeded_signals():
        signal.signal(number, _deaf)


def _deaf(number: int, frame: object) -> None:
    """As SIG_IGN, but for a signal that has come just before: of that one Python would print a traceback."""


class StopFlag:
    """The requests of all ranks, while they are reduced."""

    def __init__(self, stop: StopSignal, flag: torch.Tensor, work: CollectiveHandle):
        self._stop, self._flag, self._work = stop, flag, work
        self._reading = self._read() if flag.is_cuda else None  # there it is the stream that waits for the others

    @property
    def cheap(self) -> bool:
        """Whether reading it keeps no device waiting."""
        return not self._flag.is_cuda

    def read(self) -> None:
        """Wait for the others; if any rank was asked to stop, `requested` becomes true on all."""
        self._reading = self._reading or self._read()
        self._stop.heard(self._reading.numpy())

    def _read(self) -> HostArray:
        self._work.wait()
        return HostArray(self._flag)
