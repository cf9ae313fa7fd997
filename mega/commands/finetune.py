"""`mega finetune`: `mega pretrain` from the weights of another run, towards a task."""

from __future__ import annotations

import sys

from mega.commands import pretrain
from mega.core.config.run import Options, updated
from mega.core.config.sections import LABELLED
from mega.core.files import check_source
from mega.core.processes.world import is_first_rank

LOADS_MODEL = True


def run(options: Options) -> int:
    """Train from the weights at --load, towards --task; the step counter and the optimizer start afresh.

    It is `mega pretrain` with --finetune and --use-checkpoint-config wherever --load is given, and with the tokenizer
    that came with those weights: the same loop, checkpoints and resume, so --resume auto continues a finetuning that
    was interrupted.

    Exit codes: as of mega pretrain.
    """
    options = _pretrained(options)
    _check_begin(options)
    return train(options)


def train(options: Options) -> int:
    """The same without --load too, from weights that begin at random."""
    return pretrain.run(_from_weights(_pretrained(options)))


def _check_begin(options: Options) -> None:
    """Errors: ValueError where there are no weights to begin with, and the task does not bring a head of its own."""
    checkpoint = options.checkpoint
    if checkpoint.load is not None or checkpoint.resume not in (None, "auto"):
        return
    if checkpoint.resume == "auto" and checkpoint.save is not None:
        from mega.core.checkpoint.own.store import store_at

        if store_at(checkpoint.save).steps():
            return
    if options.finetuning.task not in LABELLED:
        raise ValueError(
            "--load is missing: mega finetune begins with the weights of a run, or with others' weights; mega pretrain "
            "begins with random ones"
        )
    if is_first_rank():
        print("mega: without --load all weights begin at random", file=sys.stderr)


def _pretrained(options: Options) -> Options:
    """--pretrained-checkpoint as --load; what Megatron-LM loads before it, its own steps, by --resume auto.

    Errors: ValueError where --load is another place than --save.
    """
    checkpoint, begin = options.checkpoint, options.checkpoint.pretrained_checkpoint
    if begin is None:
        return options
    if checkpoint.load not in (None, checkpoint.save):
        raise ValueError(
            f"--pretrained-checkpoint {begin}: excludes --load {checkpoint.load}; give one of them, or --load as --save"
        )
    resume = checkpoint.resume or (None if checkpoint.load is None else "auto")
    return updated(options, {"pretrained_checkpoint": None, "load": begin, "resume": resume})


def _from_weights(options: Options) -> Options:
    """With what a verb that starts from other weights implies. Where it loads from its own place, it resumes.

    Errors: ValueError where nothing is there."""
    checkpoint = options.checkpoint
    step = None if checkpoint.resume == "auto" else checkpoint.resume
    if checkpoint.load is not None:
        other = checkpoint.load != checkpoint.save and step is None
        options = updated(options, {"finetune": checkpoint.finetune or other, "use_checkpoint_config": True})
    if step is not None:
        check_source("--resume", step)
    elif checkpoint.load is not None:
        check_source("--load", checkpoint.load)
    return options
