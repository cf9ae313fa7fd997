"""Check the results of a completed step, and react to NaN and spikes with a message, a skip, a rollback, or the end of
the run.

All ranks read the same reduced results, so all ranks make the same decision (policy.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mega.core.architecture import architecture
from mega.core.batch import Batch
from mega.core.device import HostArray, Reading, Timestamp
from mega.core.training.guards.finite import DIVERGED, NotFiniteError, broken_tensors, check_tied
from mega.core.training.metrics.meters import Meters
from mega.core.training.policy import LASTING, Guard, LeftOut, SpikeLimits
from mega.core.training.saves.proving import LIMIT
from mega.core.training.saves.rollback import roll_back
from mega.core.training.saves.saver import Saver
from mega.core.training.state import TrainState
from mega.core.training.stop import StopFlag

STUCK = 20
"""A run ends after this number of consecutive steps without an update, unless its loss scale can still decrease."""


@dataclass(frozen=True)
class Pending:
    """A step whose results have not been read from the device yet."""

    step: int
    consumed: int
    """Number of training samples consumed after the step."""
    lr: float
    samples: int
    """Number of samples in the step."""
    begun: Timestamp
    """Start of the step on the device."""
    numbers: Reading
    """The values of `StepReport`, by name."""
    flag: StopFlag
    """The requests to stop that were reduced during the step."""
    limits: SpikeLimits
    """The limits that applied to the step."""
    batches: Sequence[Batch]
    """This rank's microbatches, in which to search for the origin of a NaN."""
    sums: HostArray | None
    """The sums of `Probes`."""


class Judge:
    """Checks the steps of a run on one rank. meters: the meters of the run; None except on rank 0. report: function
    that prints a message on rank 0."""

    def __init__(
        self,
        state: TrainState,
        guard: Guard,
        saver: Saver | None,
        meters: Meters | None,
        report: Callable[[str], None],
    ):
        self.state, self.guard, self.saver, self.meters, self.report = state, guard, saver, meters, report
        self._stuck = 0
        """Number of consecutive skipped steps, except spikes and overflows that a lower loss scale can prevent."""
        self._limit: float | None = None
        """A loss above this limit is reported once."""

    def judge(self, pending: Pending, numbers: dict[str, float], *, has_gradients: bool) -> None:
        """Check a step, and remove the entries for internal use from `numbers`. has_gradients: whether the gradients of
        the step still exist.

        Errors: FloatingPointError if the run ends.
        """
        loss, norm, progress = numbers["loss"], numbers["grad_norm"], self.state.progress
        applied, broken = bool(numbers.pop("finite")), bool(numbers.pop("broken"))
        tied = int(numbers.pop("tied", 0)), int(numbers.pop("tied_hash", 0))
        if not applied:
            if broken:
                check_tied(self.state, pending.step, *tied)
            progress.skipped += 1
            progress.skipped_samples += pending.samples
        reason = self._reason(pending, loss, norm, broken, applied)
        if reason:
            self._act(pending, reason, loss, norm, has_gradients)
        elif applied:
            self.state.guard.add(loss, norm)
        self._check_stuck(pending.step, applied, reason)
        if math.isfinite(loss):
            self._check_rise(pending, loss)
            if self.saver is not None:
                self.saver.observe(pending.step, loss, applied)

    def _reason(self, pending: Pending, loss: float, norm: float, broken: bool, applied: bool) -> str:
        """Return the reason why a step is unsound: "nan" or "spike"; "" if the step is sound. With a dynamic loss
        scale, overflowing gradients count only if weights or moments are non-finite as well."""
        scaler = self.state.scaler
        if broken and scaler is not None and scaler.follows and self._all_finite(loss):
            return "nan" if broken_tensors(self.state) is not None else ""
        if broken or not math.isfinite(loss):
            return "nan"
        return "spike" if not applied or pending.limits.exceeded(loss, norm) else ""

    def _all_finite(self, loss: float) -> bool:
        """Whether the loss is finite on all ranks. Tensor ranks compute the loss from their own copies of the batch,
        and one copy may be damaged."""
        return all(self.state.exchange(math.isfinite(loss)))

    def _act(self, pending: Pending, reason: str, loss: float, norm: float, has_gradients: bool) -> None:
        """Apply the policy to an unsound step, in the same way on all ranks. Errors: FloatingPointError if the run
        ends."""
        policy, step, scaler = self.guard.policy(reason), pending.step, self.state.scaler
        if reason == "nan" and not self._all_finite(loss):
            loss = math.nan
        message = f"step {step}: the loss is {loss:.6g}, and the gradient norm {norm:.4g}"
        if scaler is not None and not scaler.follows:
            message += f" at --loss-scale {float(scaler.scale):g}"
        left_out = LeftOut(step, reason, pending.consumed - pending.samples, pending.consumed)
        if reason == "spike":
            usual = self.state.guard
            message += f", where {median(usual.losses):.4g} and {median(usual.norms):.4g} are usual"
            if policy == "warn":
                usual.add(loss, norm)
                self._event(left_out, policy)
                if self.guard.is_first_spike(step):
                    self.report(f"{message}: a spike (--on-spike skip leaves such a batch out)")
                return
            if policy == "skip" and usual.skip_spike():
                message += f", and {LASTING} steps in a row are spikes: from here on, what is usual is learned again"
        else:
            sums = [] if pending.sums is None else pending.sums.numpy().tolist()
            broken = broken_tensors(self.state, pending.batches, sums, gradients=has_gradients)
            all_are_finite = "of weights, moments, gradients and outputs of layers that are all finite"
            message += f", {all_are_finite}" if broken is None else f": {broken.words}"
            # A skip leaves weights and moments unchanged, so it cannot repair them.
            if policy == "stop" or (policy == "skip" and broken is not None and broken.stays):
                suffix = "; no skip mends what is kept" if policy == "skip" else ""
                damaged = "" if broken is None else "memory was damaged, or "
                raise self._end(left_out, f"{message}: {damaged}{DIVERGED}{suffix}")
        self._leave_out(self._rolled_back(left_out, message) if policy == "rollback" else left_out, policy, message)

    def heal(self, error: NotFiniteError) -> None:
        """Roll back after a save or a copy has found a non-finite state, if the policy is --on-nan rollback.

        Errors: FloatingPointError if the run ends.
        """
        progress, policy = self.state.progress, self.guard.policy("nan")
        left_out = LeftOut(progress.step, "nan", progress.consumed, progress.consumed)
        if policy != "rollback":
            raise self._end(left_out, str(error)) from None
        message = f"step {progress.step}: {error.words}"
        self._leave_out(self._rolled_back(left_out, message), policy, message)

    def _leave_out(self, record: LeftOut, policy: str, message: str) -> None:
        self.state.guard.left_out.append(record)
        self._event(record, policy)
        action = "its batch is left out" if record.to is None else f"back at the state of step {record.to}"
        self.report(f"{message}: {action}; samples {record.first:,} to {record.end - 1:,} change nothing")

    def _rolled_back(self, record: LeftOut, message: str) -> LeftOut:
        """Roll back, and return `record`, extended to all samples since the restored step. Errors:
        FloatingPointError."""
        most = self.guard.options.max_rollbacks
        if not self.guard.may_roll_back():
            raise self._end(record, f"{message}: this would be rollback {most + 1}, and --max-rollbacks is {most}")
        assert self.saver is not None
        back = roll_back(self.state, self.saver, self.report)
        if back is None:
            raise self._end(record, f"{message}: nothing was saved yet, so that there is no step to go back to")
        return replace(record, first=back.consumed, to=back.step)

    def _end(self, record: LeftOut, text: str) -> FloatingPointError:
        """Return the error that ends the run, after recording the error as an event."""
        self._event(record, "stop")
        return FloatingPointError(text)

    def _event(self, record: LeftOut, policy: str) -> None:
        if self.meters is not None:
            samples = [record.first, record.end]
            self.meters.event(record.step, record.reason, policy=policy, samples=samples, to=record.to)

    def _check_rise(self, pending: Pending, loss: float) -> None:
        """Report once if the loss exceeds LIMIT (proving.py) times both the loss of a random guess and the first
        loss."""
        if self._limit is None:
            self._limit = LIMIT * max(math.log(max(architecture(self.state.run.model).input.vocab, 2)), loss)
        elif loss > self._limit:
            self.report(
                f"step {pending.step}: the loss is {loss:.4g}, more than {LIMIT:g} times that of guessing or of the "
                f"first step: training diverges; lower --lr (now {pending.lr:.3g}), or give a longer warm-up or "
                "--clip-grad"
            )
            self._limit = math.inf

    def _check_stuck(self, step: int, applied: bool, reason: str) -> None:
        """End the run after STUCK consecutive skipped steps, because later steps would be skipped as well. This count
        excludes skips by a loss scale that can still decrease, and spikes, which the guard counts. Errors:
        FloatingPointError.
        """
        scaler = self.state.scaler
        scale_decreases = scaler is not None and not reason and not scaler.at_least
        self._stuck = 0 if applied or scale_decreases else self._stuck + (reason != "spike")
        if self._stuck == STUCK:
            scale = ""
            if scaler is not None and scaler.at_least:
                scale = f" at a loss scale of {float(scaler.scale):g}, which cannot become less"
            raise FloatingPointError(
                f"step {step}: loss or gradients of {STUCK} steps in a row are not finite{scale}: none is applied any "
                "more. Resume from an earlier checkpoint with a lower --lr, a longer warm-up or --dtype bf16"
            )
