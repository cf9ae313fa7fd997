"""Plot metrics of several runs in Braille dots on a terminal, or as a PNG with matplotlib; `chart.py` draws SVG.

This module does not depend on what the curves measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mega.core.report.chart import PALETTE, Charts, short
from mega.core.report.read import RunRecord, Series, read

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots in a Braille character: rows from top to bottom, each with the left and right dot."""

ANSI = (34, 33, 32, 31, 35, 36)
"""Terminal colours, in the order of `PALETTE`."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters that mark the curves instead of dots if colours are disabled."""


def charts_of(runs: Sequence[Path], metrics: Sequence[str]) -> Charts:
    """Return the curves of `metrics` for `runs`. Default: the training and validation loss. Errors: ValueError naming
    the run, or a metric that no run has.
    """
    records: dict[str, RunRecord] = {}
    for path in runs:
        record = read(path)
        if not isinstance(record, RunRecord):
            raise ValueError(f"RUN {path}: is an evaluation; must be a run's directory, or its file of metrics")
        records[str(path) if path.name in {other.name for other in runs if other != path} else path.name] = record
    available = list(dict.fromkeys(name for record in records.values() for name in record.series))
    names = metrics or [name for name in ("loss", "valid_loss") if name in available]
    for name in names:
        if name not in available:
            raise ValueError(f"--metric {name}: no run has it; valid: {', '.join(available)}")
    return {
        name: {run: record.series[name] for run, record in records.items() if name in record.series} for name in names
    }


def smoothed(curve: Series, weight: float) -> Series:
    """Return the exponential moving average of a curve. Values that are not finite are skipped.

    >>> smoothed([(1, 4.0), (2, 2.0)], 0.5)
    [(1, 4.0), (2, 3.0)]
    """
    averages: Series = []
    for step, value in curve:
        before = averages[-1][1] if averages else value
        finite = math.isfinite(value) and math.isfinite(before)
        averages.append((step, weight * before + (1 - weight) * value if finite else before if averages else value))
    return averages


def terminal(name: str, curves: Mapping[str, Series], width: int = 72, height: int = 14, colour: bool = False) -> str:
    """Draw the curves of one metric in `width` x `height` characters, with a legend. colour: whether to draw dots in
    terminal colours; otherwise several curves are drawn with letters."""
    points = [(x, y) for curve in curves.values() for x, y in curve if math.isfinite(y)]
    if not points:
        return f"{name}: no finite value"
    (first, last), (low, high) = ((min(column), max(column)) for column in zip(*points, strict=True))
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for number, curve in enumerate(curves.values()):
        dots = [
            (
                round((x - first) / max(last - first, 1e-12) * (2 * width - 1)),
                round((high - y) / max(high - low, 1e-12) * (4 * height - 1)),
            )
            for x, y in curve
            if math.isfinite(y)
        ]
        # A character has 2 x 4 dots. Where curves overlap, the whole character shows the last curve.
        for column, row in _joined(dots):
            position = row // 4, column // 2
            owner, bits = cells.get(position, (number, 0))
            cells[position] = number, (bits if owner == number else 0) | DOTS[row % 4][column % 2]
    dotted = colour or len(curves) == 1
    lines = [f"{'':>9}{name}"]
    for row in range(height):
        label = short(high) if row == 0 else short(low) if row == height - 1 else ""
        letters = "".join(_cell(cells.get((row, column)), dotted, colour) for column in range(width))
        lines.append(f"{label:>8} │{letters.rstrip()}")
    lines.append(f"{'':>8} └{'─' * width}")
    lines.append(f"{'':>10}{f'step {first:g}':<{width // 2}}{f'step {last:g}':>{width // 2}}")
    if len(curves) > 1:
        marks = (_cell((n, 0xFF), dotted, colour) for n in range(len(curves)))
        lines.append(" " * 10 + "   ".join(f"{mark} {run}" for mark, run in zip(marks, curves, strict=True)))
    return "\n".join(lines)


def _joined(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the (column, row) of the given dots, and of the dots on the lines between them.

    >>> list(_joined([(0, 0), (3, 6), (3, 0)]))
    [(0, 0), (1, 2), (2, 4), (3, 6), (3, 0)]
    """
    yield from dots[:1]
    for (x, y), (column, row) in itertools.pairwise(dots):
        for dot_column in range(x + 1, column):
            yield dot_column, round(y + (row - y) * (dot_column - x) / (column - x))
        yield column, row


def _cell(cell: tuple[int, int] | None, dots: bool, colour: bool) -> str:
    """Return the character for one cell. cell: (index of the curve, bits of the dots); None means a space."""
    if cell is None:
        return " "
    number, bits = cell
    letter = chr(0x2800 + bits) if dots else LETTERS[number % len(LETTERS)]
    return f"\x1b[{ANSI[number % len(ANSI)]}m{letter}\x1b[0m" if colour else letter


def png(charts: Charts, path: Path, log: bool = False) -> None:
    """Draw the charts to a PNG at `path`. Errors: ValueError naming the extra to install if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"--out {path}: a .png needs matplotlib (pip install '.[track]' in a clone); a .svg needs nothing"
        ) from None
    figure = Figure(figsize=(7.5, 3.4 * len(charts)), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts.items(), strict=True):
        for number, (run, curve) in enumerate(curves.items()):
            axes.plot(*zip(*curve, strict=True), linewidth=1, label=run, color=PALETTE[number % len(PALETTE)])
        axes.set(xlabel="step", title=name, **({"yscale": "log"} if log else {}))
        axes.legend()
    figure.savefig(path, dpi=150, format="png")
