"""Back to the newest checkpoint in the middle of a run: its weights, moments and loss scale, at the data position of
now, so that the batches since are left out. All ranks together."""

from __future__ import annotations

from functools import partial

from mega.core.checkpoint.forms.open import open_base
from mega.core.checkpoint.own.together import alone, together
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import Progress, TrainState


def roll_back(state: TrainState, saver: Saver) -> Progress | None:
    """How far the state that came back had come; None where nothing has been saved yet.

    What has been done since counts as skipped. Errors: CheckpointError on all ranks where one cannot read it.
    """
    saver.wait()
    exchange = state.exchange if state.mesh.world > 1 else alone
    now, rollbacks, left_out = state.progress, state.guard.rollbacks, state.guard.left_out
    if not any(exchange(saver.kept in saver.store.steps())):
        return None
    state.grads.wait_param_gather()
    checkpoint = together(partial(saver.store.open, saver.kept), exchange)
    base = open_base(checkpoint, state.run.checkpoint.load, exchange=exchange)
    together(partial(restore, state, ResumePoint(checkpoint, weights_only=False, base=base)), exchange)
    then = state.progress
    now.skipped = then.skipped + now.step - then.step
    now.skipped_samples = then.skipped_samples + now.consumed - then.consumed
    state.progress = now
    state.guard.rollbacks, state.guard.left_out = rollbacks, left_out
    return then
