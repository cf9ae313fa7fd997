"""What a run does about a step that is not sound: numbers that are not finite, or a spike of the loss or the gradient
norm.

    limits before a step      from median and spread of the steps before; the device compares, so that a step beyond
                              them is not applied [--on-spike skip, rollback]
    after it                  every rank reads the same reduced numbers, so that all decide alike without an exchange
    a skipped step            weights, moments, loss scale, schedule and limits are as if its batch had not been drawn;
                              the step's number and the data position go on
    many spikes in a row      are no spikes: what is usual has changed, and is learned again
    a rollback                a skip of all steps since the newest checkpoint, whose state comes back

What was left out is kept in checkpoints, so that a resumed run is the same. It knows no ranks and no tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import cast

from mega.core.config.sections import GuardConfig
from mega.core.untrusted import Json, below

WARM_UP = 32
"""Steps before anything is a spike."""

LASTING = 20
"""Spikes without an applied step between them after which the limits begin anew: the weights were the same all along,
so it is the batches that have changed, and no later one would be applied either."""

LEAST_SPREAD = 0.005, 0.05
"""Of the loss, as a share of it, and of the norm's logarithm: what a very quiet run is taken to vary by."""

MOST_LEFT_OUT = 200
"""Of what was left out, the newest that a checkpoint keeps; the file of events has all."""

MAD = 1.4826
"""Times the median absolute deviation is a normal distribution's standard deviation."""


@dataclass(frozen=True)
class SpikeLimits:
    """A step whose loss or gradient norm is greater is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


NO_LIMITS = SpikeLimits()


def limits(losses: Iterable[float], norms: Iterable[float], threshold: float) -> SpikeLimits:
    """Median + threshold x spread of the loss, and of the logarithm of the norm, whose noise is a factor.

    >>> quiet = limits([2.0, 2.1] * 20, [0.5, 1.0] * 20, 10)
    >>> round(quiet.loss, 2), quiet.exceeded(2.5, 0.7), quiet.exceeded(4.6, 0.7), quiet.exceeded(2.0, 2000.0)
    (2.79, False, True, True)
    >>> limits([2.0] * 9, [1.0] * 9, 10)
    SpikeLimits(loss=inf, grad_norm=inf)
    """
    losses, logs = list(losses), [math.log(norm) for norm in norms if norm > 0]
    if len(losses) < WARM_UP or len(logs) < WARM_UP:
        return NO_LIMITS
    middle, log = median(losses), median(logs)
    spread = max(MAD * median(abs(loss - middle) for loss in losses), LEAST_SPREAD[0] * abs(middle))
    log_spread = max(MAD * median(abs(each - log) for each in logs), LEAST_SPREAD[1])
    highest = log + threshold * log_spread
    return SpikeLimits(middle + threshold * spread, math.exp(highest) if highest < 700 else math.inf)


@dataclass(frozen=True)
class LeftOut:
    """Samples [first, end) that changed nothing. step: at which it was found. reason: "nan" or "spike". to: the step
    whose state came back, of a rollback."""

    step: int
    reason: str
    first: int
    end: int
    to: int | None = None

    def as_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {"step": self.step, "reason": self.reason, "samples": [self.first, self.end]}
        return found if self.to is None else {**found, "to": self.to}

    @classmethod
    def from_json(cls, stored: object) -> LeftOut:
        values = below(stored)
        first, end = cast(Sequence[int], values["samples"])
        to = values.get("to")
        return cls(int(cast(int, values["step"])), str(values["reason"]), first, end, cast("int | None", to))


@dataclass
class GuardMemory:
    """What is kept in checkpoints. losses, norms: of the newest steps that were applied. level: what these depend on
    but for the weights; numbers of another one are not restored. spikes: steps that were skipped as such since the
    newest that was applied."""

    window: int = 128
    level: str = ""
    losses: deque[float] = field(init=False)
    norms: deque[float] = field(init=False)
    left_out: list[LeftOut] = field(default_factory=list)
    rollbacks: int = 0
    spikes: int = 0

    def __post_init__(self) -> None:
        self.losses, self.norms = deque(maxlen=self.window), deque(maxlen=self.window)

    def add(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            self.losses.append(loss)
            self.norms.append(norm)
            self.spikes = 0

    def skip_spike(self) -> bool:
        """Count a spike that was not applied; whether there have been so many that the limits begin anew."""
        self.spikes += 1
        if self.spikes < LASTING:
            return False
        self.losses.clear()
        self.norms.clear()
        self.spikes = 0
        return True

    def as_json(self) -> dict[str, Json]:
        left_out = [each.as_json() for each in self.left_out[-MOST_LEFT_OUT:]]
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "left_out": left_out,
            "rollbacks": self.rollbacks,
            "level": self.level,
            "spikes": self.spikes,
        }

    def restore(self, stored: object) -> None:
        """Of a checkpoint; None, or {}, of one from before."""
        values = below(stored)
        same = values.get("level", self.level) == self.level
        self.losses = deque(cast(Sequence[float], values.get("losses", ()) if same else ()), maxlen=self.window)
        self.norms = deque(cast(Sequence[float], values.get("norms", ()) if same else ()), maxlen=self.window)
        self.spikes = int(cast(int, values.get("spikes", 0))) if same else 0
        self.rollbacks = int(cast(int, values.get("rollbacks", 0)))
        self.left_out = [LeftOut.from_json(each) for each in cast(Sequence[object], values.get("left_out", ()))]


def decides(options: GuardConfig) -> bool:
    """Whether a run leaves batches out by its guards."""
    return options.on_nan != "stop" or options.on_spike != "warn"


class Guard:
    """The policy of a run. memory: of its state."""

    def __init__(self, options: GuardConfig, memory: GuardMemory):
        self.options, self.memory = options, memory
        self._last_spike = -WARM_UP

    @property
    def decides(self) -> bool:
        """Whether the next step depends on what this one was: its numbers are read before the next one is begun."""
        return decides(self.options)

    def limits(self) -> SpikeLimits:
        """Of the next step."""
        return limits(self.memory.losses, self.memory.norms, self.options.spike_threshold)

    def applied(self, limits: SpikeLimits) -> SpikeLimits:
        """Beyond which a step is not applied."""
        return NO_LIMITS if self.options.on_spike == "warn" else limits

    def policy(self, reason: str) -> str:
        """stop, warn, skip or rollback. reason: "nan" or "spike"."""
        return self.options.on_nan if reason == "nan" else self.options.on_spike

    def is_first_spike(self, step: int) -> bool:
        """Whether none was found in the steps just before: a run of them is said once."""
        before, self._last_spike = self._last_spike, step
        return step > before + WARM_UP

    def may_roll_back(self) -> bool:
        """Counts one."""
        self.memory.rollbacks += 1
        return self.memory.rollbacks <= self.options.max_rollbacks
