"""The policy for unsound steps: steps with non-finite values, or with a spike of the loss or gradient norm.

    limits before a step      computed from median and spread of earlier steps, and checked on the device, so that a
                              step beyond the limits is not applied [--on-spike skip, rollback]
    after a step              every rank reads the same reduced results, so all ranks make the same decision without an
                              exchange
    a skipped step            leaves weights, moments, loss scale, schedule and limits unchanged;
                              only the step number and the data position advance
    many consecutive spikes   mean that the usual level has changed: the limits are computed from later steps only
    a rollback                a skip of all steps since the newest checkpoint, whose state is restored

Checkpoints store which samples were left out, so that a resumed run is identical. This module depends neither on ranks
nor on tensors.
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
"""Number of steps before any step can count as a spike."""

LASTING = 20
"""Number of consecutive spikes, without an applied step between them, after which the limits are reset. The weights did
not change in these steps, so the data must have changed, and later steps would not be applied either."""

LEAST_SPREAD = 0.005, 0.05
"""Lower limits of the spread, for runs with very little noise: for the loss (relative to the loss), and for the
logarithm of the gradient norm."""

MOST_LEFT_OUT = 200
"""Maximum number of `LeftOut` records, the newest ones, that a checkpoint stores; the events file has all records."""

MAD = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""


@dataclass(frozen=True)
class SpikeLimits:
    """Limits above which the loss or the gradient norm of a step is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


NO_LIMITS = SpikeLimits()


def limits(losses: Iterable[float], norms: Iterable[float], threshold: float) -> SpikeLimits:
    """Return the limits median + threshold x spread for the loss and the gradient norm. The norm's limit is computed
    from logarithms, because the noise of the norm is multiplicative.

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
    """A record of samples that were left out."""

    step: int
    """The unsound step."""
    reason: str
    """"nan" or "spike"."""
    first: int
    """The first sample that was left out."""
    end: int
    """The sample after the last sample that was left out."""
    to: int | None = None
    """The step to which a rollback returned; None if there was no rollback."""

    def as_json(self) -> dict[str, Json]:
        record: dict[str, Json] = {"step": self.step, "reason": self.reason, "samples": [self.first, self.end]}
        return record if self.to is None else {**record, "to": self.to}

    @classmethod
    def from_json(cls, stored: object) -> LeftOut:
        values = below(stored)
        first, end = cast(Sequence[int], values["samples"])
        to = values.get("to")
        return cls(int(cast(int, values["step"])), str(values["reason"]), first, end, cast("int | None", to))


@dataclass
class GuardMemory:
    """The state of the guard, which checkpoints store."""

    window: int = 128
    """Maximum length of `losses` and `norms`."""
    level: str = ""
    """A hash of everything on which losses depend, except the weights. Losses recorded under a different hash are not
    restored."""
    losses: deque[float] = field(init=False)
    """Losses of the most recently applied steps."""
    norms: deque[float] = field(init=False)
    """Gradient norms of the most recently applied steps."""
    left_out: list[LeftOut] = field(default_factory=list)
    rollbacks: int = 0
    """Number of rollbacks so far."""
    spikes: int = 0
    """Number of spikes skipped since the most recently applied step."""

    def __post_init__(self) -> None:
        self.losses, self.norms = deque(maxlen=self.window), deque(maxlen=self.window)

    def add(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            self.losses.append(loss)
            self.norms.append(norm)
            self.spikes = 0

    def skip_spike(self) -> bool:
        """Count a skipped spike; after LASTING skipped spikes reset the limits and return True."""
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
        """Restore the state from a checkpoint; `stored` is None or {} for checkpoints written by old versions."""
        values = below(stored)
        same = values.get("level", self.level) == self.level
        self.losses = deque(cast(Sequence[float], values.get("losses", ()) if same else ()), maxlen=self.window)
        self.norms = deque(cast(Sequence[float], values.get("norms", ()) if same else ()), maxlen=self.window)
        self.spikes = int(cast(int, values.get("spikes", 0))) if same else 0
        self.rollbacks = int(cast(int, values.get("rollbacks", 0)))
        self.left_out = [LeftOut.from_json(each) for each in cast(Sequence[object], values.get("left_out", ()))]


def decides(options: GuardConfig) -> bool:
    """Whether the guards of a run may skip batches."""
    return options.on_nan != "stop" or options.on_spike != "warn"


class Guard:
    """The policy of a run. memory: the state of the guard, which is part of the run's state."""

    def __init__(self, options: GuardConfig, memory: GuardMemory):
        self.options, self.memory = options, memory
        self._last_spike = -WARM_UP

    @property
    def decides(self) -> bool:
        """Whether the next step depends on the results of the current step, so that these results must be read
        first."""
        return decides(self.options)

    def limits(self) -> SpikeLimits:
        """Return the limits for the next step."""
        return limits(self.memory.losses, self.memory.norms, self.options.spike_threshold)

    def applied(self, limits: SpikeLimits) -> SpikeLimits:
        """Return the limits beyond which a step is not applied; no limits if spikes are only reported."""
        return NO_LIMITS if self.options.on_spike == "warn" else limits

    def policy(self, reason: str) -> str:
        """Return the policy for an unsound step: stop, warn, skip or rollback. reason: "nan" or "spike"."""
        return self.options.on_nan if reason == "nan" else self.options.on_spike

    def is_first_spike(self, step: int) -> bool:
        """Record a spike, and return whether no other spike occurred in the last WARM_UP steps, so that a series of
        spikes is reported once."""
        previous, self._last_spike = self._last_spike, step
        return step > previous + WARM_UP

    def may_roll_back(self) -> bool:
        """Count a rollback, and return whether this rollback is allowed."""
        self.memory.rollbacks += 1
        return self.memory.rollbacks <= self.options.max_rollbacks
