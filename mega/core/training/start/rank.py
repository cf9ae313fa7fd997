"""The start of a run on one rank: the mesh, the state, the checkpoint to resume from, the task, and the routines.

All errors about files, and about ranks with different inputs, are raised here, before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega.core.activity import ACTIVITY
from mega.core.architecture import parameters
from mega.core.checkpoint.own.together import JsonExchange, alone, together
from mega.core.config.resolve import profiled_steps
from mega.core.config.run import RunConfig
from mega.core.device import Device, restored_settings
from mega.core.flops import model_flops_per_token
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.consistency import check_consistent
from mega.core.parallel.mesh import Groups
from mega.core.processes.connect import connect, disconnect, end_together
from mega.core.processes.world import World, world_from_env
from mega.core.terminal import discard
from mega.core.training.evaluation import Evaluation
from mega.core.training.guards.inject import injector
from mega.core.training.guards.stragglers import StepClock, Stragglers
from mega.core.training.judge import Judge
from mega.core.training.kinds import kind_of
from mega.core.training.kinds.task import Task
from mega.core.training.loop import Training
from mega.core.training.metrics.meters import Meters
from mega.core.training.metrics.output import print_line, report_if_slow
from mega.core.training.metrics.profiling import StepProfiler, missed
from mega.core.training.policy import Guard
from mega.core.training.probes import Probes
from mega.core.training.routines import routines
from mega.core.training.sampling import Sampler
from mega.core.training.saves.memory import PeerCopies, peer_copies
from mega.core.training.saves.place import check_shared, lock
from mega.core.training.saves.resume import (
    ResumePoint,
    check_corpora,
    find_resume_point,
    overlapped_before,
    restore,
    sidecar_files,
)
from mega.core.training.saves.saver import Saver
from mega.core.training.schedules import Schedules
from mega.core.training.start.consistency import comparable
from mega.core.training.start.continuation import planned, with_former_blends
from mega.core.training.start.inputs import Inputs, ResolvedRun, open_inputs
from mega.core.training.start.introduce import introduce
from mega.core.training.state import TrainState
from mega.core.training.stop import StopSignal, ignore_signals
from mega.core.training.wire import build_mesh, build_state
from mega.core.words import count_words


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run, identical on all ranks."""

    step: int
    """Index of the last step."""
    numbers: Mapping[str, float]
    """The metrics of the last step: "loss", "grad_norm" and the other values of a metrics row; empty if there was no
    step."""
    evaluation: Mapping[str, Mapping[str, float]]
    """Name of each held-out set -> its most recent results, including "loss"."""
    checkpoint: str | None
    """The directory of the run's checkpoints; None if --save is not given."""
    metrics: str
    """The file with one row of metrics per step."""
    code: int = 0
    """The exit code of `mega pretrain`: 0, or 128 + the signal that ended the run early."""

    @property
    def loss(self) -> float:
        """The loss of the last step; NaN if there was no step."""
        return self.numbers.get("loss", math.nan)


@dataclass(frozen=True)
class StartedRun:
    """A run on one rank with its weights loaded, ready to train."""

    inputs: Inputs
    state: TrainState
    task: Task
    schedules: Schedules
    point: ResumePoint | None
    """The checkpoint from which the run starts; None if the weights are new."""
    saved: int
    """The step of the checkpoint from which the run starts, or 0. Copies in memory may be newer."""
    copies: PeerCopies | None
    steps: int
    """Index of the last step."""

    def saver(self, report: Callable[[str], None]) -> Saver | None:
        """Return the object that publishes checkpoints; None if --save is not given."""
        inputs, point = self.inputs, self.point
        if inputs.run.checkpoint.save is None:
            return None
        first = self.state.mesh.rank == 0
        old = sidecar_files(point.checkpoint, inputs.tokenizer) if point is not None and first else {}
        blends = [phase.as_json() for phase in inputs.datasets.phases]
        arguments = self.schedules, report, old, inputs.datasets.corpora, blends, self.saved
        return Saver(self.state, inputs.tokenizer, inputs.fingerprint(), *arguments)


def pretrain(resolved: ResolvedRun) -> int:
    """Train as one rank of the world that the environment describes, leave the process group, and return the exit code.

    Errors: those of `train`.
    """
    try:
        code = train(resolved).code
    except KeyboardInterrupt:
        ignore_signals()  # the process is ending, and a further Ctrl-C must not interrupt the exit
        raise
    end_together(world_from_env().rank, resolved.run.runtime.timeout_minutes)
    disconnect()
    return code


def train(resolved: ResolvedRun, *, quiet: bool = False) -> TrainingResult:
    """Train as one rank of the world that the environment describes. quiet: print nothing.

    Errors: ValueError for a user error; FloatingPointError if the loss is NaN or infinite; RuntimeError for other
    failures.
    """
    with contextlib.ExitStack() as resources:
        resources.enter_context(restored_settings())
        inputs, world, device, groups = open_rank(resolved, quiet=quiet)
        with ACTIVITY.during("loading"):
            training = start(
                inputs, world.rank, world.size, device, groups, resources, discard if quiet else print_line
            )
        code = training.play()
    run, step = resolved.run, training.state.progress.step
    return TrainingResult(step, training.last, training.evaluation.measured, run.checkpoint.save, run.log.metrics, code)


def open_rank(resolved: ResolvedRun, *, quiet: bool = False) -> tuple[Inputs, World, Device, Groups]:
    """Join the other ranks, and open tokenizer and data. Errors: ValueError, OSError."""
    runtime, ACTIVITY.phase = resolved.run.runtime, "starting"
    world, device, groups = connect(
        runtime.device, runtime.backend, runtime.timeout_minutes, runtime.phase_timeout_minutes
    )
    with (
        ACTIVITY.during("building caches"),
        report_if_slow("opening tokenizer and data", quiet=quiet or world.rank > 0),
    ):
        inputs = open_inputs(resolved)  # must follow `connect`, so that the roll call can report a slow rank
    if runtime.deterministic:
        device.deterministic()
    return inputs, world, device, groups


def begin(
    inputs: Inputs,
    rank: int,
    world: int,
    device: Device,
    groups: Groups,
    resources: contextlib.ExitStack,
    report: Callable[[str], None],
) -> StartedRun:
    """Build the state of one rank, restore the weights from which the run starts or resumes, and open its task.

    resources: stack that holds the lock of --save until it is closed. report: function that prints a message on rank 0.
    Errors: ValueError on every rank.
    """
    run, evaluated = inputs.run, inputs.run.evaluation
    mesh = build_mesh(run, rank, world, groups)
    check_consistent(comparable(inputs, device), mesh.everyone, device.torch, report)
    # Lock before searching for the newest checkpoint, because another process that holds the lock may be saving a
    # checkpoint.
    lock(resources, None if evaluated.skip_train else run.checkpoint.save, mesh, device.torch)
    exchange: JsonExchange = partial(gather_json, axis=mesh.everyone, device=device.torch) if world > 1 else alone
    check_shared(None if evaluated.skip_train else run.checkpoint.save, exchange, rank)
    message = (
        f"making a model of {count_words(parameters(run.model))} parameters, its gradients and its optimizer's state"
    )
    quiet = rank > 0 or report is discard
    with report_if_slow("finding the checkpoint", quiet=quiet):
        point = find_resume_point(run, report, exchange)
    with report_if_slow(message, quiet=quiet):
        state, kind = build_state(run, mesh, device, overlapped_before(run, point)), kind_of(run)
    state.guard.level = inputs.level()
    if point is not None:
        with report_if_slow("loading weights", quiet=quiet):
            together(partial(restore, state, point), exchange)  # an error on one rank is raised on all ranks
        check_corpora(run, point, inputs.datasets)
    inputs = with_former_blends(inputs, point, report)
    kind.begin(state, inputs.datasets, point)
    saved, copies = state.progress.step, peer_copies(state)
    if copies is not None and copies.restore(saved):
        report(f"resuming from the hosts' memory at step {state.progress.step}; the newest save has {saved}")
    steps, schedules = planned(inputs, point, state.progress, report, exchange)
    task = kind.task(run, inputs.datasets, inputs.tokenizer, mesh)
    return StartedRun(inputs, state, task, schedules, point, saved, copies, steps)


def start(
    inputs: Inputs,
    rank: int,
    world: int,
    device: Device,
    groups: Groups,
    resources: contextlib.ExitStack,
    lines: Callable[[str], None] = print_line,
) -> Training:
    """Build a run on one rank, ready to call `play`. resources: see `begin`. lines: function that prints log lines on
    rank 0. Errors: ValueError on every rank."""
    started = begin(inputs, rank, world, device, groups, resources, lines if rank == 0 else discard)
    run, state, steps = started.inputs.run, started.state, started.steps
    stop = _stop(state)
    resources.callback(stop.close)
    meters = _meters(run, state, steps, stop.fail, lines) if rank == 0 else None
    report = meters.report if meters is not None else discard
    saver = started.saver(report)
    on_validation = saver.record_validation if saver is not None else lambda step, loss: None
    evaluation = Evaluation(state, started.task, stop, meters, report, on_validation)
    sampler = _sampler(started.inputs, state, meters, report)
    due = routines(state, evaluation if started.task.validation else None, sampler, saver, started.copies, steps=steps)
    introduce(started.inputs, started.point, state, steps, report, started.saved)
    parts = state, started.task, started.schedules, steps, evaluation, tuple(due), stop, saver, meters, report
    return Training(*parts, *_watched(state, saver, meters, report, steps))


def _watched(
    state: TrainState, saver: Saver | None, meters: Meters | None, report: Callable[[str], None], last: int
) -> tuple[Judge, StepClock, Stragglers | None, StepProfiler | None]:
    """Return the objects that check and measure each step of a run, up to step `last`."""
    run, mesh, rank = state.run, state.mesh, state.mesh.rank
    state.probes = Probes(state.stages, state.grads, mesh, state.device.torch)
    state.injector = injector(state, run.guards.inject)
    if saver is not None and meters is not None:
        saver.on_saved = lambda step, seconds: meters.event(step, "save", seconds=round(seconds, 3))
    stragglers = Stragglers(mesh, run.guards.slow_rank) if meters is not None and mesh.world > 1 else None
    steps = None if run.log.profile is None else profiled_steps(run.log.profile)
    profiler = None
    if steps is not None and (words := missed(steps, state.progress.step + 1, last)):
        report(words)
    if steps is not None and rank in run.log.profile_ranks:
        profiler = StepProfiler(steps, rank, Path(run.log.metrics).parent, report)
    return Judge(state, Guard(run.guards, state.guard), saver, meters, report), StepClock(state), stragglers, profiler


def _stop(state: TrainState) -> StopSignal:
    run, mesh = state.run, state.mesh
    stop = StopSignal(
        mesh.everyone,
        state.device.torch,
        on_signal=run.runtime.exit_on_signal,
        minutes=run.runtime.exit_minutes,
        prints=mesh.rank == 0,
    )
    stop.outlook.place = run.checkpoint.save
    return stop


def _sampler(inputs: Inputs, state: TrainState, meters: Meters | None, report: Callable[[str], None]) -> Sampler | None:
    log = inputs.run.log
    if log.sample_interval is None:
        return None
    assert inputs.tokenizer is not None
    return Sampler(state, inputs.tokenizer, meters, report, prompts=log.sample_prompts, tokens=log.sample_tokens)


def _meters(
    run: RunConfig, state: TrainState, steps: int, fail: Callable[[OSError], None], lines: Callable[[str], None]
) -> Meters:
    """Return the meters of the run. Call this function after all checks, because it removes rows from the metrics
    file."""
    return Meters(
        run.log,
        start=state.progress.step,
        steps=steps,
        flops_per_token=model_flops_per_token(run),
        devices=state.mesh.world,
        peak=state.device.peak_tflops,
        replicas=state.mesh.dp.size,
        save=run.checkpoint.save,
        settings=dataclasses.asdict(run),
        terms=tuple(terms) if len(terms := state.stages[0].terms) > 1 else (),
        shown=state.pipeline.names[len(terms) :][:2],  # for dpo: accuracy and margin
        fail=fail,
        still_s=60 * run.runtime.timeout_minutes,
        lines=lines,
    )
