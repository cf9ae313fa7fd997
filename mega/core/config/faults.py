"""Faults injected into a run, for tests and drills: `--inject nan:gradient@step=12,rank=3`.

A fault is written KIND[:TARGET]@step=N, with further keys separated by commas. This module parses faults;
`training/guards/inject.py` injects faults.
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
    "fail": ("save", "device"),
}
"""Kind of fault -> the valid targets, the first of which is the default.

    nan, inf   one number becomes NaN or infinite: a loss weight, a layer's output, a gradient before it is reduced, a
               weight, a moment, the last stage's reduced gradient of a tied tensor
    ulp        one number changes to the next representable number, as in a copy that drifted
    spike      the gradient is multiplied by x, or the labels are permuted
    sleep      the rank waits for `seconds` in each step
    kill stop  SIGKILL, SIGSTOP
    fail       a save in the step fails as on a full disk; or a kernel on the device fails, unless --max-restarts has
               restarted the rank
"""


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    kind: str
    target: str
    step: int
    """The first step with the fault."""
    rank: int = 0
    steps: int = 1
    """Number of consecutive steps with the fault."""
    x: float = 4000.0
    """Factor by which `spike` multiplies the gradient."""
    seconds: float = 0.1
    """Delay that `sleep` adds to each step."""
    seed: int = 0
    """Seed that selects the tensor and the element changed by the fault."""

    def due(self, step: int, rank: int) -> bool:
        """Return whether the fault occurs in `step` on `rank`."""
        return self.rank == rank and self.step <= step < self.step + self.steps


_NUMBERS = {"step": int, "rank": int, "steps": int, "seed": int, "x": float, "seconds": float}


def _keys(kind: str, target: str) -> list[str]:
    """Return the names of the values that a kind of fault uses."""
    chosen = ["seed"] if kind in ("nan", "inf", "ulp") or (kind, target) == ("spike", "batch") else []
    strength = {"spike:gradient": ["x"], "sleep:step": ["seconds"]}.get(f"{kind}:{target}", [])
    return ["step", "rank", "steps", *chosen, *strength]


def fault(text: str) -> Fault:
    """Parse one value of --inject.

    >>> fault("nan:gradient@step=12,rank=3")
    Fault(kind='nan', target='gradient', step=12, rank=3, steps=1, x=4000.0, seconds=0.1, seed=0)
    >>> fault("sleep@step=5,seconds=0.2,steps=40").target
    'step'

    Errors: ValueError with the rule that the text violates.
    """
    head, _, keys = text.partition("@")
    kind, _, target = head.partition(":")
    if kind not in TARGETS:
        raise ValueError(f"kind {kind!r}; valid: {', '.join(TARGETS)}")
    target = target or TARGETS[kind][0]
    if target not in TARGETS[kind]:
        raise ValueError(f"{kind}:{target}; valid: {', '.join(f'{kind}:{each}' for each in TARGETS[kind])}")
    values: dict[str, float] = {}
    for pair in filter(None, keys.split(",")):
        name, _, value = pair.partition("=")
        if name in values:
            raise ValueError(f"{name} is given twice")
        try:
            values[name] = _NUMBERS[name](value)
        except (KeyError, ValueError):
            raise ValueError(f"{pair!r}; valid: {', '.join(f'{name}=NUMBER' for name in _NUMBERS)}") from None
    if "step" not in values:
        raise ValueError("says no step; valid: for example nan:gradient@step=12,rank=3")
    # float() also accepts nan and inf, and int() accepts negative numbers.
    if any(value < 0 or not math.isfinite(value) for value in values.values()) or values["step"] < 1:
        raise ValueError("must count steps from 1, and ranks from 0")
    if without := next((name for name in ("steps", "seconds") if values.get(name) == 0), None):
        raise ValueError(f"{without}=0: nothing would happen; must be more")
    if unused := [name for name in values if name not in _keys(kind, target)]:
        raise ValueError(f"{unused[0]} does nothing to {kind}:{target}; valid: {', '.join(_keys(kind, target))}")
    return Fault(kind, target, **values)  # type: ignore[arg-type]
