"""`mega finetune`: train existing weights for a task, as `mega pretrain` does."""

from __future__ import annotations

from mega.api.training import check_begin, from_weights, pretrained
from mega.commands import pretrain
from mega.core.config.run import Options
from mega.core.processes.world import note

LOADS_MODEL = True


def run(options: Options) -> int:
    """Train the weights at --load for --task, starting at step 0 with new optimizer state.

    With --load, this is equivalent to mega pretrain with --finetune, --use-checkpoint-config and the tokenizer of the
    weights. Checkpoints and resuming work as in mega pretrain, so --resume auto continues an interrupted run.

    Exit codes: as in mega pretrain.
    """
    options = pretrained(options)
    check_begin(options, note)
    return train(options)


def train(options: Options) -> int:
    """Do what `run` does, but if --load is missing, start from random weights."""
    return pretrain.run(from_weights(pretrained(options)))
