"""Is a saved step any good? Each is on trial until enough sound steps have followed, or the run blows up.

    sound       a step that was applied, and whose loss is finite and below the limit
    blown up    the loss is above the limit, or the run ends because it, the weights or every gradient is not finite
    neither     a step that was skipped, as a loss scale does while it finds its value

The limit is LIMIT times the greater of what guessing costs (the logarithm of the vocabulary) and the first loss of this
start: no model that learns is there, one whose weights exploded stays there for as long as its loss is a number.

    a save                  the step is on trial; suspect at once where the step just taken was blown up
    --good-after sound      it is good, whatever was before
    blown up                every step on trial is suspect, and sound steps are counted afresh
    the last step           all that are on trial and not suspect are good
    a stop, a kill          nothing is known: they stay on trial, with the sound steps counted at the last save

What the words mean for those who resume, and the file, is in checkpoint/own/verdicts.py. One rank keeps the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.checkpoint.own.together import attempt, reason_of
from mega.core.checkpoint.own.verdicts import Status, StepVerdict

LIMIT = 2.0
"""How much greater than that of guessing, or of the first step, the loss of a model may be that is any good."""


@dataclass
class Trial:
    """One saved step. begun: sound steps at its save. manifest: empty until it is published. reason: where suspect."""

    begun: int
    manifest: str = ""
    reason: str = ""


class Proving:
    """The record of one run's saved steps, on the rank that keeps it.

    good_after: sound steps that make a saved step good. vocab: what there is to guess. start: the step that the run
    starts from, 0 where it has none. report: is given a line where the record cannot be kept, which ends no run.
    """

    def __init__(
        self, store: CheckpointStore, *, good_after: int, vocab: int, start: int, report: Callable[[str], None]
    ):
        self._store, self._good_after, self._report = store, good_after, report
        self._limit, self._guess = math.inf, math.log(max(vocab, 2))
        self._sound = 0
        self._blown_up = ""
        self._trials: dict[int, Trial] = {}
        known, fault = attempt(store.verdicts)
        if fault is not None:
            report(f"the verdicts on earlier steps are not known: {reason_of(fault)}")
        self._known = known or {}
        self._losses = {step: each.valid_loss for step, each in self._known.items() if each.valid_loss is not None}
        for step, verdict in self._known.items():
            if verdict.status == "unproven" and step < start:
                self._trials[step] = Trial(-verdict.sound_steps, verdict.manifest)
        if start:
            self._resumed(start)

    def _resumed(self, start: int) -> None:
        """The step that we start from is on trial too, whatever was said of it."""
        manifest, _ = attempt(lambda: self._store.digest(start))
        verdict = self._known.get(start)
        if verdict is None or verdict.manifest != manifest:
            verdict = StepVerdict(manifest or "")
        if manifest and verdict.status != "good":
            begun = -verdict.sound_steps if verdict.status == "unproven" else 0
            self._trials[start] = Trial(begun, manifest, verdict.reason)

    @property
    def on_trial(self) -> int | None:
        """The step that is the next to be good, which retention is to leave; None where there is none."""
        good = max((step for step, verdict in self._known.items() if verdict.status == "good"), default=None)
        tried = (step for step, trial in self._trials.items() if good is None or (step > good and not trial.reason))
        return min(tried, default=None)

    def saves(self, step: int) -> None:
        """A save of this moment begins."""
        reason = f"it was saved while {self._blown_up}" if self._blown_up else ""
        self._trials[step] = Trial(self._sound, reason=reason)
        self._known.pop(step, None)  # it was of the checkpoint that is replaced

    def published(self, step: int) -> None:
        """The save of `step` is published; a step that has gone meanwhile is on trial no longer."""
        trial = self._trials.get(step)
        manifest, fault = attempt(lambda: self._store.digest(step))
        if trial is None or manifest is None:
            self._report(f"whether step {step} is good will not be known: {reason_of(fault) if fault else ''}")
            return
        trial.manifest = manifest
        there = self._store.existing(self._trials)
        self._trials = {each: trial for each, trial in self._trials.items() if each in there or not trial.manifest}
        self._write()

    def judged(self, step: int, loss: float) -> None:
        """The validation loss of the weights after `step`, before or after they are saved."""
        if not math.isfinite(loss):
            return
        self._losses[step] = loss
        if step in self._trials or step in self._known:
            if step in self._known:
                self._known[step] = replace(self._known[step], valid_loss=loss)
            self._write()

    def saw(self, step: int, loss: float | None, applied: bool) -> None:
        """The finite loss of a step, and whether its update was applied. Every step is seen, in order. None: it is of
        another kind than what guessing costs."""
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

    def diverged(self, why: str) -> None:
        """The run has blown up: what is on trial is suspect."""
        for trial in self._trials.values():
            trial.reason = trial.reason or f"the run that saved it blew up: {why}"
        self._write()

    def finished(self, *, clean: bool) -> None:
        """The run ends; `clean`: with its last step. Else it is to resume, and the count is kept for it."""
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
        there = self._store.existing(self._known)
        self._known = {step: verdict for step, verdict in self._known.items() if step in there}
        self._store.set_verdicts(self._known)
