"""Faults that a run is asked to have, for tests and drills: `--inject nan:gradient@step=12,rank=3`.

A fault is KIND[:TARGET]@step=N and more keys. This file knows what may be asked for; training/guards/inject.py does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TARGETS: Mapping[str, tuple[str, ...]] = {
    "nan": ("batch", "activation", "gradient", "weight", "moment", "tied"),
    "inf": ("batch", "activation", "gradient", "weight", "moment", "tied"),
    "ulp": ("weight", "moment"),
    "spike": ("gradient", "batch"),
    "sleep": ("step",),
    "kill": ("step",),
    "stop": ("step",),
    "fail": ("save",),
}
"""Kind -> where it may be; the first is where none is named.

    nan, inf   one number becomes NaN or infinite: a loss weight, a layer's output, a gradient before it is reduced, a
               weight, a moment, the last stage's reduced gradient of a tied tensor
    ulp        one number moves to the next one: a copy drifts
    spike      x times the gradient, or labels that are not those of the tokens
    sleep      the rank waits for `seconds` in each step
    kill stop  SIGKILL, SIGSTOP
    fail       a save of the step finds the disk full
"""

SECRET = "MEGA_INJECT"
"""The variable of the environment that must be 1 as well, so that no real run is damaged by a flag in its script."""


@dataclass(frozen=True)
class Fault:
    """step: the first one with it. steps: how many have it. rank: which has it. seed: chooses tensor and element."""

    kind: str
    target: str
    step: int
    rank: int = 0
    steps: int = 1
    x: float = 4000.0
    seconds: float = 0.1
    seed: int = 0

    def due(self, step: int, rank: int) -> bool:
        return self.rank == rank and self.step <= step < self.step + self.steps


_NUMBERS = {"step": int, "rank": int, "steps": int, "seed": int, "x": float, "seconds": float}


def fault(text: str) -> Fault:
    """
    >>> fault("nan:gradient@step=12,rank=3")
    Fault(kind='nan', target='gradient', step=12, rank=3, steps=1, x=4000.0, seconds=0.1, seed=0)
    >>> fault("sleep@step=5,seconds=0.2,steps=40").target
    'step'

    Errors: ValueError with the rule that the text breaks.
    """
    what, _, keys = text.partition("@")
    kind, _, target = what.partition(":")
    if kind not in TARGETS:
        raise ValueError(f"kind {kind!r}; valid: {', '.join(TARGETS)}")
    target = target or TARGETS[kind][0]
    if target not in TARGETS[kind]:
        raise ValueError(f"{kind}:{target}; valid: {', '.join(f'{kind}:{each}' for each in TARGETS[kind])}")
    values: dict[str, float] = {}
    for pair in filter(None, keys.split(",")):
        name, _, value = pair.partition("=")
        try:
            values[name] = _NUMBERS[name](value)
        except (KeyError, ValueError):
            raise ValueError(f"{pair!r}; valid: {', '.join(f'{name}=NUMBER' for name in _NUMBERS)}") from None
    if "step" not in values:
        raise ValueError("says no step; valid: for example nan:gradient@step=12,rank=3")
    if any(value < 0 or not math.isfinite(value) for value in values.values()) or values["step"] < 1:
        raise ValueError("must count steps from 1, and ranks from 0")
    return Fault(kind, target, **values)  # type: ignore[arg-type]
