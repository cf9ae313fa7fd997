"""Back to the newest checkpoint in the middle of a run: its weights, moments and loss scale, at the data position of
now, so that the batches since are left out. All ranks together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mega.core.activity import ACTIVITY
from mega.core.checkpoint.forms.open import open_base
from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.together import alone, gathered, together
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import Progress, TrainState


def roll_back(state: TrainState, saver: Saver, report: Callable[[str], None]) -> Progress | None:
    """How far the state that came back had come; None where nothing has been saved yet.

    What has been done since counts as skipped. A step that is damaged is passed over, and reported. Errors:
    CheckpointError on all ranks where every one is, UnreadableError where one cannot be read for now.
    """
    saver.wait()
    exchange = state.exchange if state.mesh.world > 1 else alone
    now, rollbacks, left_out = state.progress, state.guard.rollbacks, state.guard.left_out
    steps = sorted({step for each in gathered(saver.store.steps, exchange) for step in each if step <= saver.kept})
    if saver.kept not in steps:
        return None
    state.grads.wait_param_gather()
    with ACTIVITY.during("loading"):
        while True:
            step = steps.pop()
            try:
                checkpoint = together(partial(saver.store.open, step), exchange)
                base = open_base(checkpoint, state.run.checkpoint.load, exchange=exchange)
                point = ResumePoint(checkpoint, weights_only=False, base=base)
                together(partial(restore, state, point, whole=True), exchange)
                break
            except CheckpointError as error:
                if isinstance(error, UnreadableError) or not steps:
                    raise
                report(f"step {step} is passed over: {error}")
    then = state.progress
    now.skipped = then.skipped + now.step - then.step
    now.skipped_samples = then.skipped_samples + now.consumed - then.consumed
    state.progress = now
    state.guard.rollbacks, state.guard.left_out = rollbacks, left_out
    return then
