"""Find the highest usable learning rate with one sweep over learning rates (Smith 2017, section 3.3), and plot the
sweep.

The sweep is an ordinary run in which the learning rate grows by a constant factor each step. The suggested rate is the
rate at which the loss falls fastest with respect to the logarithm of the rate. The rate at which the loss begins to
rise is the upper limit. This module reads the run's metrics, and does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mega.core.config.run import Options, entries, updated
from mega.core.files import whole_file
from mega.core.report.chart import Scale, svg

FIRST, LAST, STEPS = 1e-7, 1.0, 100
"""Defaults of a sweep: first learning rate, last learning rate, number of steps."""
SMOOTHING = 0.9
"""Weight of the previous value in the smoothed loss."""
RISEN = 4.0
"""The sweep ends when the loss has risen from its minimum by more than this multiple of its decrease from the first
step to the minimum."""
LEAST_POINTS = 3
"""Minimum number of steps in a sweep."""


class Point(NamedTuple):
    """One step of a sweep: learning rate, loss, and smoothed loss."""

    lr: float
    loss: float
    smoothed: float


class Suggestion(NamedTuple):
    """The result of a sweep. rate: the learning rate at which the loss falls fastest. least: the learning rate with the
    lowest loss, above which training diverges."""

    rate: float
    least: float


def sweep(options: Options) -> Options:
    """Return the options for a sweep, which neither saves nor validates, because high learning rates ruin the weights.
    The run's length and the options for saving and resuming are ignored.

    Errors: ValueError if the first learning rate is not below the last.
    """
    steps = options.batch.steps or STEPS
    first, last = options.schedule.min_lr or FIRST, options.optimizer.lr or LAST
    if first >= last:
        raise ValueError(f"--min-lr {first}: must be less than --lr {last}, with which the sweep ends")
    values = {"steps": steps, "samples": None, "lr": last, "min_lr": first, "lr_decay": "range-exponential"}
    schedule = {"lr_decay_steps": steps, "lr_warmup_steps": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None}
    unused: dict[str, object] = {"epochs": None, "lr_decay_samples": None}
    unused |= {"save": None, "resume": None, "save_interval": None}
    unused |= {name: entry.default for name, entry in entries().items() if "save" in entry.option.needs}
    metrics = options.log.metrics or "lr-find.jsonl"
    return updated(options, {**values, **schedule, **unused, "eval_iters": 0, "metrics": metrics})


def read(metrics: Path) -> list[Point]:
    """Read a sweep from a metrics file, up to the step at which the loss has diverged."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return smoothed([(row["lr"], row["loss"]) for row in rows if "lr" in row and math.isfinite(row["loss"])])


def smoothed(losses: Sequence[tuple[float, float]]) -> list[Point]:
    """Smooth the losses of a sweep, up to the step at which the loss has diverged. losses: (rate, loss) of every
    step."""
    points: list[Point] = []
    mean, least = 0.0, math.inf
    for number, (lr, loss) in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        corrected = mean / (1 - SMOOTHING**number)
        least = min(least, corrected)
        points.append(Point(lr, loss, corrected))
        if (
            corrected - least > max(RISEN * (points[0].smoothed - least), 0.05 * least)
            and corrected > points[0].smoothed
        ):
            break
    return points


def has_risen(points: Sequence[Point]) -> bool:
    """Whether the loss rose after its minimum, which means that the sweep ended because of a high learning rate."""
    return len(points) >= LEAST_POINTS and points[-1].smoothed > min(point.smoothed for point in points)


def suggest(points: Sequence[Point]) -> Suggestion:
    """Return the suggestion from a sweep of at least three steps. Errors: ValueError if the loss never falls.

    >>> falls = [(10.0**-k, loss) for k, loss in ((5, 4.0), (4, 3.9), (3, 3.0), (2, 2.8), (1, 9.0))]
    >>> suggest([Point(lr, loss, loss) for lr, loss in falls])
    Suggestion(rate=0.001, least=0.01)
    """
    lowest = min(range(len(points)), key=lambda at: points[at].smoothed)
    if lowest == 0 or len(points) < LEAST_POINTS:
        raise ValueError("the loss does not fall anywhere in the sweep; give a lower --min-lr, or more --steps")

    def slope(at: int) -> float:
        previous, point = points[at - 1], points[at]
        return (point.smoothed - previous.smoothed) / math.log(point.lr / previous.lr)

    return Suggestion(points[min(range(1, lowest + 1), key=slope)].lr, points[lowest].lr)


def draw(points: Sequence[Point], found: Suggestion, path: Path) -> None:
    """Write the sweep as an SVG: loss over the logarithm of the learning rate, and the two rates of `found` as vertical
    lines.

    A diverged loss is drawn at the upper edge, because a larger scale would make all other losses look equal.
    """
    least, first = min(point.smoothed for point in points), points[0].smoothed
    ends = least, min(max(point.smoothed for point in points), 2 * first - least)
    curves = {
        "loss": [(point.lr, min(point.loss, ends[1])) for point in points],
        "smoothed": [(point.lr, min(point.smoothed, ends[1])) for point in points],
        f"suggested {found.rate:.1e}": [(found.rate, loss) for loss in ends],
        f"lowest {found.least:.1e}": [(found.least, loss) for loss in ends],
    }
    with whole_file(path) as file:
        file.write(svg({"loss": curves}, Scale(log_x=True, over="rate")).encode())
