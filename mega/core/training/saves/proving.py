"""Verdicts on saved steps: a saved step is pending until enough sound steps have followed or the run diverges.

    sound       a step that was applied, and whose loss is finite and below the limit
    diverged    the loss is above the limit, or the run ends because the loss, weights or all gradients are not finite
    neither     a skipped step, such as while a loss scale is adjusted

The limit is LIMIT times the larger of the loss of a uniform guess (the logarithm of the vocabulary size) and the first
loss after the run started or resumed. The loss of a model that learns stays below the limit; the loss of a model whose
weights have exploded stays above the limit or is not finite.

    a save                  the step is pending, and already suspect if the loss of the latest step was above the limit
    --good-after sound      the step is good, regardless of earlier verdicts
    divergence              every pending step becomes suspect, and the count of sound steps restarts
    the last step           all pending steps that are not suspect are good
    a stop, a kill          no verdict: steps stay pending, with the count of sound steps at the last save

checkpoint/own/verdicts.py defines the verdicts file, and the effect of verdicts on a resume. Only one rank keeps this
record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.checkpoint.own.together import attempt, reason_of
from mega.core.checkpoint.own.verdicts import Status, StepVerdict

LIMIT = 2.0
"""Limit of a sound model's loss, as a multiple of the loss of a random guess or of the first step."""


@dataclass
class Trial:
    """A saved step whose verdict is pending. begun: number of sound steps when this step was saved. manifest: the
    manifest's digest, empty until the checkpoint is published. reason: why the step is suspect, or empty."""

    begun: int
    manifest: str = ""
    reason: str = ""


class Proving:
    """The record of the saved steps of a run, on one rank.

    good_after: number of sound steps after which a saved step is good. vocab: size of the vocabulary. start: the step
    from which the run resumes, or 0. report: called with a message if the record cannot be written; the run continues.
    """

    def __init__(
        self, store: CheckpointStore, *, good_after: int, vocab: int, start: int, report: Callable[[str], None]
    ):
        self._store, self._good_after, self._report = store, good_after, report
        self._limit, self._guess = math.inf, math.log(max(vocab, 2))
        self._sound = 0
        self._blown_up = ""
        self._trials: dict[int, Trial] = {}
        verdicts, fault = attempt(store.verdicts)
        if fault is not None:
            report(f"the verdicts on earlier steps are not known: {reason_of(fault)}")
        self._known = verdicts or {}
        self._losses = {step: each.valid_loss for step, each in self._known.items() if each.valid_loss is not None}
        for step, verdict in self._known.items():
            if verdict.status == "unproven" and step < start:
                self._trials[step] = Trial(-verdict.sound_steps, verdict.manifest)
        if start:
            self._resumed(start)

    def _resumed(self, start: int) -> None:
        """Add the step from which the run resumes to the pending steps, unless that step is already good."""
        manifest, _ = attempt(lambda: self._store.digest(start))
        verdict = self._known.get(start)
        if verdict is None or verdict.manifest != manifest:
            verdict = StepVerdict(manifest or "")
        if manifest and verdict.status != "good":
            sound_at_save = -verdict.sound_steps if verdict.status == "unproven" else 0
            self._trials[start] = Trial(sound_at_save, manifest, verdict.reason)

    @property
    def on_trial(self) -> int | None:
        """The first step that can become the next good step, or None. Retention must keep this step."""
        good = max((step for step, verdict in self._known.items() if verdict.status == "good"), default=None)
        tried = (step for step, trial in self._trials.items() if good is None or (step > good and not trial.reason))
        return min(tried, default=None)

    def saves(self, step: int) -> None:
        """Add a step to the pending steps. Called when the save of the step starts."""
        reason = f"it was saved while {self._blown_up}" if self._blown_up else ""
        self._trials[step] = Trial(self._sound, reason=reason)
        self._known.pop(step, None)  # forget the verdict on a checkpoint that this save replaces

    def published(self, step: int) -> None:
        """Record that the save of `step` is published, and remove the pending steps whose checkpoints were deleted."""
        trial = self._trials.get(step)
        manifest, fault = attempt(lambda: self._store.digest(step))
        if trial is None or manifest is None:
            self._report(f"whether step {step} is good will not be known: {reason_of(fault) if fault else ''}")
            return
        trial.manifest = manifest
        existing = self._store.existing(self._trials)
        self._trials = {each: trial for each, trial in self._trials.items() if each in existing or not trial.manifest}
        self._write()

    def record_validation(self, step: int, loss: float) -> None:
        """Record the validation loss after `step`. May be called before or after the step is saved."""
        if not math.isfinite(loss):
            return
        self._losses[step] = loss
        if step in self._trials or step in self._known:
            if step in self._known:
                self._known[step] = replace(self._known[step], valid_loss=loss)
            self._write()

    def observe(self, step: int, loss: float | None, applied: bool) -> None:
        """Record a step's loss and whether its update was applied. Must be called for every step, in order. loss: the
        step's loss; None if it is not comparable with that of a random guess."""
        if loss is not None and self._limit == math.inf:
            self._limit = LIMIT * max(self._guess, loss)
        if loss is not None and loss > self._limit:
            begins, self._blown_up = not self._blown_up, f"the loss was {loss:.4g} (step {step})"
            for trial in self._trials.values():
                trial.begun = self._sound
            if begins:
                self.diverged(self._blown_up)
        elif applied:
            self._blown_up = ""
            self._sound += 1
            self._promote(lambda trial: self._sound - trial.begun >= self._good_after)

    def diverged(self, reason: str) -> None:
        """Mark all pending steps as suspect. Called when the run has diverged."""
        for trial in self._trials.values():
            trial.reason = trial.reason or f"the run that saved it blew up: {reason}"
        self._write()

    def finished(self, *, clean: bool) -> None:
        """Write the verdicts at the end of the run. clean: whether the run has reached its last step; otherwise steps
        stay pending, and the counts are stored for a resume."""
        if clean:
            self._promote(lambda trial: not trial.reason)
        self._write()

    def _promote(self, proven: Callable[[Trial], bool]) -> None:
        good = [step for step, trial in self._trials.items() if trial.manifest and proven(trial)]
        for step in good:
            trial = self._trials.pop(step)
            self._known[step] = StepVerdict(
                trial.manifest, "good", self._sound - trial.begun, valid_loss=self._losses.get(step)
            )
        if good:
            self._write()

    def _write(self) -> None:
        for step, trial in self._trials.items():
            if trial.manifest:
                status: Status = "suspect" if trial.reason else "unproven"
                sound, loss = self._sound - trial.begun, self._losses.get(step)
                self._known[step] = StepVerdict(trial.manifest, status, sound, trial.reason, loss)
        _, fault = attempt(self._replace)
        if fault is not None:
            self._report(f"the verdicts on saved steps stay as they were: {reason_of(fault)}")

    def _replace(self) -> None:
        existing = self._store.existing(self._known)
        self._known = {step: verdict for step, verdict in self._known.items() if step in existing}
        self._store.set_verdicts(self._known)
