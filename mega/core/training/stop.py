"""Requests to stop early: a signal, or the time is up. One rank's request becomes everyone's at the same moment.

    flag = stop.poll()     every rank contributes whether it was asked; the flags are reduced while the next work runs
    flag.read()            every rank learns, at the same place of its program, whether any was

It knows neither steps nor validation.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from typing import Any

import torch

from mega.core.device import Reading
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.launch import STOPPING, RepeatedSignal
from mega.core.parallel.mesh import Axis


class StopSignal:
    """What may end this run before its last step.

    on_signal: heed what a terminal or a scheduler sends. minutes: how long the run may take, from now.
    """

    def __init__(self, everyone: Axis, device: torch.device, *, on_signal: bool, minutes: int | None):
        self.reason = "another rank was asked to stop"
        self.requested = False
        """All ranks know that the run is to stop."""
        self._everyone, self._device = everyone, device
        self._wanted = False
        self._signals = RepeatedSignal()
        self._deadline = time.monotonic() + 60 * minutes if minutes else math.inf
        self._before: dict[int, Any] = {}
        if on_signal and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}

    def poll(self) -> StopFlag:
        """Ask all ranks whether one of them was asked to stop; every rank does so at the same place."""
        if not self._wanted and time.monotonic() > self._deadline:
            self.reason, self._wanted = "--exit-minutes are over", True
        flag = torch.full((), float(self._wanted), device=self._device)  # filled, not copied: a GPU's host would wait
        return StopFlag(self, flag, all_reduce(flag, self._everyone, "max", wait=False))

    def close(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if self._signals.repeats(number):
            self._before.clear()  # and deaf from now on: a third one would only break the way out
            for other in STOPPING:
                signal.signal(other, signal.SIG_IGN)
            raise KeyboardInterrupt
        self._wanted = True
        self.reason = f"{signal.Signals(number).name} was received"


class StopFlag:
    """The requests of all ranks, while they are reduced."""

    def __init__(self, stop: StopSignal, flag: torch.Tensor, work: Any):
        self._stop, self._flag, self._work = stop, flag, work
        self._reading = self._read() if flag.is_cuda else None  # there it is the stream that waits for the others

    def read(self) -> None:
        """Wait for the others; if any rank was asked to stop, `requested` becomes true on all."""
        reading = self._reading or self._read()
        if any(reading.numbers().values()):
            self._stop.requested = True

    def _read(self) -> Reading:
        self._work.wait()
        return Reading({"flag": self._flag})
