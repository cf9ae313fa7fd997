"""Deferred weight gradients: a backward pass that computes input gradients only, followed by separate weight-gradient
steps.

Zero-bubble schedules (Qi et al. 2023) run the wgrad GEMMs when a stage would otherwise wait. This module depends on
weights, but not on buckets or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mega.core.ops.operand import Input
from mega.core.parallel.weight import Weight

DeferredWgrad = tuple[Weight, Any, Input]
"""The arguments of a wgrad GEMM that has not run yet: the weight, and `grad` and `x` of `Weight.add_wgrad`."""


class WgradQueue:
    """The wgrad GEMMs that a backward pass has deferred."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self._weights = list(weights)
        self._deferred: list[DeferredWgrad] = []

    def defer(self) -> None:
        """Queue later wgrad GEMMs instead of running them, so that the backward pass computes input gradients only."""
        self._deferred = []
        for weight in self._weights:
            weight.on_wgrad = self._add

    def take(self) -> list[DeferredWgrad]:
        """Return the GEMMs queued since `defer`, and stop deferring."""
        for weight in self._weights:
            weight.on_wgrad = None
        deferred, self._deferred = self._deferred, []
        return deferred

    def _add(self, weight: Weight, grad: Any, x: Input) -> None:
        self._deferred.append((weight, grad, x))


def run_wgrad(deferred: Iterable[DeferredWgrad]) -> None:
    """Run deferred wgrad GEMMs (the "W" action of a plan)."""
    with torch.no_grad():
        for weight, grad, x in deferred:
            weight.add_wgrad(grad, x)
