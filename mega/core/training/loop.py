"""The loop of every training run: a step, then what is due. Written once, for every family, layout and task.

for each step:   report = train_step(...)                 device values, read while the next step runs
                 due: audit, validate, save, stop         all ranks agree on each, so none waits alone
                                                          a request to stop ends a validation between its batches
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mega.core.activity import ACTIVITY
from mega.core.architecture import architecture
from mega.core.config.resolve import global_batch_at, microbatches, text_lengths
from mega.core.device import Reading, Timestamp
from mega.core.training.evaluation import Evaluation
from mega.core.training.guards.finite import DIVERGED, broken_tensors, check_tied
from mega.core.training.kinds.task import Task
from mega.core.training.metrics.meters import Meters
from mega.core.training.routines import Routine
from mega.core.training.saves.proving import LIMIT
from mega.core.training.saves.saver import Saver
from mega.core.training.schedules import Schedules
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.stop import StopFlag, StopSignal

STUCK = 20
"""Steps in a row without an update, after which a run that cannot lower its loss scale ends."""


@dataclass(frozen=True)
class Pending:
    """A step whose numbers have not been read yet."""

    step: int
    consumed: int
    lr: float
    samples: int
    begun: Timestamp
    numbers: Reading
    flag: StopFlag


@dataclass
class Training:
    """One rank's run, from where it starts to its end. steps: the last one. meters: on rank 0. report: prints a line,
    on rank 0."""

    state: TrainState
    task: Task
    schedules: Schedules
    steps: int
    evaluation: Evaluation
    routines: Sequence[Routine]
    stop: StopSignal
    saver: Saver | None
    meters: Meters | None
    report: Callable[[str], None]
    _stuck: int = 0
    """Steps in a row that were skipped although the loss scale could not become less."""
    _limit: float | None = None
    """The loss from which on a rise is reported."""

    def play(self) -> int:
        """Train to the last step, then validate and test; always close what reports.

        The exit code: 0, or 128 + the signal that ended it early. Errors: what stopped one rank, when all
        have saved.
        """
        train = not self.state.run.evaluation.skip_train  # else the state is only judged
        try:
            if train:
                with ACTIVITY.during("compiling"):  # what the first step needs
                    self._train()
                ACTIVITY.phase = "ending"
                self._check_applied()
            if not self.stop.requested and (self._at_end or not train):  # not where --exit-interval ended it
                self._foresee("cutting the last validation short", ending=True)
                if self.evaluation.last_validated != self.state.progress.step:
                    self.evaluation.validate()
                self.evaluation.test()
            self.state.grads.wait_param_gather()
        finally:
            self.state.pipeline.close()
            self.stop.close()
            if self.meters is not None:
                self.meters.close()
        self.stop.raise_fault()
        return self.stop.code

    def _foresee(self, doing: str, *, ending: bool = False) -> None:
        """What one who asks the run to stop is told from here on."""
        outlook, kept = self.stop.outlook, 0 if self.saver is None else self.saver.kept
        outlook.doing, outlook.step, outlook.kept, outlook.ending = doing, self.state.progress.step, kept, ending

    def _train(self) -> None:
        """All steps; where the run blows up, what it saved shortly before is suspect. Errors: FloatingPointError."""
        try:
            self._steps()
        except FloatingPointError as error:
            if self.saver is not None:
                self.saver.diverged(str(error).split(". ")[0])
            raise

    def _steps(self) -> None:
        """Every step and what is due after it, to the last or a request to stop; then a checkpoint of where we are."""
        progress, pending, interval = self.state.progress, None, self.state.run.runtime.exit_interval
        while progress.step < self.steps:
            current = self._step(pending)
            self._read(pending)
            pending = current
            if pending.flag.cheap:  # the run ends with the step in which it was asked to, not with the next one
                pending.flag.read()
            self._foresee(f"finishing what follows step {progress.step}")
            due = [routine for routine in self.routines if routine.due(progress.step)]
            for routine in itertools.takewhile(lambda routine: not routine.needs_numbers, due):
                routine.run()  # an audit names the rank that drifted before the loss that follows ends the run
            if self._must_read or any(routine.needs_numbers for routine in due):
                self._read(pending)
                pending = None
            for routine in itertools.dropwhile(lambda routine: not routine.needs_numbers, due):
                routine.run()
            if any(routine.needs_numbers for routine in due):
                self.stop.poll().read()
            if self.stop.requested or (interval and progress.step % interval == 0):
                break
        self._read(pending)
        if self.stop.requested:
            self.stop.settle()
        if self.saver is not None:
            self._foresee(f"saving step {progress.step}", ending=True)
            self._save_last(self.saver)
        if self.stop.requested:
            self.stop.settle()  # of a signal that reached this rank after another one, while it saved
            self.report(f"stopped at step {progress.step}: {self.stop.reason}")

    def _save_last(self, saver: Saver) -> None:
        """Errors: as `Saver.finish`, and what made the run stop before."""
        try:
            saver.finish(clean=self._at_end and self.state.progress.skipped < self.state.progress.step)
        except OSError as error:
            if self.stop.fault is None:
                raise
            raise type(error)(f"{error}, after {self.stop.fault}") from None

    @property
    def _at_end(self) -> bool:
        """Whether the run has come to its last step."""
        return self.state.progress.step >= self.steps

    @property
    def _must_read(self) -> bool:
        """With a loss scale the next learning rate depends on whether this step was skipped."""
        return self._at_end or self.stop.requested or self.state.scaler is not None

    def _step(self, before: Pending | None) -> Pending:
        """Start one step; its numbers are read later. One that is started while the one before runs begins with that
        one's end."""
        run, progress, device = self.state.run, self.state.progress, self.state.device
        # A GPU is given steps before those that it was given have ended.
        self._foresee(
            "finishing the steps that have begun" if device.is_cuda else f"finishing step {progress.step + 1}"
        )
        begun = Timestamp(device.torch) if before is None else before.numbers.moment
        size = global_batch_at(run.batch, progress.consumed)
        scheduled = progress.consumed - progress.skipped_samples
        lr, decay = self.schedules.lr(scheduled), self.schedules.weight_decay(scheduled)
        assert self.task.train is not None
        batches = self.task.train.take(progress.consumed, microbatches(run, self.state.mesh.world, size))
        ACTIVITY.step, ACTIVITY.moves = progress.step + 1, ACTIVITY.moves + 1
        report = train_step(self.state, [batch.to(device.torch) for batch in batches], lr, decay)
        ACTIVITY.phase = "training"
        progress.step += 1
        progress.consumed += size
        return Pending(progress.step, progress.consumed, lr, size, begun, report.start_reading(), self.stop.poll())

    def _read(self, pending: Pending | None) -> None:
        """Wait for a step's numbers; report them; learn whether any rank was asked to stop."""
        if pending is None:
            return
        progress, numbers = self.state.progress, pending.numbers.numbers()
        loss, norm = numbers["loss"], numbers["grad_norm"]
        applied, tied = bool(numbers.pop("finite")), (int(numbers.pop("tied", 0)), int(numbers.pop("tied_hash", 0)))
        if not applied:
            check_tied(self.state, pending.step, *tied)
            progress.skipped += 1
            # Without a loss scale the next step has been started by now: a step that the schedule did not count would
            # be left out one step earlier where this one is read at once, as before a save.
            if self.state.scaler is not None:
                progress.skipped_samples += pending.samples
        if not math.isfinite(loss):
            self._end_without_loss(pending.step, loss, norm)
        self._check_stuck(pending.step, applied)
        self._check_rise(pending, loss)
        if self.saver is not None:
            self.saver.saw(pending.step, loss, applied)
        pending.flag.read()
        if self.meters is not None:
            row = {
                "consumed": pending.consumed,
                "lr": pending.lr,
                "batch": pending.samples,
                "skipped": progress.skipped,
                **numbers,
                "seconds": pending.begun.seconds_to(pending.numbers.moment),
            }
            memory = self.state.device.memory_peak() or self.state.device.resident()
            tokens = pending.samples * sum(text_lengths(self.state.run))
            self.meters.step(pending.step, row, tokens, memory)

    def _end_without_loss(self, step: int, loss: float, norm: float) -> NoReturn:
        """Errors: FloatingPointError, which says whether a weight or a moment is the reason."""
        state = self.state
        found = broken_tensors(state)
        numbers = f"step {step}: the loss is {loss}, and the gradient norm {norm}"
        if found is None:
            raise FloatingPointError(f"{numbers}, of weights and moments that are all finite: {DIVERGED}")
        raise FloatingPointError(f"{numbers}: {found}: its memory was damaged, or {DIVERGED}")

    def _check_rise(self, pending: Pending, loss: float) -> None:
        """Report once where the loss is far above that of guessing and of the first step, as proving.py limits it."""
        if self._limit is None:
            self._limit = LIMIT * max(math.log(max(architecture(self.state.run.model).input.vocab, 2)), loss)
        elif loss > self._limit:
            self.report(
                f"step {pending.step}: the loss is {loss:.4g}, more than {LIMIT:g} times that of guessing or of the "
                f"first step: training diverges; lower --lr (now {pending.lr:.3g}), or give a longer warm-up or "
                "--clip-grad"
            )
            self._limit = math.inf

    def _check_stuck(self, step: int, applied: bool) -> None:
        """A loss scale that can still become less is looking for its value. Errors: FloatingPointError where it cannot,
        or there is none, and STUCK steps in a row were skipped: none will be applied any more.
        """
        scaler = self.state.scaler
        self._stuck = 0 if applied or (scaler is not None and not scaler.at_least) else self._stuck + 1
        if self._stuck == STUCK:
            held = "" if scaler is None else f" at a loss scale of {float(scaler.scale):g}, which cannot become less"
            raise FloatingPointError(
                f"step {step}: the gradients of {STUCK} steps in a row are not finite{held}: no step is applied any "
                "more. Resume from an earlier checkpoint with a lower --lr, a longer warm-up or --dtype bf16"
            )

    def _check_applied(self) -> None:
        """Errors: FloatingPointError where a run has come to its end, and not one step was applied."""
        progress, scaler = self.state.progress, self.state.scaler
        if self._at_end and 0 < progress.step <= progress.skipped:
            held = "" if scaler is None else f"; the loss scale is now {float(scaler.scale):g}"
            raise FloatingPointError(
                f"step {progress.step}: nothing was trained: every step was skipped, as its gradients were not "
                f"finite{held}. Give a lower --initial-loss-scale, more steps, or --dtype bf16"
            )
