"""Evaluation of held-out sets: mean losses over global batches. Each validation continues after the last sample of the
previous validation.

If a request to stop interrupts a validation, the next validation starts at the same sample as it would have without the
interruption, so results do not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from mega.core.activity import ACTIVITY
from mega.core.architecture import architecture
from mega.core.config.resolve import microbatches
from mega.core.training.kinds.task import HeldOut, Task
from mega.core.training.metrics.meters import Meters
from mega.core.training.state import TrainState
from mega.core.training.step import evaluate_step
from mega.core.training.stop import StopSignal


class Evaluation:
    """Runs the validations and the final test of one run.

    meters: the meters of the run; None except on rank 0. on_validation: called with the step and the loss of the first
    validation set. last_validated: the step of the most recent validation.
    """

    def __init__(
        self,
        state: TrainState,
        task: Task,
        stop: StopSignal,
        meters: Meters | None,
        report: Callable[[str], None],
        on_validation: Callable[[int, float], None] = lambda step, loss: None,
    ):
        self._state, self._task, self._stop, self._meters, self._report = state, task, stop, meters, report
        self._on_validation, run = on_validation, state.run
        self._iterations, self._global_batch = run.evaluation.eval_iters, run.batch.global_batch
        self._microbatches = microbatches(run, state.mesh.world)
        self.last_validated: int | None = None
        self.measured: dict[str, Mapping[str, float]] = {}
        """Name of each set -> its most recent results."""

    def validate(self) -> None:
        self.last_validated = self._state.progress.step
        for number, one in enumerate(self._task.validation):
            loss = self._evaluate(one)
            if loss is not None and not number:
                self._on_validation(self.last_validated, loss)

    def test(self) -> None:
        for one in self._task.test:
            self._evaluate(one)

    def _evaluate(self, held_out: HeldOut) -> float | None:
        """Evaluate a set over `iterations` global batches, and return the mean loss, or None if a request to stop
        interrupts the evaluation."""
        if not self._iterations:
            return None
        began = time.monotonic()
        with ACTIVITY.during("evaluating"):
            sums = self._sums(held_out, self._begin(held_out))
        if sums is None:
            return None
        state, step = self._state, self._state.progress.step
        terms = state.stages[0].terms
        means = dict(zip(state.pipeline.names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
        weights = dict(zip(state.pipeline.names, sums[:, 1].tolist(), strict=True))
        for name in architecture(state.run.model).training_losses:  # losses used only in training have weight 0 here
            if not weights.get(name, 1.0):
                del means[name]
        terms = {name: coefficient for name, coefficient in terms.items() if name in means}
        measured = self._task.measure(means, terms)
        if math.isnan(measured["loss"]) and not sums[: len(terms), 1].all():
            label = f"{held_out.name} at step {step}"
            self._report(f"{label} | no token of its {self._batches(held_out)} batches is trained on")
        self.measured[held_out.name] = measured
        if self._meters is not None:
            self._meters.evaluation(step, held_out.name, measured)
            self._meters.event(step, "evaluation", set=held_out.name, seconds=round(time.monotonic() - began, 3))
        return measured["loss"]

    def _batches(self, held_out: HeldOut) -> int:
        return self._iterations if held_out.iterations is None else held_out.iterations

    def _begin(self, held_out: HeldOut) -> int:
        """Return the index of the first sample to read. If each validation continues after the previous one, also
        advance the position."""
        if not held_out.continues:
            return 0
        progress, size = self._state.progress, self._iterations * self._global_batch
        begin = held_out.batches.turn(progress.consumed_valid, size)
        progress.consumed_valid += size
        return begin

    def _sums(self, held_out: HeldOut, begin: int) -> torch.Tensor | None:
        """Return the totals and weights summed over all batches, float64 [names, 2]; None if the run must stop."""
        state, stop = self._state, self._stop
        sums = torch.zeros(len(state.pipeline.names), 2, dtype=torch.float64, device=state.device.torch)
        for number in range(total := self._batches(held_out)):
            if stop.requested:
                label = f"{held_out.name} at step {state.progress.step}"
                self._report(f"{label} | cut short after {number} of {total} batches: {stop.reason}")
                return None
            flag = stop.poll()
            batches = held_out.batches.take(begin + number * self._global_batch, self._microbatches)
            sums += evaluate_step(state, [batch.to(state.device.torch) for batch in batches])
            flag.read()  # the request to stop was reduced while this batch was computed
        return sums
