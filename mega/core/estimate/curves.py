"""Interpolates measured times of operations: the curves of an H100 in curves.json, or those of a calibrated device.

A curve is a list of points. Each point has the sizes of an operation, and its time in microseconds:

    matmul LAYOUT, fp8 matmul LAYOUT   m, k, n, time          LAYOUT: forward, dgrad or wgrad; see cost.Gemm
    attention KERNEL                   rows, length, width, time forward, time backward; see cost.AttentionWork
    elementwise                        bytes read and written, time

bench/curves.py measures the points. This module depends on neither devices nor operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from statistics import median

LAYOUTS = ("forward", "dgrad", "wgrad")
"""The three matmuls of a linear layer."""

KERNELS = ("cudnn causal", "cudnn full", "ours causal dropout", "ours full dropout", "ours full")
"""Attention kernels that have curves. On a device without cuDNN, the cuDNN names denote the kernel used instead."""

NUMBERS = {
    **{f"{kind} {layout}": 4 for kind in ("matmul", "fp8 matmul") for layout in LAYOUTS},
    **{f"attention {kernel}": 5 for kernel in KERNELS},
    "elementwise": 2,
}
"""Name of a curve -> number of values in each of its points."""

MATMUL_DELAY, ATTENTION_DELAY = 2.5e-6, (4e-6, 12e-6)
"""Seconds that a matmul and attention (forward, backward) take without any work."""


class Curve:
    """Interpolates measured times: seconds = work / rate * mean deviation of nearby points + delay.

    points: (coordinates, work, measured seconds) of each measurement; coordinates are positive numbers such as m, k, n.
    The weight of a point decreases with the distance between the logarithms of the coordinates. delay: seconds of a
    kernel that does no work; at most half of the shortest measured time.
    """

    CLOSE = 0.02
    """Squared distance between log2 coordinates within which a point counts as an exact match."""

    def __init__(self, points: Sequence[tuple[tuple[float, ...], float, float]], delay: float) -> None:
        self._delay = delay = min(delay, min(seconds for *_, seconds in points) / 2)
        self._rate = median(work / (seconds - delay) for _, work, seconds in points)
        self._coordinates = [tuple(map(math.log2, place)) for place, _, _ in points]
        self._off = [math.log((seconds - delay) * self._rate / work) for _, work, seconds in points]

    def seconds(self, shape: tuple[float, ...], work: float, speed: float = 1.0) -> float:
        """Seconds for a shape. speed: speed of a card relative to the measured card. The first coordinate is divided by
        the speed, because the same shape utilizes a faster card less."""
        point_logs, total, weighted_deviation = (
            tuple(math.log2(max(x, 1e-9)) for x in (shape[0] / speed, *shape[1:])),
            0.0,
            0.0,
        )
        for point, deviation in zip(self._coordinates, self._off, strict=True):
            distance = sum((a - b) ** 2 for a, b in zip(point_logs, point, strict=True))
            weight = 1.0 / (distance + self.CLOSE) ** 2
            total += weight
            weighted_deviation += weight * deviation
        return work / self._rate / speed * math.exp(weighted_deviation / total) + self._delay


def attention_flops(rows: float, queries: float, keys: float, width: float, backward: bool) -> float:
    """Number of operations that attention over all (query, key) pairs takes."""
    return (10.0 if backward else 4.0) * rows * queries * keys * width


Points = Mapping[str, Sequence[Sequence[float]]]
"""Name of a curve -> its points."""


@dataclass(frozen=True, eq=False)
class Curves:
    """The curves of one device, by name."""

    points: Points
    _made: dict[str, Curve] = field(default_factory=dict, init=False, repr=False)

    def matmul(self, kind: str, layout: str) -> Curve | None:
        """The curve of matmuls (m, k, n), or None if it was not measured. kind: "matmul" or "fp8 matmul"."""
        name = f"{kind} {layout}"
        if name in self.points and name not in self._made:
            points = self.points[name]
            rows = [((m, k, n), 2.0 * m * k * n, microseconds * 1e-6) for m, k, n, microseconds in points]
            self._made[name] = Curve(rows, MATMUL_DELAY)
        return self._made.get(name)

    def attention(self, kernel: str, backward: bool) -> Curve | None:
        """The curve of attention (rows, length, width), or None if it was not measured."""
        name, share = f"attention {kernel}", 0.5 if "causal" in kernel else 1.0
        key = f"{name} {backward}"
        if name in self.points and key not in self._made:
            rows = [
                ((b, s, width), share * attention_flops(b, s, s, width, backward), microseconds[backward] * 1e-6)
                for b, s, width, *microseconds in self.points[name]
            ]
            self._made[key] = Curve(rows, ATTENTION_DELAY[backward])
        return self._made.get(key)

    def elementwise(self, moved: float) -> float | None:
        """Seconds to read and write `moved` bytes in one elementwise pass, or None if no such passes were measured. A
        pass takes at least as long as the fastest measured pass."""
        name = "elementwise"
        if name not in self.points:
            return None
        if name not in self._made:
            self._made[name] = Curve([((size,), size, time * 1e-6) for size, time in self.points[name]], 0.0)
        shortest = min(time for _, time in self.points[name]) * 1e-6
        return max(self._made[name].seconds((moved,), moved), shortest)


@cache
def built_in() -> Curves:
    """The curves of an H100."""
    return Curves(json.loads(files("mega.core.estimate").joinpath("curves.json").read_text(encoding="utf-8")))


def checked(source: str, table: object) -> Curves:
    """Return the curves of a user's file. Errors: ValueError naming `source` and the curve, for an unknown curve or a
    point that is not a list of positive numbers."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{source}: curves must be a table of lists of points, by curve")
    for name, points in table.items():
        if name not in NUMBERS:
            raise ValueError(f"{source}: unknown curve {name}; valid: {', '.join(NUMBERS)}")
        whole = (
            isinstance(points, list | tuple)
            and bool(points)
            and all(_is_point(point, NUMBERS[name]) for point in points)
        )
        if not whole:
            raise ValueError(
                f"{source}: curve {name} must be a list of points of {NUMBERS[name]} positive numbers each"
            )
    return Curves(table)


def _is_point(point: object, length: int) -> bool:
    numbers = isinstance(point, list | tuple) and len(point) == length
    return numbers and all(type(x) in (int, float) and 1e-6 <= x <= 1e15 for x in point)  # type: ignore[attr-defined]
