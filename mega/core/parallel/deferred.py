"""Weight gradients whose GEMMs are put off: a backward pass for inputs only, and the weights' own acts after it.

Zero-bubble schedules (Qi et al. 2023) compute them where a stage would wait. Knows weights, no buckets and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mega.core.parallel.weight import Weight

DeferredWgrad = tuple[Weight, Any, torch.Tensor]
"""A weight's gradient that is still to be computed: the weight, the output's gradient as its GEMM prepares it, the
input."""


class WgradQueue:
    """The GEMMs of some weights' gradients that a backward pass has put off."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self._weights = list(weights)
        self._deferred: list[DeferredWgrad] = []

    def defer(self) -> None:
        """From here on keep weight gradients' GEMMs instead of computing them (a backward pass for inputs only)."""
        self._deferred = []
        for weight in self._weights:
            weight.on_wgrad = self._add

    def take(self) -> list[DeferredWgrad]:
        """The GEMMs kept since `defer`; later ones are computed at once again."""
        for weight in self._weights:
            weight.on_wgrad = None
        taken, self._deferred = self._deferred, []
        return taken

    def _add(self, weight: Weight, grad: Any, x: torch.Tensor) -> None:
        self._deferred.append((weight, grad, x))


def run_wgrad(deferred: Iterable[DeferredWgrad]) -> None:
    """Compute deferred GEMMs, as the weight's act of a plan."""
    with torch.no_grad():
        for weight, grad, x in deferred:
            weight.add_wgrad(grad, x)
