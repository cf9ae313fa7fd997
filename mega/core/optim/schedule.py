"""Learning rate and weight decay as functions of the samples consumed. Pure arithmetic on plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1),
    "exponential": lambda done: float(2 * 0.5**done - 1),
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}
"""Share of a decay that is done -> how much is left of the way down."""


@dataclass(frozen=True)
class LearningRate:
    """Warm-up from `initial` to `peak` over `warmup` samples, then `style` down to `least` at `decay` samples.

    "wsd" stays at `peak` until `anneal` samples before `decay`, over which it falls by `anneal_style` (Hu et al. 2024,
    arXiv 2404.06395, with the curves of Megatron-core).

    Two styles look for the rate that a run bears (Smith 2017): "range-test" grows by `peak` every `decay` samples,
    "range-exponential" by one factor a sample, from `least` to `peak`.

    batch: samples of a step, in which a warm-up by logarithm counts: ln(step + 1) / ln(steps of the warm-up), as
    DeepSpeed has it; None where it is linear.

    >>> rate = LearningRate(peak=1.5e-4, least=1e-5, warmup=100, decay=1000, style="linear")
    >>> rate(0), rate(50), round(rate(550), 12), rate(1001)
    (0.0, 7.5e-05, 8e-05, 1e-05)
    """

    peak: float
    least: float
    warmup: int
    decay: int
    style: str
    initial: float = 0.0
    batch: int | None = None
    anneal: int = 0
    anneal_style: str = "exponential"

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
            done = max(0, samples - (self.decay - self.anneal)) / max(1, self.anneal)
            left = _LEFT[self.anneal_style](done)
        else:
            left = _LEFT[self.style]((samples - self.warmup) / (self.decay - self.warmup))
        return self.least + (self.peak - self.least) * left

    def _warm(self, samples: int) -> float:
        """Share of the way from `initial` to `peak`."""
        if self.batch is None:
            return samples / self.warmup
        return min(1.0, math.log(samples / self.batch + 1) / math.log(max(2, self.warmup // self.batch)))


@dataclass(frozen=True)
class WeightDecay:
    """From `start` to `end` over all `total` training samples."""

    start: float
    end: float
    total: int
    style: str = "constant"

    def __call__(self, samples: int) -> float:
        if self.style == "constant" or samples >= self.total:
            return self.end
        done = samples / self.total
        share = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1)
        return self.start + share * (self.end - self.start)
