"""The schedules of a run, stored as numbers in its checkpoints, and the choice of schedule when a run resumes.

A run that resumes must have the checkpoint's schedule, or explicitly choose the schedule of the checkpoint or of the
flags. Otherwise a forgotten flag could change the learning rate unnoticed and ruin the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.resolve import global_batch_at, lengths
from mega.core.config.run import RunConfig, entries, flag_of, value_of
from mega.core.optim.schedule import LearningRate, WeightDecay
from mega.core.training.state import Progress
from mega.core.untrusted import Json, below

Part = TypeVar("Part", LearningRate, WeightDecay)

_LABELS = {
    "lr.peak": "--lr",
    "lr.least": "--min-lr",
    "lr.warmup": "learning rate warm-up in samples",
    "lr.decay": "learning rate decay in samples",
    "lr.style": "--lr-decay",
    "lr.initial": "--lr-warmup-init",
    "lr.batch": "batch of a --lr-warmup-style log",
    "lr.anneal": "learning rate annealing in samples",
    "lr.anneal_style": "--lr-wsd-decay-style",
    "weight_decay.start": "--start-weight-decay",
    "weight_decay.end": "--weight-decay",
    "weight_decay.total": "weight decay's length in samples",
    "weight_decay.style": "--weight-decay-style",
}
"""Value of a saved schedule -> the flag that sets the value, or a name for messages if several flags set it."""


@dataclass(frozen=True)
class Schedules:
    """Learning rate and weight decay as functions of the number of samples consumed, without samples of skipped
    steps."""

    lr: LearningRate
    weight_decay: WeightDecay

    @classmethod
    def of(cls, run: RunConfig) -> Schedules:
        """Return the schedules of a resolved run."""
        options, schedule, length = run.optimizer, run.schedule, lengths(run)
        return cls(
            LearningRate(
                peak=options.lr or 0.0,
                least=schedule.min_lr,
                warmup=length.warmup_samples,
                decay=length.decay_samples,
                style=schedule.lr_decay,
                initial=schedule.lr_warmup_init,
                batch=run.batch.global_batch if schedule.lr_warmup_style == "log" else None,
                anneal=length.anneal_samples,
                anneal_style=schedule.lr_wsd_decay_style,
            ),
            WeightDecay(
                start=schedule.start_weight_decay,
                end=schedule.end_weight_decay,
                total=length.samples,
                style=schedule.weight_decay_style,
            ),
        )

    def state_dict(self) -> dict[str, dict[str, Json]]:
        """Return the schedules as plain values for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: object, source: str) -> Schedules:
        """Return the schedules that `state_dict` returned as `state`. Errors: CheckpointError naming `source`."""
        try:
            loaded = cls(_stored(LearningRate, below(state, "lr")), _stored(WeightDecay, below(state, "weight_decay")))
            # Untrusted numbers may overflow or divide by 0, so evaluate the ends of all pieces of the curve.
            for samples in (0, loaded.lr.warmup, loaded.lr.warmup + 1, loaded.lr.decay):
                loaded.lr(samples)
            return loaded
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{source}: its schedule is not one that this version knows ({error})") from None

    def differences(self, other: Schedules) -> Iterator[tuple[str, object, object]]:
        """Yield (flag, value in these schedules, value in `other`) for every value that has an effect and differs."""
        values, other_values = _effective(self), _effective(other)
        for name in sorted(values.keys() & other_values.keys()):  # the styles imply the other values
            if values[name] != other_values[name]:
                yield _LABELS[name], values[name], other_values[name]


def _number(value: Json) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _stored(kind: Callable[..., Part], fields: Mapping[str, Json]) -> Part:
    """Build one component of the schedules from stored values. Errors: TypeError; ValueError naming an invalid
    value."""
    for name, value in fields.items():
        if name == "style":
            fits = value in entries()["lr_decay" if kind is LearningRate else "weight_decay_style"].choices
        elif name == "anneal_style":
            fits = value in entries()["lr_wsd_decay_style"].choices
        elif name in ("warmup", "decay", "total", "anneal"):
            fits = type(value) is int and value >= 0
        else:
            fits = (name == "batch" and value is None) or (_number(value) and abs(value) < 1e30)
        if not fits:
            raise ValueError(f"{name}: {str(value)[:40]}")
    return kind(**fields)


def _effective(schedules: Schedules) -> dict[str, object]:
    """Return a map from names to the values of the schedules, without values that the styles ignore."""
    values = {f"{kind}.{name}": value for kind, part in schedules.state_dict().items() for name, value in part.items()}
    ignored = {"lr.decay", "lr.least"} if schedules.lr.style == "constant" else set()
    ignored |= {"lr.anneal", "lr.anneal_style"} if schedules.lr.style != "wsd" else set()
    if schedules.weight_decay.style == "constant":
        ignored |= {"weight_decay.start", "weight_decay.total"}
    return {name: value for name, value in values.items() if name not in ignored}


def check_end(run: RunConfig, rate: LearningRate, progress: Progress, steps: int) -> str | None:
    """Return a message about the remaining steps that begin after the learning rate has decayed to its final value.
    Return None if no step remains after that, or if flags of this run set a final rate above 0.

    steps: index of the last step. Errors: ValueError if no remaining step has a learning rate above 0.
    """
    stored, batch, step = run.checkpoint.use_checkpoint_schedule, run.batch, progress.step
    begin = samples = progress.consumed - progress.skipped_samples
    at_most = begin + (steps - 1 - step) * batch.global_batch  # consumed before the last step; less in a ramp-up
    if step >= steps or (rate.least and not stored) or not rate.has_ended(at_most):
        return None
    while step < steps and not rate.has_ended(samples):
        size = global_batch_at(batch, samples + progress.skipped_samples)
        step, samples = step + 1, samples + size
    unit = "steps" if batch.samples is None else "samples"
    typed = next(name for name in (f"lr_decay_{unit}", unit) if value_of(run, name) is not None)
    flag = "--use-checkpoint-schedule" if stored else f"{flag_of(typed)} {value_of(run, typed)}"
    if samples == begin and not rate.least:
        raise ValueError(
            f"{flag}: the learning rate has decayed to 0 by sample {rate.decay:,}, and the run is at sample {begin:,}, "
            f"so no step would change the weights; give --override-schedule and a --lr-decay-{unit} that ends later, "
            "or a --min-lr above 0"
        )
    if step == steps:
        return None
    which = f"step {steps:,} trains" if step + 1 == steps else f"steps {step + 1:,} to {steps:,} train"
    return f"{flag}: the learning rate has decayed by sample {rate.decay:,}, so {which} at {rate.least:g} (--min-lr)"


def resumed_schedules(run: RunConfig, meta: Mapping[str, Json], source: str) -> Schedules:
    """Return the schedules of a run that resumes from the checkpoint `source` with the metadata `meta`.

    Errors: CheckpointError naming each flag that differs, unless the run chooses a schedule.
    """
    requested, state = Schedules.of(run), meta.get("schedule")
    if state is None or run.checkpoint.override_schedule:  # imported weights have no schedule
        return requested
    stored = Schedules.from_state_dict(state, source)
    if run.checkpoint.use_checkpoint_schedule:
        return stored
    lines = [
        f"{flag} {value}: the checkpoint {source} has {stored_value}; must be the same, or choose which counts with "
        "--override-schedule or --use-checkpoint-schedule"
        for flag, value, stored_value in requested.differences(stored)
    ]
    if lines:
        raise CheckpointError("\n".join(lines))
    return requested
