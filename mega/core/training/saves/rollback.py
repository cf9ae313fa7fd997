"""Restore the newest checkpoint during a run: weights, moments and loss scale are restored, but the current data
position is kept, so that the batches since the checkpoint are left out. All ranks must call this together."""

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
    """Roll back, and return the progress of the restored state, or None if nothing has been saved yet.

    Steps after the restored one count as skipped. A damaged checkpoint is reported, and an older checkpoint is used.
    Errors, on all ranks: CheckpointError if all checkpoints are damaged; UnreadableError if a checkpoint temporarily
    cannot be read.
    """
    saver.wait()
    exchange = state.exchange if state.mesh.world > 1 else alone
    progress, rollbacks, left_out = state.progress, state.guard.rollbacks, state.guard.left_out
    steps = sorted(
        {step for each in gathered(saver.store.steps, exchange) for step in each if step <= saver.saved_step}
    )
    if saver.saved_step not in steps:
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
    # `restore` has replaced the progress and the guard's records with those of the checkpoint; undo this.
    restored = state.progress
    progress.skipped = restored.skipped + progress.step - restored.step
    progress.skipped_samples = restored.skipped_samples + progress.consumed - restored.consumed
    state.progress = progress
    state.guard.rollbacks, state.guard.left_out = rollbacks, left_out
    return restored
