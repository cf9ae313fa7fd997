"""How long a whole training takes, failures included, and how often it should be saved."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

DAY = 86400.0


@dataclass(frozen=True)
class Training:
    """days: from the first step to the last. effective: share of it that is neither saved, lost nor repeated.

    save_every: seconds between checkpoints that waste least, or None where nothing fails.
    """

    days: float
    effective: float
    save_every: float | None


def training_time(
    step_seconds: float,
    steps: float,
    *,
    save_seconds: float = 0.0,
    restart_seconds: float = 0.0,
    failure_seconds: float | None = None,
) -> Training:
    """`steps` of `step_seconds`, saved by Young's and Daly's interval against a mean time between failures.

    save_seconds: how long one save stops the training. restart_seconds: from a failure to the next step.
    failure_seconds: mean time between failures of the whole machine, not of one device; None for never.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps". The wall time is
    his equation 20: M exp(R/M) (exp((t+d)/M) - 1) T/t for interval t, save d, restart R, failures M, work T; infinite
    where that is more than a float holds.

    >>> plan = training_time(30.0, 95000, save_seconds=60, restart_seconds=600, failure_seconds=10 * 3600)
    >>> round(plan.days, 1), round(plan.effective, 3), round(plan.save_every / 60)
    (35.6, 0.928, 34)
    """
    work = step_seconds * steps
    if failure_seconds is None:
        return Training(work / DAY, 1.0, None)
    save = max(save_seconds, 1e-3)
    interval = optimum_interval(save, failure_seconds)
    rate = 1.0 / failure_seconds
    try:
        wall = failure_seconds * exp(restart_seconds * rate) * expm1((interval + save) * rate) * work / interval
    except OverflowError:
        wall = inf
    return Training(wall / DAY, work / wall, interval)


def optimum_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between two saves: Daly's equation 37, whose first term is Young's sqrt(2 d M).

    >>> round(optimum_interval(60.0, 36000.0))
    2039
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    return sqrt(2 * save_seconds * failure_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds
