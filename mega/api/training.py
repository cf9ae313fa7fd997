"""Complete training runs: pretraining, and finetuning from existing weights. Importing this module does not import
torch.

The commands `mega pretrain` and `mega finetune` also call `resolved`, `with_stored_options` and `from_weights` of this
module.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mega.api.config import with_options
from mega.core.config.resolve import implied_tokenizer, with_named_step
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
"""A function that receives a message for the user."""


def pretrain(run: Options, *, verbose: bool = False, **options: object) -> TrainingResult:
    """Train from scratch, or resume, to the last step, with checkpoints and metrics, as `mega pretrain` does.

    The run uses this process, or `nproc` local ranks, which the function starts, or the ranks of torchrun, mpirun, srun
    or `mega.launch`. Every rank returns the same result. run: options from `mega.config`; keyword arguments override
    them. verbose: whether to print what `mega pretrain` prints.

    Errors: ValueError naming the option or file, its value and the rule, before any rank starts; FloatingPointError if
    the loss is NaN or infinite; RuntimeError and OSError for failures during training.
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

        open_inputs(started)  # reports mistakes in files before any rank starts
        return launch(_train, started, verbose, ranks=size)[0]
    return _train(started, verbose)


def finetune(run: Options, *, verbose: bool = False, **options: object) -> TrainingResult:
    """Train from the weights at `load`, as `mega finetune` does, starting at step 0 with new optimizer state.

    The arguments and the result are those of `pretrain`, but the weights determine the model and the tokenizer. Errors:
    as in `pretrain`.
    """
    run_options = pretrained(with_options(run, options))
    check_begin(run_options, note if verbose else discard)
    return pretrain(from_weights(run_options), verbose=verbose)


def check_here(options: Options) -> None:
    """Check that all options are supported in Python. Errors: ValueError naming options that are supported only on the
    command line."""
    supervision, runtime = options.supervision, options.runtime
    if supervision.max_restarts or supervision.hosts:
        raise ValueError("max_restarts, hosts: ranks are started again by `mega pretrain` alone; leave them out")
    if runtime.dry_run or runtime.world is not None:
        raise ValueError("dry_run, world: nothing would be trained; mega.estimate plans a run")


def _train(started: ResolvedRun, verbose: bool) -> TrainingResult:
    from mega.core.processes.connect import disconnect
    from mega.core.training.start.rank import train

    atexit.register(disconnect)  # a later run in this process may use the same process group
    return train(started, quiet=not verbose)


# The start of `mega pretrain` and `mega finetune`


def resolved(options: Options, size: int, note: Note) -> ResolvedRun:
    """Return the resolved and checked run on `size` ranks. note: receives messages for the user about the weights or
    files.

    Errors: ValueError naming the flag or file, its value, the rule and the valid values.
    """
    from mega.core.training.start.inputs import resolve_run

    return resolve_run(with_stored_options(options, note), size)


def with_stored_options(options: Options, note: Note = discard) -> Options:
    """Add options for the tokenizer and, for training on conversations, the chat template of the initial weights. If no
    weights include a tokenizer, that of the token files is used. Errors: ValueError if flags name a tokenizer that
    differs from the weights' tokenizer, or a template that the weights do not have."""
    from mega.core.training.start.inputs import weights_of

    options = with_named_step(options)
    weights = next(weights_of(options), None)
    if weights is None:
        return _with_tokenizer_of_data(options, note)
    from mega.core.inference.loading.identity import chosen_template

    (path, source), is_conversation = weights, bool(options.data.chat_data or options.finetuning.dpo_data)
    stored_options, lines = _tokenizer(options, path, source)
    if is_conversation:
        template = chosen_template(_verb(options), source, path, options.data.chat_template)
        stored_options["chat_template"] = template.value
        lines += template.notes
    for line in lines:
        note(line)
    options = updated(options, stored_options)
    if options.tokenizer == TokenizerConfig() and _carries_none(source):
        return _with_tokenizer_of_data(options, note, _resumed_vocab(options, path, source))
    return options


def _resumed_vocab(options: Options, place: str, source: StoredWeights) -> int | None:
    """Return the vocabulary size of the run that resumes from the weights at `place`; None if the weights come from
    another run."""
    from mega.core.checkpoint.own.model import model_of

    checkpoint = options.checkpoint
    if place != (checkpoint.save if checkpoint.resume == "auto" else checkpoint.resume):
        return None
    return min(filter(None, (options.model.vocab, model_of(source.meta, place).vocab)))


def _with_tokenizer_of_data(options: Options, note: Note, resumed_vocab: int | None = None) -> Options:
    """Add options for the tokenizer recorded with the token files, if flags set none. If the size of the vocabulary is
    known without the tokenizer, a tokenizer that cannot be opened is reported and omitted.

    resumed_vocab: size of the vocabulary of a run that resumes and has no tokenizer. Such a run continues without a
    tokenizer if it started with a smaller vocabulary, which earlier versions accepted. Errors: ValueError.
    """
    data, typed_options = options.data, dataclasses.asdict(options.tokenizer)
    words = data.data_path or data.train_data
    if not words or typed_options != _UNSET:
        return options
    from mega.core.config.corpora import expand, is_number
    from mega.core.data.indexed import exists, noted_tokenizer
    from mega.core.text.build import build, missing_file
    from mega.core.text.tokenizer import least_vocab

    # All files of a blend must have the same tokenizer, which is checked later, so the first file is enough here.
    prefix = next((word for word in expand(words, data.corpora) if not is_number(word) and exists(word)), None)
    noted = {} if prefix is None else noted_tokenizer(prefix)
    if not noted or not noted.keys() <= typed_options.keys():
        return options
    kind, missing = noted.get("tokenizer"), missing_file(noted)
    if missing:
        note(f"{prefix}: was made with {kind} of {missing}, which is not there any more")
        return options
    with_tokenizer = updated(options, noted)
    if options.model.vocab is not None or options.checkpoint.use_checkpoint_config:
        try:
            tokenizer = build(**dataclasses.asdict(implied_tokenizer(with_tokenizer.tokenizer, options.model.family)))
        except ValueError as error:
            note(f"{prefix}: its tokenizer cannot be opened, so checkpoints carry none: {error}")
            return options
        if resumed_vocab is not None and resumed_vocab < least_vocab(tokenizer, options.model.family):
            sizes = f"has {tokenizer.vocab_size} tokens, and the run that resumes a vocabulary of {resumed_vocab}"
            note(f"{prefix}: its tokenizer {sizes}, so checkpoints carry none")
            return options
    note(f"{prefix}: its tokenizer is taken, {kind}")
    return with_tokenizer


def _carries_none(source: StoredWeights) -> bool:
    """Whether weights include no tokenizer, not even one in an unsupported format."""
    from mega.core.checkpoint.forms.companions import unread_tokenizer
    from mega.core.inference.loading.load import tokenizer_section

    return tokenizer_section(source) is None and unread_tokenizer(source.attachments) is None


def _tokenizer(options: Options, place: str, source: StoredWeights) -> tuple[dict[str, object], list[str]]:
    """Return (tokenizer option -> value, messages for the user). The tokenizer is the one given by flags, or else that
    of the weights at `place`. If flags do not include --tokenizer, flags such as --vocab-extra-ids modify the weights'
    tokenizer. Errors: ValueError if flags name a tokenizer that differs from the weights' tokenizer."""
    from mega.core.checkpoint.own.model import model_of
    from mega.core.inference.loading.identity import check_tokenizer_flags
    from mega.core.inference.loading.load import tokenizer_section
    from mega.core.text.build import build

    tokenizer_options = dataclasses.asdict(implied_tokenizer(options.tokenizer, model_of(source.meta, place).family))
    typed_options = {name: value for name, value in tokenizer_options.items() if value != _UNSET[name]}
    if tokenizer_options["tokenizer"] is None:
        section = tokenizer_section(source)
        if section is None:
            return {}, []
        tokenizer_options = {**_UNSET, **section, **typed_options}
    try:
        tokenizer = build(**tokenizer_options)
    except ValueError as error:
        if typed_options:
            return {}, []  # reported when the run is checked
        if not _reads_tokens(options):
            raise
        return {}, [f"{place}: its tokenizer cannot be opened, so token files are not compared with it: {error}"]
    allowed = options.data.allow_tokenizer_mismatch
    lines = check_tokenizer_flags(_verb(options), source, place, tokenizer, allowed=allowed) if typed_options else []
    return tokenizer_options, lines


def _verb(options: Options) -> str:
    return "finetune" if options.checkpoint.finetune else "pretrain"


def _reads_tokens(options: Options) -> bool:
    """Whether the run reads token files, which need no tokenizer."""
    return options.finetuning.task == "lm" and not (options.data.chat_data or options.finetuning.dpo_data)


def check_begin(options: Options, note: Note) -> None:
    """Check that the source of the initial weights is given. Errors: ValueError if --load is missing, unless the task
    adds a new head."""
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
    """Replace --pretrained-checkpoint with --load. With both flags, Megatron-LM first tries to continue from --load, so
    a --load that equals --save becomes --resume auto.

    Errors: ValueError if --load differs from --save.
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
    """Set the options that finetuning implies. A run whose --load equals --save resumes.

    Errors: ValueError if the source of the weights does not exist."""
    options = with_named_step(options)
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
