"""`mega finetune`: `mega pretrain` from the weights of another run, towards a task."""

from __future__ import annotations

import dataclasses

from mega.commands import pretrain
from mega.core.config.run import RunConfig


def run(run: RunConfig) -> int:
    """Train from the weights at --load, towards --task; the step counter and the optimizer start afresh.

    It is `mega pretrain` with --finetune and --use-checkpoint-config wherever --load is given: the same loop,
    checkpoints and resume, so --resume auto continues a finetuning that was interrupted.

    Exit codes: as of mega pretrain.
    """
    return pretrain.run(_from_weights(run))


def _from_weights(run: RunConfig) -> RunConfig:
    """`run` with what a verb that starts from other weights implies. Where it loads from its own place, it resumes."""
    checkpoint = run.checkpoint
    if checkpoint.load is None:
        return run
    other = checkpoint.load != checkpoint.save and checkpoint.resume in (None, "auto")
    implied = dataclasses.replace(checkpoint, finetune=checkpoint.finetune or other, use_checkpoint_config=True)
    return dataclasses.replace(run, checkpoint=implied)
