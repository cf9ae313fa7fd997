"""`mega finetune`: `mega pretrain` from the weights of another run, towards a task."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from mega.commands import pretrain
from mega.core.config.run import RunConfig
from mega.core.config.sections import TokenizerConfig
from mega.core.config.world import is_first_rank
from mega.core.files import check_source

LOADS_MODEL = True


def run(run: RunConfig) -> int:
    """Train from the weights at --load, towards --task; the step counter and the optimizer start afresh.

    It is `mega pretrain` with --finetune and --use-checkpoint-config wherever --load is given, and with the tokenizer
    that came with those weights unless another is given: the same loop, checkpoints and resume, so --resume auto
    continues a finetuning that was interrupted.

    Exit codes: as of mega pretrain.
    """
    return pretrain.run(_from_weights(_pretrained(run)))


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
    """`run` with what a verb that starts from other weights implies. Where it loads from its own place, it resumes."""
    checkpoint = run.checkpoint
    step = None if checkpoint.resume == "auto" else checkpoint.resume
    if checkpoint.load is not None:
        other = checkpoint.load != checkpoint.save and step is None
        implied = dataclasses.replace(checkpoint, finetune=checkpoint.finetune or other, use_checkpoint_config=True)
        run = dataclasses.replace(run, checkpoint=implied)
    place = step or checkpoint.load
    talks = bool(run.data.chat_data or run.finetuning.dpo_data)
    return run if place is None else _with_sidecar_files(run, place, step is not None, talks)


def _with_sidecar_files(run: RunConfig, place: str, ours: bool, talks: bool) -> RunConfig:
    """`run` with the tokenizer that came with the weights, where they have one and it names none, and their chat
    template where that is asked for. ours: a step, whose base need not be where it was. talks: it reads conversations.
    Errors: ValueError, of `place`."""
    if run.tokenizer != TokenizerConfig() and not talks:
        return run
    check_source("--resume" if ours else "--load", place)
    from mega.core.checkpoint.own.store import locate
    from mega.core.inference.load import chat_template_place, open_model, tokenizer_section

    source = locate(place) if ours else open_model(place)
    if talks:
        run = _with_template(run, place, chat_template_place(source))
    section = tokenizer_section(source) if run.tokenizer == TokenizerConfig() else None
    return run if section is None else dataclasses.replace(run, tokenizer=TokenizerConfig(**section))


def _with_template(run: RunConfig, place: str, own: str | None) -> RunConfig:
    """`run` with the template of the weights where that is asked for; a line where they have one and it goes by
    another. own: that template, by name or file. Errors: ValueError where none came with the weights."""
    from mega.core.text.templates import MODELS_OWN, TEMPLATES, template_text

    def text(name: str) -> str:
        return name if name in TEMPLATES or not Path(name).is_file() else template_text(name)

    asked = run.data.chat_template
    if asked == MODELS_OWN:
        if own is None:
            raise ValueError(
                f"--chat-template {asked}: nothing at {place} says what its conversations look like; "
                f"valid there: {', '.join(TEMPLATES)}, or a Jinja file"
            )
        return dataclasses.replace(run, data=dataclasses.replace(run.data, chat_template=own))
    if own is not None and text(asked) != text(own) and is_first_rank():
        print(
            f"mega: --chat-template {asked}: {place} has another of its own; --chat-template {MODELS_OWN} goes by it",
            file=sys.stderr,
        )
    return run
