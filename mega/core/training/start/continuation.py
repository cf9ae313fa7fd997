"""Check a run against the checkpoint from which it starts, and describe the differences. Used by every rank before the
first step, and by a dry run, which reads no tensors and has no ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mega.core.activity import ACTIVITY
from mega.core.checkpoint.own.together import JsonExchange, alone
from mega.core.config.resolve import last_step
from mega.core.config.run import RunConfig
from mega.core.data.dataset import Dataset
from mega.core.parallel.mesh import Mesh
from mega.core.training.kinds.pretraining import datasets, former_blends
from mega.core.training.saves.place import check_no_newer
from mega.core.training.saves.resume import ResumePoint, differences, new_tensors, overlap_difference
from mega.core.training.schedules import Schedules, check_end, resumed_schedules
from mega.core.training.start.inputs import Inputs
from mega.core.training.start.untrained import untrained_tokens
from mega.core.training.state import Progress
from mega.core.untrusted import below

MOST_NAMES = 8
"""Maximum number of tensors that a message lists."""


def with_former_blends(inputs: Inputs, point: ResumePoint | None, report: Callable[[str], None]) -> Inputs:
    """If the blend of corpora has changed since the checkpoint, reopen the datasets so that each corpus continues at
    its position. Errors: ValueError."""
    run = inputs.run
    if point is None or point.weights_only or run.finetuning.task != "lm" or inputs.datasets.train is None:
        return inputs
    phases = former_blends(run, point.checkpoint.meta)
    if not phases or run.data.mock_data or run.data.chat_data:
        return inputs
    if run.data.retro is not None:
        raise ValueError("--data-path: is another blend than the run's so far, which --retro excludes")
    if phases[-1].until == below(point.checkpoint.meta, "progress")["consumed"]:
        report(f"the blend changes at sample {phases[-1].until:,}; each corpus continues where it was")
    with ACTIVITY.during("building caches"):
        return dataclasses.replace(inputs, datasets=datasets(run, inputs.tokenizer, phases))


def planned(
    inputs: Inputs,
    point: ResumePoint | None,
    progress: Progress,
    report: Callable[[str], None],
    exchange: JsonExchange = alone,
) -> tuple[int, Schedules]:
    """Return the index of the last step, and the schedules, of a run that starts with `progress`.

    Errors: ValueError if --save contains a different training history, the data are too short, the schedule is not that
    of the checkpoint, or no step would change the weights.
    """
    run, trains = inputs.run, not inputs.run.evaluation.skip_train
    steps = last_step(run, progress.step, progress.consumed)
    if trains:
        check_no_newer(run, progress.step, exchange)
        _check_length(run, inputs.datasets.train, progress, steps)
    schedules = _schedules(run, point)
    if trains and (line := check_end(run, schedules.lr, progress, steps)):
        report(line)
    return steps, schedules


def differing(
    inputs: Inputs,
    point: ResumePoint | None,
    mesh: Mesh,
    threads: int | None,
    gpu: bool | None,
    overlaps: bool,
    step: int,
) -> Iterator[str]:
    """Yield messages about the checkpoint from which a run starts, and about differences from that checkpoint. threads,
    gpu: as in `differences`. overlaps: `TrainState.overlaps`. step: the step of the checkpoint."""
    if point is None:
        return
    run = inputs.run
    if point.weights_only:
        yield f"weights from {point.checkpoint.path}; the optimizer and the steps begin afresh"
    else:
        yield f"resuming from {point.checkpoint.path} at step {step}"
    if new := new_tensors(run, point):
        names = ", ".join(new if len(new) <= MOST_NAMES else [*new[:3], f"and {len(new) - 3} more"])
        yield f"not in the checkpoint, begin at their initial values: {names}"
    if not point.weights_only:
        yield from differences(run, point, inputs.datasets, mesh, threads, gpu)
        if difference := overlap_difference(run, point, overlaps):
            yield difference
    if mesh.rank == 0 and (words := untrained_tokens(run, inputs.tokenizer, point.base or point.checkpoint)):
        yield words


def nothing_left(steps: int) -> str:
    """Return the message of a run that has already completed its last step."""
    return f"nothing is left to train: the run ends with step {steps}"


def _schedules(run: RunConfig, point: ResumePoint | None) -> Schedules:
    if point is None or point.weights_only or not run.checkpoint.load_optim:
        return Schedules.of(run)
    return resumed_schedules(run, point.checkpoint.meta, str(point.checkpoint.path))


def _check_length(run: RunConfig, dataset: Dataset | None, progress: Progress, steps: int) -> None:
    """Check that the data suffice up to the last step, if the batch size has changed since the checkpoint. Errors:
    ValueError."""
    batch = run.batch
    if dataset is None or run.data.order == "cyclic" or batch.samples is not None or not progress.consumed:
        return
    end = progress.consumed + (steps - progress.step) * batch.global_batch
    if end > len(dataset) and progress.step < steps:
        raise ValueError(
            f"--global-batch {batch.global_batch}: the checkpoint has consumed {progress.consumed} samples in "
            f"{progress.step} steps, so --steps {steps} ends with sample {end}, but the data were laid out "
            f"for {len(dataset)}; give --samples {end} instead of --steps"
        )
