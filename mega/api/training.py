"""Whole runs: pretraining, and finetuning from the weights of another run. No torch before a run starts.

`mega pretrain` and `mega finetune` begin with `resolved`, `with_stored_options` and `from_weights` of this file too.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mega.api.config import with_options
from mega.core.config.run import Options, updated
from mega.core.config.sections import LABELLED, TokenizerConfig
from mega.core.files import check_source
from mega.core.processes.world import note, ranks, world_from_env
from mega.core.terminal import discard

if TYPE_CHECKING:
    from mega.core.checkpoint.own.source import StoredWeights
    from mega.core.training.start.inputs import ResolvedRun
    from mega.core.training.start.rank import TrainingResult

_UNSET = dataclasses.asdict(TokenizerConfig())

Note = Callable[[str], None]
"""Takes a line for the user."""


def pretrain(run: Options, *, verbose: bool = False, **options: object) -> TrainingResult:
    """Train from scratch, or resume, as `mega pretrain` does: to the last step, with its checkpoints and metrics.

    run: of `mega.config`; keywords are above it. As one process, on `nproc` local ranks, or as one rank of torchrun,
    mpirun, srun or `mega.launch`; the result is the same on every rank. verbose: print what `mega pretrain` prints.

    Errors: ValueError naming the option or file, its value and the rule, before any rank starts; FloatingPointError
    where the loss is NaN or infinite; RuntimeError and OSError for what fails on the way.
    """
    options_of_run = with_options(run, options)
    check_here(options_of_run)
    world = world_from_env()
    size = ranks(world, options_of_run.runtime.nproc)
    if not verbose:
        options_of_run = updated(options_of_run, {"progress": False})
    started = resolved(options_of_run, size, note if verbose else discard)
    if world.source == "alone" and size > 1:
        from mega.api.ranks import launch
        from mega.core.training.start.inputs import open_inputs

        open_inputs(started)  # a mistake in a file is reported before any rank starts
        return launch(_train, started, verbose, ranks=size)[0]
    return _train(started, verbose)


def finetune(run: Options, *, verbose: bool = False, **options: object) -> TrainingResult:
    """Train from the weights at `load`, as `mega finetune` does; the step counter and the optimizer begin afresh.

    As `pretrain`, with the model and the tokenizer of those weights. Errors: as of `pretrain`.
    """
    chosen = pretrained(with_options(run, options))
    check_begin(chosen, note if verbose else discard)
    return pretrain(from_weights(chosen), verbose=verbose)


def check_here(options: Options) -> None:
    """Errors: ValueError naming options of a run that no function of Python trains."""
    supervision, runtime = options.supervision, options.runtime
    if supervision.max_restarts or supervision.hosts:
        raise ValueError("max_restarts, hosts: ranks are started again by `mega pretrain` alone; leave them out")
    if runtime.dry_run or runtime.world is not None:
        raise ValueError("dry_run, world: nothing would be trained; mega.estimate plans a run")


def _train(started: ResolvedRun, verbose: bool) -> TrainingResult:
    from mega.core.processes.connect import disconnect
    from mega.core.training.start.rank import train

    atexit.register(disconnect)  # a process group outlives this run: others of this process may use it
    return train(started, quiet=not verbose)


# What both commands begin with


def resolved(options: Options, size: int, note: Note) -> ResolvedRun:
    """The checked run of `size` ranks. note: takes lines about the weights or files that say more than the options.

    Errors: ValueError naming the flag or file, its value, the rule and the valid values.
    """
    from mega.core.training.start.inputs import resolve_run

    return resolve_run(with_stored_options(options, note), size)


def with_stored_options(options: Options, note: Note = discard) -> Options:
    """With the tokenizer of the weights that the run begins with, against which one that flags name is held, and with
    the chat template by which it converses. Errors: ValueError where flags name another tokenizer, or no such template
    came with the weights."""
    from mega.core.training.start.inputs import weights_of

    weights = next(weights_of(options), None)
    if weights is None:
        return _as_the_data(options, note)
    from mega.core.inference.loading.identity import chosen_template

    (place, source), talks = weights, bool(options.data.chat_data or options.finetuning.dpo_data)
    found, lines = _tokenizer(options, place, source)
    if talks:
        template = chosen_template(_verb(options), source, place, options.data.chat_template)
        found["chat_template"] = template.value
        lines += template.notes
    for line in lines:
        note(line)
    return updated(options, found)


def _as_the_data(options: Options, note: Note) -> Options:
    """With the tokenizer that made the token files, where flags name none and no vocabulary, and the files note it."""
    data, named = options.data, dataclasses.asdict(options.tokenizer)
    words = data.data_path or data.train_data
    if not words or named != _UNSET or options.model.vocab is not None or options.checkpoint.use_checkpoint_config:
        return options
    from mega.core.config.corpora import expand, is_number
    from mega.core.data.indexed import exists, noted_tokenizer
    from mega.core.text.build import missing_file

    prefix = next((word for word in expand(words, data.corpora) if not is_number(word) and exists(word)), None)
    found = {} if prefix is None else noted_tokenizer(prefix)
    if not found or not found.keys() <= named.keys():
        return options
    kind, gone = found.get("tokenizer"), missing_file(found)
    note(
        f"{prefix}: was made with {kind} of {gone}, which is not there any more"
        if gone
        else f"{prefix}: its tokenizer is taken, {kind}"
    )
    return options if gone else updated(options, found)


def _tokenizer(options: Options, place: str, source: StoredWeights) -> tuple[dict[str, object], list[str]]:
    """The options of the tokenizer that flags name, else of that of the weights at `place`, by name, and lines for the
    user. Flags that name no kind, such as --vocab-extra-ids, change that of the weights. Errors: ValueError where it is
    another one."""
    from mega.core.checkpoint.own.model import model_of
    from mega.core.config.resolve import implied_tokenizer
    from mega.core.inference.loading.identity import check_tokenizer_flags
    from mega.core.inference.loading.load import tokenizer_section
    from mega.core.text.build import build

    named = dataclasses.asdict(implied_tokenizer(options.tokenizer, model_of(source.meta, place).family))
    given = {name: value for name, value in named.items() if value != _UNSET[name]}
    if named["tokenizer"] is None:
        section = tokenizer_section(source)
        if section is None:
            return {}, []
        named = {**_UNSET, **section, **given}
    try:
        tokenizer = build(**named)
    except ValueError as error:
        if given:
            return {}, []  # reported where the run is checked
        if not _reads_tokens(options):
            raise
        return {}, [f"{place}: its tokenizer cannot be opened, so token files are not compared with it: {error}"]
    allowed = options.data.allow_tokenizer_mismatch
    lines = check_tokenizer_flags(_verb(options), source, place, tokenizer, allowed=allowed) if given else []
    return named, lines


def _verb(options: Options) -> str:
    return "finetune" if options.checkpoint.finetune else "pretrain"


def _reads_tokens(options: Options) -> bool:
    """Whether its data are token files, for which no tokenizer is needed."""
    return options.finetuning.task == "lm" and not (options.data.chat_data or options.finetuning.dpo_data)


def check_begin(options: Options, note: Note) -> None:
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
    note("without --load all weights begin at random")


def pretrained(options: Options) -> Options:
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


def from_weights(options: Options) -> Options:
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
