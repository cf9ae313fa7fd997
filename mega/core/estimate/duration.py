"""How long a whole training takes, failures included, and how often it should be saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from mega.core.config.resolve import lengths, rising_steps
from mega.core.config.run import RunConfig, updated
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.steptime import step_time

DAY = 86400.0

RESTART_SECONDS = 600.0
"""From a failure to the next step: noticing it, new processes, reading a checkpoint."""


@dataclass(frozen=True)
class Training:
    """days: from the first step to the last. effective: share of it that is neither saved, lost nor repeated.

    save_every: seconds between checkpoints that waste least, or None where nothing fails.
    """

    days: float
    effective: float
    save_every: float | None


def training(
    run: RunConfig, world: int, device: Hardware, mtbf_hours: float | None, save_seconds: float
) -> Training | None:
    """How long the whole training takes, where its length is given. Errors: ValueError where it would never end."""
    if not lengths(run).steps:
        return None
    failures = mtbf_hours * 3600 if mtbf_hours else None
    whole = training_time(
        step_time(run, world, device).seconds,
        _whole_steps(run, world, device),
        save_seconds=save_seconds,
        restart_seconds=RESTART_SECONDS,
        failure_seconds=failures,
    )
    if whole.days == inf:
        raise ValueError(
            f"--mtbf {mtbf_hours:g}: with --save-seconds {save_seconds:g} and {RESTART_SECONDS:g} s from a failure to "
            "the next step such a training never ends; valid: more hours, or shorter saves"
        )
    return whole


def _whole_steps(run: RunConfig, world: int, device: Hardware) -> float:
    """The training's length in steps of the whole batch: those of a ramp-up are shorter."""

    def rough(size: int) -> float:
        return step_time(updated(run, {"global_batch": size}), world, device, play=False).seconds

    rising = Counter(rising_steps(run.batch))
    assert run.batch.global_batch is not None
    whole = rough(run.batch.global_batch)
    return lengths(run).steps - sum(count * (1 - rough(size) / whole) for size, count in rising.items())


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
