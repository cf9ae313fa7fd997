"""`mega finetune`: `mega pretrain` from existing weights, for a task."""

from __future__ import annotations

from mega.api.training import check_begin, from_weights, pretrained
from mega.commands import pretrain
from mega.core.config.run import Options
from mega.core.processes.world import note

LOADS_MODEL = True


def run(options: Options) -> int:
    """Train from the weights at --load for --task, with a new step counter and optimizer state.

    If --load is given, the verb is mega pretrain with --finetune, --use-checkpoint-config and the tokenizer of those
    weights. The loop, checkpoints and resume are the same, so --resume auto continues an interrupted run.

    Exit codes: as in mega pretrain.
    """
    options = pretrained(options)
    check_begin(options, note)
    return train(options)


def train(options: Options) -> int:
    """As `run`, but --load may be missing: training then starts from random weights."""
    return pretrain.run(from_weights(pretrained(options)))
