"""The training loop, for every model family, layout and task. Each step is followed by the routines that are due.

for each step:   report = train_step(...)                 device values, read while the next step runs
                 due: routines.py, then stop              all ranks agree on each routine, so no rank waits alone
                                                          a request to stop ends a validation between its batches
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mega.core.activity import ACTIVITY
from mega.core.config.resolve import global_batch_at, microbatches, text_lengths
from mega.core.device import HostArray, Timestamp
from mega.core.training.evaluation import Evaluation
from mega.core.training.guards.finite import NotFiniteError
from mega.core.training.guards.stragglers import StepClock, Stragglers
from mega.core.training.judge import Judge, Pending
from mega.core.training.kinds.task import Task
from mega.core.training.metrics.meters import Meters
from mega.core.training.metrics.profiling import StepProfiler
from mega.core.training.routines import Routine
from mega.core.training.saves.saver import Saver
from mega.core.training.schedules import Schedules
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.stop import StopSignal


@dataclass
class Training:
    """A run on one rank, from the first step to the end."""

    state: TrainState
    task: Task
    schedules: Schedules
    steps: int
    """Index of the last step."""
    evaluation: Evaluation
    routines: Sequence[Routine]
    stop: StopSignal
    saver: Saver | None
    meters: Meters | None
    """The meters on rank 0; None on other ranks."""
    report: Callable[[str], None]
    """Function that prints a message on rank 0."""
    judge: Judge
    clock: StepClock
    stragglers: Stragglers | None = None
    """The detector of slow ranks on rank 0; None on other ranks."""
    profiler: StepProfiler | None = None
    """The profiler on a rank that is profiled; None on other ranks."""
    last: dict[str, float] = field(default_factory=dict)
    """The most recent step results that the host has read."""

    def play(self) -> int:
        """Train to the last step, then validate and test. All reporters are closed, even after an error.

        Returns the exit code: 0, or 128 + the signal that ended the run early. Errors: the fault of this or another
        rank, raised after all ranks have saved.
        """
        train = not self.state.run.evaluation.skip_train  # if false, only evaluate
        try:
            if train:
                with ACTIVITY.during("compiling"):  # the first step compiles
                    self._train()
                ACTIVITY.phase = "ending"
                self._check_applied()
            if not self.stop.requested and (self._at_end or not train):  # false if --exit-interval ended the run
                self._announce("cutting the last validation short", ending=True)
                if self.evaluation.last_validated != self.state.progress.step:
                    self.evaluation.validate()
                self.evaluation.test()
            self.state.grads.wait_param_gather()
        finally:
            if self.profiler is not None:
                self.profiler.close()
            self.state.pipeline.close()
            self.stop.close()
            if self.meters is not None:
                self.meters.close()
        self.stop.raise_fault()
        return self.stop.code

    def _announce(self, doing: str, *, ending: bool = False) -> None:
        """Update the message that is shown when the run is asked to stop. doing: the remaining work before the run
        stops."""
        outlook, saved_step = self.stop.outlook, 0 if self.saver is None else self.saver.saved_step
        outlook.doing, outlook.step, outlook.saved_step, outlook.ending = (
            doing,
            self.state.progress.step,
            saved_step,
            ending,
        )

    def _train(self) -> None:
        """Run all steps. If the run diverges, mark its newest saves as suspect, and raise FloatingPointError."""
        try:
            self._steps()
        except FloatingPointError as error:
            if self.saver is not None:
                self.saver.diverged(str(error).split(". ")[0])
            raise

    def _steps(self) -> None:
        """Run steps and the routines that are due, until the last step or a request to stop; then save the state."""
        progress, pending, interval = self.state.progress, None, self.state.run.runtime.exit_interval
        while progress.step < self.steps:
            current = self._step(pending)
            self._read(pending)
            pending = current
            if pending.flag.cheap:  # read now, so that the run ends after this step, not after the next one
                pending.flag.read()
            self._announce(f"finishing what follows step {progress.step}")
            due = [routine for routine in self.routines if routine.due(progress.step)]
            for routine in itertools.takewhile(lambda routine: not routine.needs_numbers, due):
                routine.run()  # an audit must name a corrupted rank before the resulting loss ends the run
            if self._must_read or any(routine.needs_numbers for routine in due):
                self._read(pending)
                pending = None
            for routine in itertools.dropwhile(lambda routine: not routine.needs_numbers, due):
                self._healed(routine.run)
            if any(routine.needs_numbers for routine in due):
                self.stop.poll().read()
            if self.stop.requested or (interval and progress.step % interval == 0):
                break
        self._read(pending)
        if self.stop.requested:
            self.stop.settle()
        if self.saver is not None:
            self._announce(f"saving step {progress.step}", ending=True)
            self._save_last(self.saver)
        if self.stop.requested:
            self.stop.settle()  # a signal may have reached this rank while it saved because of another rank's signal
            self.report(f"stopped at step {progress.step}: {self.stop.reason}")
        elif interval and progress.step % interval == 0 and not self._at_end:
            self.report(f"stopped at step {progress.step}: a multiple of --exit-interval {interval}")

    def _healed(self, keep: Callable[[], None]) -> None:
        """Call `keep`, which saves or copies the state; if the state is not finite, roll back and call `keep` again.
        Errors: FloatingPointError if the policy does not allow a rollback."""
        try:
            keep()
        except NotFiniteError as error:
            self.judge.heal(error)
            keep()

    def _save_last(self, saver: Saver) -> None:
        """Save the final state. Errors: those of `Saver.finish`; the message includes an earlier fault that stopped the
        run."""
        try:
            clean = self._at_end and self.state.progress.skipped < self.state.progress.step
            self._healed(lambda: saver.finish(clean=clean))
        except OSError as error:
            if self.stop.fault is None:
                raise
            raise type(error)(f"{error}, after {self.stop.fault}") from None

    @property
    def _at_end(self) -> bool:
        """Whether the run has reached its last step."""
        return self.state.progress.step >= self.steps

    @property
    def _must_read(self) -> bool:
        """Whether the results of a step must be read before the next step starts. With a loss scale or a guard, the
        next learning rate depends on whether the step was skipped. On a CPU the step is already complete, and its
        gradients still exist."""
        depends = self.judge.guard.decides or self.state.scaler is not None
        return self._at_end or self.stop.requested or depends or not self.state.device.is_cuda

    def _step(self, before: Pending | None) -> Pending:
        """Start one step without waiting for its results. before: the previous step, if it is still running; this
        step's time then begins at the end of the previous step."""
        run, progress, device = self.state.run, self.state.progress, self.state.device
        # On a GPU, steps are queued before earlier steps have ended.
        self._announce(
            "finishing the steps that have begun" if device.is_cuda else f"finishing step {progress.step + 1}"
        )
        start = Timestamp(device.torch) if before is None else before.numbers.moment
        self.clock.begin()
        size = global_batch_at(run.batch, progress.consumed)
        scheduled = progress.consumed - progress.skipped_samples
        lr, decay = self.schedules.lr(scheduled), self.schedules.weight_decay(scheduled)
        assert self.task.train is not None
        batches = self.task.train.take(progress.consumed, microbatches(run, self.state.mesh.world, size))
        ACTIVITY.step, ACTIVITY.moves = progress.step + 1, ACTIVITY.moves + 1
        if self.profiler is not None:
            self.profiler.before_step(progress.step + 1)
        if self.state.injector is not None:
            batches = self.state.injector.before_step(progress.step + 1, batches)
        batches, limits = [batch.to(device.torch) for batch in batches], self.judge.guard.limits()
        report = train_step(self.state, batches, lr, decay, self.judge.guard.applied(limits))
        ACTIVITY.phase = "training"
        progress.step += 1
        progress.consumed += size
        numbers, sums = report.start_reading(), None if report.sums is None else HostArray(report.sums)
        flag = self.stop.poll(self.clock.seconds())
        return Pending(progress.step, progress.consumed, lr, size, start, numbers, flag, limits, batches, sums)

    def _read(self, pending: Pending | None) -> None:
        """Wait for the results of a step, check and report them, and read whether any rank has a request to stop."""
        if pending is None:
            return
        progress, numbers = self.state.progress, pending.numbers.numbers()
        self.last = numbers
        self.judge.judge(pending, numbers, has_gradients=not self.state.device.is_cuda or self._must_read)
        pending.flag.read()
        self._find_stragglers(pending.step)
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
        if self.profiler is not None:
            self.profiler.after_step(pending.step)

    def _find_stragglers(self, step: int) -> None:
        """On rank 0, periodically report the ranks for which other ranks wait."""
        if self.stragglers is None or self.meters is None:
            return
        for rank, ratio, words in self.stragglers.observe(step, self.stop.seconds):
            self.report(words)
            self.meters.event(step, "slow rank", rank=rank, ratio=round(ratio, 3))
        self.meters.slowest = self.stragglers.slowest

    def _check_applied(self) -> None:
        """Check at the end of a run that at least one step was applied. Errors: FloatingPointError if none was
        applied."""
        progress, scaler = self.state.progress, self.state.scaler
        if self._at_end and 0 < progress.step <= progress.skipped:
            scale = "" if scaler is None else f"; the loss scale is now {float(scaler.scale):g}"
            raise FloatingPointError(
                f"step {progress.step}: nothing was trained: every step was skipped, as its gradients were not "
                f"finite{scale}. Give a lower --initial-loss-scale, more steps, or --dtype bf16"
            )
