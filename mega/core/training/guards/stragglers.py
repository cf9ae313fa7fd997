"""Which rank the others wait for, step after step: by the time of its own work, which travels with the requests to stop
(stop.py), so that it costs no exchange.

Own work is what a rank does from the begin of a step until its gradients are computed: on a CPU without the waits for
other ranks, and for a core that other work has; on a GPU as the device measures it, waits of tensor and pipeline ranks
included, so that there all ranks of one replica are named. A rank is compared with those of its pipeline stage, which
have the same work; one that is alone in its stage with its own past.
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
"""Steps that are looked at together."""

MOST = 8
"""Of them, those in which a slow rank is slow."""

IGNORED = 20
"""First steps of a run, in which kernels are chosen and files come from the disk."""

PAST = 100
"""Steps of its own that a rank alone is compared with."""

LEAST_SECONDS = 0.002
"""A smaller difference is noise of the host."""

REPEAT = 200
"""Steps until a rank is named again."""


class StepClock:
    """Own work of this rank's steps."""

    def __init__(self, state: TrainState):
        self._state = state
        self._begun: tuple[Timestamp, float] | None = None
        self._before: tuple[Timestamp, Timestamp] | None = None

    def begin(self) -> None:
        """A step begins."""
        self._begun = Timestamp(self._state.device.torch), ACTIVITY.worked()

    def seconds(self) -> float:
        """Of the step that was begun; on a GPU of the one before, which need not be waited for. 0: not known."""
        probes = self._state.probes
        if probes is None or probes.computed is None or self._begun is None:
            return 0.0
        (begun, worked), (computed, worked_then) = self._begun, probes.computed
        if not self._state.device.is_cuda:
            return max(0.0, worked_then - worked)
        before, self._before = self._before, (begun, computed)
        return 0.0 if before is None else before[0].seconds_to(before[1])


class Stragglers:
    """Looked at on rank 0. threshold: how many times as long as others a slow rank takes [--slow-rank]."""

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
        """A rank, and how many times as long as others it took in the newest steps."""

    def saw(self, step: int, seconds: NDArray[np.float64]) -> Iterator[tuple[int, float, str]]:
        """Own work of each rank in one step; 0 where it is not known. A slow rank, by how much, and that in words."""
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
        often = ((ratios > 1 + (self._threshold - 1) / 2) & (excess > LEAST_SECONDS)).sum(axis=0) >= MOST
        for rank in np.flatnonzero((middle > self._threshold) & often).tolist():
            if step < self._named.get(rank, -REPEAT) + REPEAT:
                continue
            self._named[rank] = step
            took = float(np.median([each[rank] for each in list(self._past)[-WINDOW:]]))
            words = f"{middle[rank]:.2f} times as long as {self._whom(rank)}, {took:.3g} s a step"
            yield rank, float(middle[rank]), f"step {step}: rank {rank} is slow: its own work takes {words}"

    def _usual(self, seconds: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """What each rank is compared with; None: not known yet."""
        usual = np.empty_like(seconds)
        for ranks in self._stages:
            own = seconds[ranks]
            if len(ranks) > 2:
                usual[ranks] = np.median(own)
            elif len(ranks) == 2:
                usual[ranks] = own[::-1]
            elif len(self._past) < 2 * WINDOW:
                return None
            else:
                usual[ranks] = np.median([each[ranks] for each in list(self._past)[:-WINDOW]])
        return usual

    def _whom(self, rank: int) -> str:
        alone = any(len(ranks) == 1 and rank in ranks for ranks in self._stages)
        return "before" if alone else "that of the other ranks of its stage"
