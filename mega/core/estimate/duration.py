"""Predicts the total time of a training run, including failures, and the best checkpoint interval."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, exp, expm1, inf, sqrt

from mega.core.config.resolve import lengths, rising_steps, variant
from mega.core.config.run import RunConfig
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.steptime import step_time

DAY = 86400.0


@dataclass(frozen=True)
class Interruptions:
    """The time costs of saves and failures in a training run."""

    mtbf_hours: float | None = None
    """Mean time between failures of the whole machine, in hours. If None, failures are ignored."""
    save_seconds: float = 30.0
    """Time of a save, in seconds."""
    restart_seconds: float = 600.0
    """Seconds from a failure to the next step: detecting the failure, starting processes, reading a checkpoint."""


@dataclass(frozen=True)
class TrainingTime:
    """The predicted time of a training run."""

    steps: int  # Number of steps
    days: float  # Days from the first step to the last
    effective: float  # Fraction of the time spent on steps that are not repeated
    save_interval: int | None  # Steps between checkpoints; None if no checkpoint is saved
    saves: int  # Number of checkpoints
    save_every: float | None  # Seconds between checkpoints at the best interval; None if failures are ignored
    save_every_steps: int | None  # The best interval, in steps
    save_every_days: float | None  # Days of training at the best interval


def training(run: RunConfig, world: int, device: Hardware, stops: Interruptions) -> TrainingTime | None:
    """The total time of a training run, or None if its length is not given. Errors: ValueError if the run would never
    end.

    Checkpoints are saved every --save-interval steps. If this option is missing and failures are expected, the best
    interval is used.
    """
    steps, interval = lengths(run).steps, run.checkpoint.save_interval
    if not steps:
        return None
    training_days = training_time(
        step_time(run, world, device).seconds * _whole_steps(run, world, device) / steps,
        steps,
        save_interval=interval,
        save_seconds=stops.save_seconds,
        overlapped=run.checkpoint.async_save,
        restart_seconds=stops.restart_seconds,
        failure_seconds=stops.mtbf_hours * 3600 if stops.mtbf_hours is not None else None,
    )
    if training_days.days == inf:
        typed = f"--save-interval {interval}, " if interval is not None else ""
        raise ValueError(
            f"--mtbf {stops.mtbf_hours:g}: with {typed}--save-seconds {stops.save_seconds:g} and --restart-seconds "
            f"{stops.restart_seconds:g} such a training never ends; valid: more hours, shorter saves or restarts"
            + (
                f", or --save-interval {training_days.save_every_steps}"
                if typed and training_days.save_every_days != inf
                else ""
            )
        )
    return training_days


def _whole_steps(run: RunConfig, world: int, device: Hardware) -> float:
    """The length of a training run, in steps with the full batch. A step of the batch ramp-up counts as a fraction of a
    step, in proportion to its duration."""

    def rough(size: int) -> float:
        return step_time(variant(run, {"global_batch": size}), world, device, play=False).seconds

    ramp_up = Counter(rising_steps(run.batch))
    full_seconds = rough(run.batch.global_batch)
    return lengths(run).steps - sum(count * (1 - rough(size) / full_seconds) for size, count in ramp_up.items())


def training_time(
    step_seconds: float,
    steps: int,
    *,
    save_interval: int | None = None,
    save_seconds: float = 0.0,
    overlapped: bool = False,
    restart_seconds: float = 0.0,
    failure_seconds: float | None = None,
) -> TrainingTime:
    """The time of `steps` steps of `step_seconds` each, including failures, with a save every `save_interval` steps and
    after the last step. If no interval is given, the optimum of Young and Daly is used.

    save_seconds: time of one save. Training stops during a save unless `overlapped`. restart_seconds: time from a
    failure to the next step. failure_seconds: mean time between failures of the whole machine, not of one device; None
    if failures are ignored.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps". The wall time is
    his equation 20: M exp(R/M) (exp((t+d)/M) - 1) T/t for interval t, save time d, restart time R, failure time M, work
    time T, with the true length of the last interval. The time is infinite if it exceeds the range of a float.

    >>> plan = training_time(30.0, 95000, save_seconds=60, restart_seconds=600, failure_seconds=10 * 3600)
    >>> round(plan.days, 1), round(plan.effective, 3), plan.save_every_steps, round(plan.save_every / 60)
    (35.6, 0.928, 68, 34)
    >>> training_time(4.0, 21600, save_interval=100, save_seconds=400).days
    2.0
    """
    # Assumption: an overlapped save does not slow down steps, but the next save waits for it to end. A failure during
    # the save also loses the steps since the save began.
    restart = restart_seconds + (save_seconds if overlapped else 0.0)

    def stretch(trained: int, last: bool) -> float:
        """Seconds of `trained` steps and of the following save. The run waits until the last save ends."""
        work = trained * step_seconds
        stop = max(0.0, save_seconds - work) if overlapped and not last else save_seconds
        if failure_seconds is None:
            return work + stop
        try:
            return failure_seconds * exp(restart / failure_seconds) * expm1((work + stop) / failure_seconds)
        except OverflowError:
            return inf

    def wall(interval: int) -> float:
        count = _saves(steps, interval)
        before = (count - 1) * stretch(interval, False) if count > 1 else 0.0
        return before + stretch(steps - (count - 1) * interval, True)

    work, best_interval = step_seconds * steps, None
    if failure_seconds is not None:
        seconds = save_seconds if overlapped else optimum_interval(max(save_seconds, 1e-3), failure_seconds)
        best_interval = max(1, min(steps, (ceil if overlapped else round)(min(seconds / step_seconds, steps))))
    interval = save_interval if save_interval is not None else best_interval
    total_seconds = work if interval is None else wall(interval)
    return TrainingTime(
        steps=steps,
        days=total_seconds / DAY,
        effective=work / total_seconds,
        save_interval=interval,
        saves=_saves(steps, interval) if interval is not None else 0,
        save_every=best_interval * step_seconds if best_interval is not None else None,
        save_every_steps=best_interval,
        save_every_days=wall(best_interval) / DAY if best_interval is not None else None,
    )


def _saves(steps: int, interval: int) -> int:
    """The number of saves: every `interval` steps and after the last step.

    >>> _saves(10, 5), _saves(10, 4), _saves(10, 99)
    (2, 3, 1)
    """
    return -(-steps // interval)


def optimum_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the optimal time of work between two saves, in seconds, computed with Daly's equation 37. The first term
    of this equation is Young's sqrt(2 d M).

    >>> round(optimum_interval(60.0, 36000.0))
    2039
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    return sqrt(2 * save_seconds * failure_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds
