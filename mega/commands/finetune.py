"""`mega finetune`: `mega pretrain` from the weights of another run, towards a task."""

from __future__ import annotations

from mega.api.training import check_begin, from_weights, pretrained
from mega.commands import pretrain
from mega.core.config.run import Options
from mega.core.processes.world import note

LOADS_MODEL = True


def run(options: Options) -> int:
    """Train from the weights at --load, towards --task; the step counter and the optimizer start afresh.

    It is `mega pretrain` with --finetune and --use-checkpoint-config wherever --load is given, and with the tokenizer
    that came with those weights: the same loop, checkpoints and resume, so --resume auto continues a finetuning that
    was interrupted.

    Exit codes: as of mega pretrain.
    """
    options = pretrained(options)
    check_begin(options, note)
    return train(options)


def train(options: Options) -> int:
    """The same without --load too, from weights that begin at random."""
    return pretrain.run(from_weights(pretrained(options)))
