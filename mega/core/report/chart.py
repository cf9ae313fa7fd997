"""Draw curves as SVG with axes, ticks, a legend, and tooltips with values, without scripts or external files.

This module draws the plots of reports, of `mega plot`, of learning-rate sweeps and of server benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from mega.core.report.read import Series

Charts = Mapping[str, Mapping[str, Series]]
"""Title of a chart -> name of a curve -> points of the curve."""

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 14, 30
MOST_POINTS = 1200
"""Maximum number of points drawn per curve. A longer curve is divided into intervals, and only the extremes of each
interval are drawn."""
COLOURS = 6
"""Number of colours, which are the classes c0 to c5 in the page's style sheet."""
PALETTE = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
"""The colours of the classes c0 to c5, for a separate SVG file."""


class Scale(NamedTuple):
    """The axes of a chart."""

    log: bool = False
    """Whether the y axis is logarithmic, if all values are greater than 0."""
    log_x: bool = False
    """Whether the x axis is logarithmic."""
    over: str = "step"
    """Name of the x axis in tooltips."""
    names: Sequence[str] = ()
    """Labels for x = 0, 1, ..., used instead of numbers."""


LINEAR = Scale()


def chart(curves: Mapping[str, Series], unit: str = "", scale: Scale = LINEAR) -> str:
    """Return an SVG with several curves and a legend."""
    drawable = {name: curve for name, curve in curves.items() if any(math.isfinite(y) for _, y in curve)}
    if not drawable:
        return '<p class="none">no finite value</p>'
    ys = [y for curve in drawable.values() for _, y in curve if math.isfinite(y)]
    xs = [x for curve in drawable.values() for x, _ in curve]
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, scale.log_x)
    y_axis = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, scale.log and min(ys) > 0)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in y_axis.ticks(5):
        pixel = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{pixel:.1f}" y2="{pixel:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{pixel + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value, name in enumerate(scale.names) if scale.names else ((value, short(value)) for value in x_axis.ticks(7)):
        pixel = x_axis.at(value)
        parts.append(f'<text x="{pixel:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{name}</text>')
    for number, (name, curve) in enumerate(drawable.items()):
        parts += _curve(name, thinned(curve), (x_axis, y_axis), number % COLOURS, (scale.over, unit))
    parts.append("</svg>")
    if len(drawable) == 1:  # the title names the curve
        return "".join(parts)
    legend = "".join(f'<span class="c{n % COLOURS}">{escape(name)}</span>' for n, name in enumerate(drawable))
    return f'{"".join(parts)}<p class="legend">{legend}</p>'


def svg(charts: Charts, scale: Scale = LINEAR, title: str = "") -> str:
    """Return one SVG file with all charts, one below the other."""
    style = "".join(f".c{n}{{stroke:{PALETTE[n]}}}circle.c{n}{{fill:{PALETTE[n]}}}" for n in range(COLOURS))
    style += (
        "polyline{fill:none;stroke-width:1.6}.grid{stroke:#ccc}.hit{opacity:0}text{font:12px sans-serif;stroke:none}"
    )
    parts, top = [f'<text x="8" y="16">{escape(title)}</text>'] if title else [], 24 if title else 0
    for name, curves in charts.items():
        parts.append(f'<text x="62" y="{top + 18}" font-weight="bold">{escape(name)}</text>')
        for number, run in enumerate(curves):
            x = 76 + 8 * len(name) + number * 150
            parts.append(f'<text x="{x}" y="{top + 18}" fill="{PALETTE[number % COLOURS]}">{escape(run[-22:])}</text>')
        image = chart(curves, scale=scale).partition("</svg>")[0]
        image = image.replace("<svg ", f'<svg y="{top + 24}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        parts.append(f"{image}</svg>" if image.startswith("<svg") else "")
        top += HEIGHT + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _curve(name: str, curve: Series, axes: tuple[_Axis, _Axis], colour: int, words: tuple[str, str]) -> list[str]:
    (x_axis, y_axis), (x_name, unit) = axes, words
    runs: list[list[str]] = [[]]
    for x, y in curve:
        if math.isfinite(y):
            runs[-1].append(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}")
        elif runs[-1]:
            runs.append([])
    parts = [f'<polyline class="c{colour}" points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    finite = [(x, y) for x, y in curve if math.isfinite(y)]
    marked = finite if len(finite) <= 60 else finite[:: -(-len(finite) // 60)]
    for x, y in marked:  # points with tooltips
        text = escape(f"{name}, {x_name} {x:g}: {short(y)} {unit}".rstrip())
        radius = 2.2 if len(finite) <= 60 else 5
        hidden = "" if len(finite) <= 60 else " hit"
        parts.append(
            f'<circle class="c{colour}{hidden}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="{radius}">'
            f"<title>{text}</title></circle>"
        )
    return parts


def thinned(curve: Series, most: int = MOST_POINTS) -> Series:
    """Reduce a curve to about `most` points. The extremes of each interval are kept, so that spikes stay visible."""
    if len(curve) <= most:
        return list(curve)
    size, points = -(-len(curve) // (most // 2)), []
    for first in range(0, len(curve), size):
        part = curve[first : first + size]
        finite = [point for point in part if math.isfinite(point[1])]
        if not finite:
            points.append(part[0])
            continue
        points += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return points


class _Axis:
    """One axis of a chart, which maps values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float, log: bool = False):
        if low == high:
            low, high = (low * 0.9, high * 1.1) if low > 0 else (low - 1, high + 1)
        self.low, self.high, self.begin, self.end, self.log = low, high, begin, end, log

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self, count: int) -> Sequence[float]:
        """Return about `count` round numbers within the range of the axis."""
        if self.log and self.high / self.low > 20:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            powers_of_ten = [10.0**power for power in powers]
            return powers_of_ten[:: max(1, len(powers_of_ten) // count)] or [self.low, self.high]
        rough = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step) + 1)]


def short(value: float) -> str:
    """
    >>> [short(value) for value in (0, 3.14159, 0.0003, 12_345_678, 1500)]
    ['0', '3.142', '0.0003', '12.35M', '1500']
    """
    if not math.isfinite(value):
        return "n/a"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = size if letter != "k" else 1e3
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"
