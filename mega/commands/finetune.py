"""`mega finetune`: `mega pretrain` from the weights of another run, towards a task."""

from __future__ import annotations

import dataclasses
import sys

from mega.commands import pretrain
from mega.core.config.run import RunConfig
from mega.core.config.sections import LABELLED
from mega.core.config.world import is_first_rank
from mega.core.files import check_source

LOADS_MODEL = True


def run(run: RunConfig) -> int:
    """Train from the weights at --load, towards --task; the step counter and the optimizer start afresh.

    It is `mega pretrain` with --finetune and --use-checkpoint-config wherever --load is given, and with the tokenizer
    that came with those weights: the same loop, checkpoints and resume, so --resume auto continues a finetuning that
    was interrupted.

    Exit codes: as of mega pretrain.
    """
    run = _pretrained(run)
    _check_begin(run)
    return train(run)


def train(run: RunConfig) -> int:
    """The same without --load too, from weights that begin at random."""
    return pretrain.run(_from_weights(_pretrained(run)))


def _check_begin(run: RunConfig) -> None:
    """Errors: ValueError where there are no weights to begin with, and the task does not bring a head of its own."""
    checkpoint = run.checkpoint
    if checkpoint.load is not None or checkpoint.resume not in (None, "auto"):
        return
    if checkpoint.resume == "auto" and checkpoint.save is not None:
        from mega.core.checkpoint.own.store import store_at

        if store_at(checkpoint.save).steps():
            return
    if run.finetuning.task not in LABELLED:
        raise ValueError(
            "--load is missing: mega finetune begins with the weights of a run, or with others' weights; mega pretrain "
            "begins with random ones"
        )
    if is_first_rank():
        print("mega: without --load all weights begin at random", file=sys.stderr)


def _pretrained(run: RunConfig) -> RunConfig:
    """`run` with --pretrained-checkpoint as --load; what Megatron-LM loads before it, its own steps, by --resume auto.

    Errors: ValueError where --load is another place than --save.
    """
    checkpoint, begin = run.checkpoint, run.checkpoint.pretrained_checkpoint
    if begin is None:
        return run
    if checkpoint.load not in (None, checkpoint.save):
        raise ValueError(
            f"--pretrained-checkpoint {begin}: excludes --load {checkpoint.load}; give one of them, or --load as --save"
        )
    resume = checkpoint.resume or (None if checkpoint.load is None else "auto")
    start = dataclasses.replace(checkpoint, pretrained_checkpoint=None, load=begin, resume=resume)
    return dataclasses.replace(run, checkpoint=start)


def _from_weights(run: RunConfig) -> RunConfig:
    """`run` with what a verb that starts from other weights implies. Where it loads from its own place, it resumes.

    Errors: ValueError where nothing is there."""
    checkpoint = run.checkpoint
    step = None if checkpoint.resume == "auto" else checkpoint.resume
    if checkpoint.load is not None:
        other = checkpoint.load != checkpoint.save and step is None
        implied = dataclasses.replace(checkpoint, finetune=checkpoint.finetune or other, use_checkpoint_config=True)
        run = dataclasses.replace(run, checkpoint=implied)
    if step is not None:
        check_source("--resume", step)
    elif checkpoint.load is not None:
        check_source("--load", checkpoint.load)
    return run
