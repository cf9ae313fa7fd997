"""The highest usable learning rate, from one sweep over rates (Smith 2017, section 3.3): what it is, and its picture.

The sweep is an ordinary run whose rate grows by one factor a step. Where the loss falls fastest per factor is a rate to
train with; where it begins to rise is the limit. Knows no torch: it reads the run's metrics.
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
"""The rates that a sweep begins and ends with, and its steps, where they are not given."""
SMOOTHING = 0.9
"""Share of what was that stays in the smoothed loss."""
RISEN = 4.0
"""How many times the fall so far the loss may rise again before the sweep is over."""
LEAST_POINTS = 3
"""Steps of a curve, at least."""


class Point(NamedTuple):
    """One step: its rate, its loss, and the loss smoothed over the steps before."""

    lr: float
    loss: float
    smoothed: float


class Suggestion(NamedTuple):
    """rate: where the loss falls fastest. least: where it is lowest, beyond which training does not hold."""

    rate: float
    least: float


def sweep(options: Options) -> Options:
    """Options of a sweep: nothing is saved or validated; how long the run is and how it saves does not count.

    Errors: ValueError naming a flag that asks for what a sweep cannot do.
    """
    if options.checkpoint.save is not None or options.checkpoint.resume is not None:
        flag = "--save" if options.checkpoint.save is not None else "--resume"
        raise ValueError(f"{flag}: a sweep of learning rates ruins the weights, so that none are kept; leave it out")
    steps = options.batch.steps or STEPS
    first, last = options.schedule.min_lr or FIRST, options.optimizer.lr or LAST
    if first >= last:
        raise ValueError(f"--min-lr {first}: must be less than --lr {last}, with which the sweep ends")
    values = {"steps": steps, "samples": None, "lr": last, "min_lr": first, "lr_decay": "range-exponential"}
    schedule = {"lr_decay_steps": steps, "lr_warmup_steps": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None}
    unused: dict[str, object] = {"epochs": None, "lr_decay_samples": None, "save_interval": None}
    unused |= {name: entry.default for name, entry in entries().items() if "save" in entry.option.needs}
    metrics = options.log.metrics or "lr-find.jsonl"
    return updated(options, {**values, **schedule, **unused, "eval_iters": 0, "metrics": metrics})


def read(metrics: Path) -> list[Point]:
    """The sweep that a file of metrics holds, to where the loss has risen for good."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return smoothed([(row["lr"], row["loss"]) for row in rows if "lr" in row and math.isfinite(row["loss"])])


def smoothed(losses: Sequence[tuple[float, float]]) -> list[Point]:
    """(rate, loss) of every step with its smoothed loss, to where it has risen for good."""
    points: list[Point] = []
    mean, least = 0.0, math.inf
    for number, (lr, loss) in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        now = mean / (1 - SMOOTHING**number)
        least = min(least, now)
        points.append(Point(lr, loss, now))
        if now - least > max(RISEN * (points[0].smoothed - least), 0.05 * least) and now > points[0].smoothed:
            break
    return points


def has_risen(points: Sequence[Point]) -> bool:
    """Whether a sweep went past the lowest loss, so that what ended it was the rate."""
    return len(points) >= LEAST_POINTS and points[-1].smoothed > min(point.smoothed for point in points)


def suggest(points: Sequence[Point]) -> Suggestion:
    """From a sweep of at least three steps. Errors: ValueError where the loss never falls.

    >>> falls = [(10.0**-k, loss) for k, loss in ((5, 4.0), (4, 3.9), (3, 3.0), (2, 2.8), (1, 9.0))]
    >>> suggest([Point(lr, loss, loss) for lr, loss in falls])
    Suggestion(rate=0.001, least=0.01)
    """
    lowest = min(range(len(points)), key=lambda at: points[at].smoothed)
    if lowest == 0 or len(points) < LEAST_POINTS:
        raise ValueError("the loss does not fall anywhere in the sweep; give a lower --min-lr, or more --steps")

    def slope(at: int) -> float:
        before, here = points[at - 1], points[at]
        return (here.smoothed - before.smoothed) / math.log(here.lr / before.lr)

    return Suggestion(points[min(range(1, lowest + 1), key=slope)].lr, points[lowest].lr)


def draw(points: Sequence[Point], found: Suggestion, path: Path) -> None:
    """The sweep as an SVG: loss over the logarithm of the rate, and the two rates as upright lines.

    A loss that has blown up is drawn at the upper edge: its true height would make a flat line of all others.
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
