"""Learning rate and weight decay as functions of the number of consumed samples. Only Python numbers are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1),
    "exponential": lambda progress: float(2 * 0.5**progress - 1),
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Curve -> function that takes the progress of a decay (0 to 1) and returns the remaining fraction of the learning
rate's total change."""

_ENDLESS = "constant", "range-test", "range-exponential"
"""Styles without a decay to a final learning rate."""


@dataclass(frozen=True)
class LearningRate:
    """A learning rate with a warm-up from `initial` to `peak` over `warmup` samples, followed by a decay to `least` at
    `decay` samples.

    The style "wsd" stays at `peak` and decays over the last `anneal` samples with the curve `anneal_style` (Hu et al.
    2024, arXiv 2404.06395, with the curves of Megatron-core).

    Two styles are for finding the largest stable learning rate (Smith 2017): "range-test" adds `peak` every `decay`
    samples, and "range-exponential" grows from `least` to `peak` by a constant factor per sample.

    >>> rate = LearningRate(peak=1.5e-4, least=1e-5, warmup=100, decay=1000, style="linear")
    >>> rate(0), rate(50), round(rate(550), 12), rate(1001)
    (0.0, 7.5e-05, 8e-05, 1e-05)
    """

    peak: float
    """The learning rate after the warm-up."""
    least: float
    """The final learning rate, or the initial learning rate if the style is "range-exponential"."""
    warmup: int
    """Number of samples in the warm-up."""
    decay: int
    """Number of samples until the final learning rate, including the warm-up."""
    style: str
    """The curve of the learning-rate decay."""
    initial: float = 0.0
    """The learning rate at the start of the warm-up."""
    batch: int | None = None
    """Number of samples per step, for a logarithmic warm-up by ln(step + 1) / ln(steps of the warm-up), as in
    DeepSpeed; None if the warm-up is linear."""
    anneal: int = 0
    """Length, in samples, of the learning-rate decay if the style is "wsd"."""
    anneal_style: str = "exponential"
    """The curve of the learning-rate decay if the style is "wsd"."""

    def has_ended(self, samples: int) -> bool:
        """Whether the learning-rate decay has ended, so that the learning rate stays at `least`.

        >>> rate = LearningRate(peak=1.5e-4, least=1e-5, warmup=100, decay=1000, style="linear")
        >>> rate.has_ended(999), rate.has_ended(1000)
        (False, True)
        """
        return self.style not in _ENDLESS and samples >= self.decay and self(samples) == self.least

    def __call__(self, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * self._warm(samples)
        if self.style == "constant":
            return self.peak
        if self.style == "range-test":
            return self.peak * (1 + samples / self.decay)
        if self.style == "range-exponential":
            return float(self.least * (self.peak / self.least) ** min(1.0, samples / self.decay))
        if samples > self.decay:
            return self.least
        if self.style == "inverse-square-root":
            return max(self.least, self.peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        if self.style == "wsd":
            progress = max(0, samples - (self.decay - self.anneal)) / max(1, self.anneal)
            remaining = _REMAINING[self.anneal_style](progress)
        else:
            remaining = _REMAINING[self.style]((samples - self.warmup) / (self.decay - self.warmup))
        return self.least + (self.peak - self.least) * remaining

    def _warm(self, samples: int) -> float:
        """Return the progress of the warm-up from `initial` to `peak`, between 0 and 1."""
        if self.batch is None:
            return samples / self.warmup
        return min(1.0, math.log(samples / self.batch + 1) / math.log(max(2, self.warmup // self.batch)))


@dataclass(frozen=True)
class WeightDecay:
    """A weight decay that changes from `start` to `end` over `total` training samples. With the style "constant", it is
    always `end`."""

    start: float
    """The weight decay at the first sample."""
    end: float
    """The weight decay after `total` samples."""
    total: int
    """Number of training samples over which the weight decay changes."""
    style: str = "constant"
    """The curve of the change in weight decay (constant, linear or cosine)."""

    def __call__(self, samples: int) -> float:
        if self.style == "constant" or samples >= self.total:
            return self.end
        progress = samples / self.total
        share = progress if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - progress)) + 1)
        return self.start + share * (self.end - self.start)
