"""Whether a step that was read is sound, and what is done where it is not: a word, a skip, a rollback, or the end.

All ranks read the same reduced numbers, so that all decide alike (policy.py).
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
    limits: SpikeLimits
    batches: Sequence[Batch]
    sums: HostArray | None
    """Of `Probes`."""


class Judge:
    """Of one rank's run. meters: on rank 0. report: prints a line, on rank 0."""

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
        """Steps in a row that were skipped for what no loss scale mends, but for spikes."""
        self._limit: float | None = None
        """The loss from which on a rise is reported."""

    def judge(self, pending: Pending, numbers: dict[str, float], *, there: bool) -> None:
        """Of a step's numbers, those that are not for a user are taken out. there: its gradients still are. Errors:
        FloatingPointError where the run ends."""
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
            self._act(pending, reason, loss, norm, there)
        elif applied:
            self.state.guard.add(loss, norm)
        self._check_stuck(pending.step, applied, reason)
        if math.isfinite(loss):
            self._check_rise(pending, loss)
            if self.saver is not None:
                self.saver.saw(pending.step, loss, applied)

    def _reason(self, pending: Pending, loss: float, norm: float, broken: bool, applied: bool) -> str:
        """Why a step is not sound: "nan", "spike" or "". An overflow of gradients that a loss scale follows is not a
        reason, unless weights or moments are broken, too."""
        scaler = self.state.scaler
        if broken and scaler is not None and scaler.follows and self._all_finite(loss):
            return "nan" if broken_tensors(self.state) is not None else ""
        if broken or not math.isfinite(loss):
            return "nan"
        return "spike" if not applied or pending.limits.exceeded(loss, norm) else ""

    def _all_finite(self, loss: float) -> bool:
        """Of a loss that tensor ranks may have computed from batches of which one is damaged."""
        return all(self.state.exchange(math.isfinite(loss)))

    def _act(self, pending: Pending, reason: str, loss: float, norm: float, there: bool) -> None:
        """What is to be done about a step, the same on all ranks. Errors: FloatingPointError where the run ends."""
        policy, step, scaler = self.guard.policy(reason), pending.step, self.state.scaler
        if reason == "nan" and not self._all_finite(loss):
            loss = math.nan
        what = f"step {step}: the loss is {loss:.6g}, and the gradient norm {norm:.4g}"
        if scaler is not None and not scaler.follows:
            what += f" at --loss-scale {float(scaler.scale):g}"
        found = LeftOut(step, reason, pending.consumed - pending.samples, pending.consumed)
        if reason == "spike":
            usual = self.state.guard
            what += f", where {median(usual.losses):.4g} and {median(usual.norms):.4g} are usual"
            if policy == "warn":
                usual.add(loss, norm)
                self._event(found, policy)
                if self.guard.is_first_spike(step):
                    self.report(f"{what}: a spike (--on-spike skip leaves such a batch out)")
                return
            if policy == "skip" and usual.skip_spike():
                what += f", and {LASTING} steps in a row are spikes: from here on, what is usual is learned again"
        else:
            sums = [] if pending.sums is None else pending.sums.numpy().tolist()
            broken = broken_tensors(self.state, pending.batches, sums, gradients=there)
            of = "of weights, moments, gradients and outputs of layers that are all finite"
            what += f", {of}" if broken is None else f": {broken.words}"
            if policy == "stop" or (policy == "skip" and broken is not None and broken.stays):
                kept = "; no skip mends what is kept" if policy == "skip" else ""
                damaged = "" if broken is None else "memory was damaged, or "
                raise self._end(found, f"{what}: {damaged}{DIVERGED}{kept}")
        self._leave_out(self._rolled_back(found, what) if policy == "rollback" else found, policy, what)

    def heal(self, error: NotFiniteError) -> None:
        """Go back, with --on-nan rollback, where it is a save or a copy that finds the state broken, by the newest
        update. Errors: FloatingPointError where the run ends."""
        progress, policy = self.state.progress, self.guard.policy("nan")
        found = LeftOut(progress.step, "nan", progress.consumed, progress.consumed)
        if policy != "rollback":
            raise self._end(found, str(error)) from None
        what = f"step {progress.step}: {error.words}"
        self._leave_out(self._rolled_back(found, what), policy, what)

    def _leave_out(self, found: LeftOut, policy: str, what: str) -> None:
        self.state.guard.left_out.append(found)
        self._event(found, policy)
        done = "its batch is left out" if found.to is None else f"back at the state of step {found.to}"
        self.report(f"{what}: {done}; samples {found.first:,} to {found.end - 1:,} change nothing")

    def _rolled_back(self, found: LeftOut, what: str) -> LeftOut:
        """The same from the first sample on whose state came back, and the step. Errors: FloatingPointError."""
        most = self.guard.options.max_rollbacks
        if not self.guard.may_roll_back():
            raise self._end(found, f"{what}: this would be rollback {most + 1}, and --max-rollbacks is {most}")
        assert self.saver is not None
        back = roll_back(self.state, self.saver, self.report)
        if back is None:
            raise self._end(found, f"{what}: nothing was saved yet, so that there is no step to go back to")
        return replace(found, first=back.consumed, to=back.step)

    def _end(self, found: LeftOut, text: str) -> FloatingPointError:
        """What ends the run, which is kept as an event."""
        self._event(found, "stop")
        return FloatingPointError(text)

    def _event(self, found: LeftOut, policy: str) -> None:
        if self.meters is not None:
            samples = [found.first, found.end]
            self.meters.event(found.step, found.reason, policy=policy, samples=samples, to=found.to)

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

    def _check_stuck(self, step: int, applied: bool, reason: str) -> None:
        """A loss scale that can still become less is looking for its value, by steps that it follows; spikes are
        counted by the guard. Errors: FloatingPointError where STUCK other steps in a row were skipped: none will be
        applied any more.
        """
        scaler = self.state.scaler
        looking = scaler is not None and not reason and not scaler.at_least
        self._stuck = 0 if applied or looking else self._stuck + (reason != "spike")
        if self._stuck == STUCK:
            held = ""
            if scaler is not None and scaler.at_least:
                held = f" at a loss scale of {float(scaler.scale):g}, which cannot become less"
            raise FloatingPointError(
                f"step {step}: loss or gradients of {STUCK} steps in a row are not finite{held}: none is applied any "
                "more. Resume from an earlier checkpoint with a lower --lr, a longer warm-up or --dtype bf16"
            )
