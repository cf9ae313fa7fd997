"""How long a whole training takes, failures included, and how often it should be saved."""

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
class Stops:
    """What keeps a run from training. mtbf_hours: between failures of the whole machine, None for never.

    save_seconds: how long a save takes. restart_seconds: from a failure to the next step: noticing it, new processes,
    reading a checkpoint.
    """

    mtbf_hours: float | None = None
    save_seconds: float = 30.0
    restart_seconds: float = 600.0


@dataclass(frozen=True)
class TrainingTime:
    """days: from the first step to the last. effective: share of it that is neither saved, lost nor repeated.

    save_interval: steps between the checkpoints of that time, None without any; saves: how many. save_every: seconds
    between checkpoints that waste least, save_every_steps: the same in steps, save_every_days: how long the training
    then takes; None where nothing fails.
    """

    steps: int
    days: float
    effective: float
    save_interval: int | None
    saves: int
    save_every: float | None
    save_every_steps: int | None
    save_every_days: float | None


def training(run: RunConfig, world: int, device: Hardware, stops: Stops) -> TrainingTime | None:
    """How long the whole training takes, where its length is given. Errors: ValueError where it would never end.

    Saves are those of --save-interval; where nothing is said and the machine fails, those that waste least.
    """
    steps, interval = lengths(run).steps, run.checkpoint.save_interval
    if not steps:
        return None
    whole = training_time(
        step_time(run, world, device).seconds * _whole_steps(run, world, device) / steps,
        steps,
        save_interval=interval,
        save_seconds=stops.save_seconds,
        overlapped=run.checkpoint.async_save,
        restart_seconds=stops.restart_seconds,
        failure_seconds=stops.mtbf_hours * 3600 if stops.mtbf_hours is not None else None,
    )
    if whole.days == inf:
        typed = f"--save-interval {interval}, " if interval is not None else ""
        raise ValueError(
            f"--mtbf {stops.mtbf_hours:g}: with {typed}--save-seconds {stops.save_seconds:g} and --restart-seconds "
            f"{stops.restart_seconds:g} such a training never ends; valid: more hours, shorter saves or restarts"
            + (f", or --save-interval {whole.save_every_steps}" if typed and whole.save_every_days != inf else "")
        )
    return whole


def _whole_steps(run: RunConfig, world: int, device: Hardware) -> float:
    """The training's length in steps of the whole batch: those of a ramp-up are shorter."""

    def rough(size: int) -> float:
        return step_time(variant(run, {"global_batch": size}), world, device, play=False).seconds

    rising = Counter(rising_steps(run.batch))
    whole = rough(run.batch.global_batch)
    return lengths(run).steps - sum(count * (1 - rough(size) / whole) for size, count in rising.items())


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
    """`steps` of `step_seconds`, saved every `save_interval` steps and after the last, against a mean time between
    failures; without an interval saved by Young's and Daly's.

    save_seconds: how long one save takes, and stops the training unless it is `overlapped`. restart_seconds: from a
    failure to the next step. failure_seconds: mean time between failures of the whole machine, not of one device; None
    for never.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps". The wall time is
    his equation 20: M exp(R/M) (exp((t+d)/M) - 1) T/t for interval t, save d, restart R, failures M, work T, the last
    interval as short as it is; infinite where that is more than a float holds.

    >>> plan = training_time(30.0, 95000, save_seconds=60, restart_seconds=600, failure_seconds=10 * 3600)
    >>> round(plan.days, 1), round(plan.effective, 3), plan.save_every_steps, round(plan.save_every / 60)
    (35.6, 0.928, 68, 34)
    >>> training_time(4.0, 21600, save_interval=100, save_seconds=400).days
    2.0
    """
    # An overlapped save costs the steps nothing, as we assume, until the next is due: that one waits for its end. What
    # is trained meanwhile is lost with a failure, for the checkpoint is not there yet.
    restart = restart_seconds + (save_seconds if overlapped else 0.0)

    def stretch(trained: int, last: bool) -> float:
        """Seconds of so many steps and the save after them; the run waits for its last."""
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

    work, best = step_seconds * steps, None
    if failure_seconds is not None:
        seconds = save_seconds if overlapped else optimum_interval(max(save_seconds, 1e-3), failure_seconds)
        best = max(1, min(steps, (ceil if overlapped else round)(min(seconds / step_seconds, steps))))
    interval = save_interval if save_interval is not None else best
    taken = work if interval is None else wall(interval)
    return TrainingTime(
        steps=steps,
        days=taken / DAY,
        effective=work / taken,
        save_interval=interval,
        saves=_saves(steps, interval) if interval is not None else 0,
        save_every=best * step_seconds if best is not None else None,
        save_every_steps=best,
        save_every_days=wall(best) / DAY if best is not None else None,
    )


def _saves(steps: int, interval: int) -> int:
    """Every `interval` steps and after the last.

    >>> _saves(10, 5), _saves(10, 4), _saves(10, 99)
    (2, 3, 1)
    """
    return -(-steps // interval)


def optimum_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between two saves: Daly's equation 37, whose first term is Young's sqrt(2 d M).

    >>> round(optimum_interval(60.0, 36000.0))
    2039
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    return sqrt(2 * save_seconds * failure_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds
