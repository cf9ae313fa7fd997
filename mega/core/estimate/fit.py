"""Fits the constants of a device to measured times, and writes the constants as a TOML file. This module does not
measure times itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega.core.estimate.curves import Points
from mega.core.estimate.hardware import SHARES


@dataclass(frozen=True)
class Product:
    """A measured matrix product [m, k] x [k, n]."""

    m: int  # Number of rows of the first factor
    k: int  # Inner dimension
    n: int  # Number of columns of the second factor
    width: int  # Number of bytes per element
    seconds: float  # Measured time

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    @property
    def moved(self) -> float:
        return float(self.width * (self.m * self.k + self.k * self.n + self.m * self.n))


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit a line to measured times so that the relative errors are as small as possible, and return (delay, seconds per
    unit of size). Both values are at least 0.

    >>> delay, each = line([1, 10, 100], [3, 12, 102])
    >>> round(delay, 6), round(each, 6)
    (2.0, 1.0)
    """
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_second = sum(w * second for w, second in zip(weights, seconds, strict=True)) / total
    variance = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    if not variance:
        return 0.0, mean_second / mean_size
    covariance = sum(
        w * (size - mean_size) * (second - mean_second) for w, size, second in zip(weights, sizes, seconds, strict=True)
    )
    each = max(covariance / variance, 1e-18)
    delay = mean_second - each * mean_size
    return (delay, each) if delay > 0 else (0.0, mean_second / mean_size)


def product_shares(samples: Sequence[Product], peak: float, bandwidth: float, launch: float) -> tuple[float, float]:
    """Fit and return two fractions, (product, traffic): the fraction of `peak` (operations per second) that matrix
    products reach, and the fraction of memory traffic that computation does not hide.

    The fit minimizes the squared relative errors of the model: seconds = flops / (peak * product) + traffic * moved /
    bandwidth + launch.

    >>> made = [Product(m, 64, n, 2, 2 * m * 64 * n / 5e11 + 0.5 * 2 * (m * 64 + 64 * n + m * n) / 1e11)
    ...         for m, n in ((64, 64), (512, 64), (512, 2048))]
    >>> [round(share, 6) for share in product_shares(made, 1e12, 1e11, 0.0)]
    [0.5, 0.5]
    >>> min(product_shares(made, 1e12, 1e11, launch=1.0)) > 0
    True
    """
    # Keep 10 % of the time for the product, because a tiny product may be measured faster than the launch alone.
    rows = [(one.flops / one.seconds, one.moved / one.seconds, max(1 - launch / one.seconds, 0.1)) for one in samples]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in zip(*(_squares(a, b) for a, b, _ in rows), strict=True))
    ay, by = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    determinant = aa * bb - ab * ab
    per_flop, per_byte = ay / aa, 0.0
    if determinant > 1e-9 * aa * bb:
        first, second = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
        if first > 0 and second > 0:
            per_flop, per_byte = first, second
    return min(1.0, 1 / (per_flop * peak)), max(per_byte * bandwidth, 1e-3)


def _squares(a: float, b: float) -> tuple[tuple[float, float], ...]:
    return (a, a), (a, b), (b, b)


def as_toml(values: Mapping[str, float], peaks: Mapping[str, float], title: str, curves: Points | None = None) -> str:
    """Return the text of a TOML file for `memory-estimate --gpu`. A missing key has the value of the device `base` in
    hardware.toml.

    >>> print(as_toml({"elementwise": 1.02, "node": 8}, {"bf16": 989.0}, "measured").splitlines()[1])
    elementwise = 1
    """
    # A measured fraction exceeds 1 if the corresponding peak was measured too low.
    limited = {name: min(value, 1.0) if name in SHARES else value for name, value in values.items()}
    lines = [f"# {title}"]
    lines += [f"{name} = {_number(value)}" for name, value in limited.items()]
    lines += ["[peak]", *(f"{name} = {_number(value)}" for name, value in peaks.items())]
    lines += ["[curves]"] if curves else []
    for name, points in (curves or {}).items():
        lines += [f'"{name}" = [', *(f"  [{', '.join(map(_number, point))}]," for point in points), "]"]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """
    >>> _number(8), _number(0.123456), _number(1e-7), _number(140400.0)
    ('8', '0.1235', '1e-07', '1.404e+05')
    """
    return str(value) if isinstance(value, int) else f"{value:.4g}"
