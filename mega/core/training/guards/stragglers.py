"""Find the rank for which the other ranks wait, from the working time of each rank. The working times are reduced
together with the requests to stop (stop.py), so they need no separate exchange.

Working time is the time from the start of a step until the gradients are computed. On a CPU it excludes waits for other
ranks and for a core. On a GPU the device measures working time, including waits between tensor and pipeline ranks, so
all ranks of a slow replica are reported. A rank is compared with the other ranks of its pipeline stage, which have
equal work; a rank that is alone in its stage is compared with its own earlier steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mega.core.activity import ACTIVITY
from mega.core.device import Timestamp
from mega.core.parallel.mesh import Mesh
from mega.core.training.state import TrainState

WINDOW = 10
"""Number of recent steps over which ranks are compared."""

MOST = 8
"""Number of steps, out of WINDOW, in which a rank must be slow to be reported."""

IGNORED = 20
"""Number of steps ignored at the start of a run, while kernels are selected and files are read from disk."""

PAST = 100
"""Number of earlier steps with which a rank that is alone in its stage is compared."""

LEAST_SECONDS = 0.002
"""Differences below this number of seconds are attributed to noise on the host."""

REPEAT = 200
"""Minimum number of steps between two reports of the same rank."""


class StepClock:
    """Measures the working time of this rank's steps."""

    def __init__(self, state: TrainState):
        self._state = state
        self._begun: tuple[Timestamp, float] | None = None
        self._before: tuple[Timestamp, Timestamp] | None = None

    def begin(self) -> None:
        """Record the start of a step."""
        self._begun = Timestamp(self._state.device.torch), ACTIVITY.worked()

    def seconds(self) -> float:
        """Return the working time of the step, or 0 if unknown; on a GPU, return the time of the previous step, which
        can be read without a wait."""
        probes = self._state.probes
        if probes is None or probes.computed is None or self._begun is None:
            return 0.0
        (start, worked), (computed, worked_then) = self._begun, probes.computed
        if not self._state.device.is_cuda:
            return max(0.0, worked_then - worked)
        previous, self._before = self._before, (start, computed)
        return 0.0 if previous is None else previous[0].seconds_to(previous[1])


class Stragglers:
    """Finds slow ranks, on rank 0. threshold: a rank is slow if the ratio of its time to that of the other ranks
    exceeds this value [--slow-rank]."""

    def __init__(self, mesh: Mesh, threshold: float):
        self._threshold = threshold
        stages = [mesh.coordinates(rank)["pp"] for rank in range(mesh.world)]
        self._stages = [np.flatnonzero(np.array(stages) == stage) for stage in range(mesh.pp.size)]
        self._ratios: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        self._excess: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        self._past: deque[NDArray[np.float64]] = deque(maxlen=PAST)
        self._named: dict[int, int] = {}
        self._steps = 0
        self.slowest: tuple[int, float] | None = None
        """The slowest rank, and the ratio of its working time to that of the other ranks in the latest steps."""

    def observe(self, step: int, seconds: NDArray[np.float64]) -> Iterator[tuple[int, float, str]]:
        """Record the working time of each rank in one step (0 if unknown), and yield (rank, ratio, message) for each
        slow rank."""
        self._steps += 1
        if self._steps <= IGNORED or len(seconds) < 2 or not (seconds > 0).all():
            return
        usual = self._usual(seconds)
        self._past.append(seconds)
        if usual is None:
            return
        self._ratios.append(seconds / usual)
        self._excess.append(seconds - usual)
        if len(self._ratios) < WINDOW:
            return
        ratios, excess = np.array(self._ratios), np.array(self._excess)
        middle = np.median(ratios, axis=0)
        self.slowest = int(middle.argmax()), float(middle.max())
        # A few extreme steps could distort the comparison, so a slow rank must also be slow in most steps.
        often = ((ratios > 1 + (self._threshold - 1) / 2) & (excess > LEAST_SECONDS)).sum(axis=0) >= MOST
        for rank in np.flatnonzero((middle > self._threshold) & often).tolist():
            if step < self._named.get(rank, -REPEAT) + REPEAT:
                continue
            self._named[rank] = step
            usual_seconds = float(np.median([each[rank] for each in list(self._past)[-WINDOW:]]))
            words = f"{middle[rank]:.2f} times as long as {self._whom(rank)}, {usual_seconds:.3g} s a step"
            yield rank, float(middle[rank]), f"step {step}: rank {rank} is slow: its own work takes {words}"

    def _usual(self, seconds: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the reference time for each rank's working time; None if too few steps have been measured."""
        usual = np.empty_like(seconds)
        for ranks in self._stages:
            stage_seconds = seconds[ranks]
            if len(ranks) > 2:
                usual[ranks] = np.median(stage_seconds)
            elif len(ranks) == 2:  # two ranks are compared with each other
                usual[ranks] = stage_seconds[::-1]
            elif len(self._past) < 2 * WINDOW:
                return None
            else:
                usual[ranks] = np.median([each[ranks] for each in list(self._past)[:-WINDOW]])
        return usual

    def _whom(self, rank: int) -> str:
        alone = any(len(ranks) == 1 and rank in ranks for ranks in self._stages)
        return "before" if alone else "that of the other ranks of its stage"
