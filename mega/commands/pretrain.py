"""`mega pretrain`: check everything, then train, on as many ranks as the launcher or --nproc gives."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mega.core.config.run import Options, RunConfig, updated
from mega.core.config.sections import TokenizerConfig
from mega.core.processes.world import is_first_rank, ranks, supervised_ranks, world_from_env

if TYPE_CHECKING:
    from mega.core.checkpoint.own.source import StoredWeights

_UNSET = dataclasses.asdict(TokenizerConfig())


def run(options: Options) -> int:
    """Train a model from scratch, or resume from a checkpoint.

    Alone with --nproc, under torchrun, mpirun or a bare srun. Every flag also answers to its Megatron-LM
    spelling; --model, then --config, then flags define the run, each above the one before.

    Exit codes: 0 at the end, or where --exit-interval or --exit-minutes ended it; 1 for a failure, 2 for a mistake;
    130, 143, 138, 129 where Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP stopped it, after saving.
    """
    from mega.core.training.start.inputs import open_inputs, resolve_run

    world, runtime, supervision = world_from_env(), options.runtime, options.supervision
    supervised = bool(supervision.max_restarts or supervision.hosts) and runtime.world is None
    if supervised:
        size = supervised_ranks(world, runtime.nproc or 1, supervision.hosts)
    else:
        size = ranks(world, runtime.nproc, runtime.world)
    resolved = resolve_run(_as_the_weights(options), size)  # in a moment, before anything heavy is imported
    if runtime.dry_run:
        if is_first_rank():
            from mega.core.training.start.dry_run import dry_run

            dry_run(open_inputs(resolved), size)
        return 0
    if supervised or (world.source == "alone" and size > 1):
        inputs = open_inputs(resolved)  # a mistake in a file is reported once, before any rank starts
        _report_shortage(resolved.run, runtime.nproc or 1)
        if supervised:
            from mega.core.training.start.equal import alike

            return _supervise(options, resolved, alike(options, inputs), size)
        from mega.core.processes.launch import launch
        from mega.core.training.start.rank import pretrain

        return launch(size, pretrain, resolved)
    if world.source == "alone":
        _report_shortage(resolved.run, 1)
    from mega.core.training.start.rank import pretrain

    return pretrain(resolved)


def _report_shortage(run: RunConfig, local_ranks: int) -> None:
    """Before anything is allocated, on stderr: what this host has too little of."""
    from mega.core.estimate.host import crowded

    for line in crowded(run, local_ranks):
        print(f"mega: {line}", file=sys.stderr, flush=True)


def _supervise(options: Options, resolved: Any, alike: Mapping[str, str], size: int) -> int:
    """Run the ranks of this host, again after a failure that may pass. alike: on all hosts."""
    from mega.core.checkpoint.own.store import store_at
    from mega.core.processes.hosts import supervise_hosts
    from mega.core.processes.restarts import Job, supervise
    from mega.core.training.start.inputs import resolve_run
    from mega.core.training.start.rank import pretrain

    save, nproc, supervision = options.checkpoint.save, options.runtime.nproc or 1, options.supervision
    resumed = resolved
    if save is not None:  # what the run itself has saved is read whole, whatever is read at its beginning
        resuming = updated(options, {"resume": "auto", "load_optim": True})
        resumed = resolve_run(_as_the_weights(resuming), size)

    newest = [max(store_at(save).steps(), default=0)] if save is not None else [0]

    def saved() -> int:
        with contextlib.suppress(OSError, ValueError):  # of a store that is away for a moment
            newest.extend(store_at(save).steps()[-1:] if save is not None else ())
        return newest[-1]

    args, copies = lambda resumes: (resumed if resumes else resolved,), bool(supervision.peer_copy_interval)
    job = Job(pretrain, args, saved, copies, alike)
    if supervision.hosts is None:
        return supervise(nproc, supervision.max_restarts, job)
    minutes = options.runtime.timeout_minutes
    return supervise_hosts(supervision.hosts, nproc, supervision.max_restarts, minutes, job)


def _as_the_weights(options: Options) -> Options:
    """With the tokenizer of the weights that the run begins with, against which one that flags name is held, and with
    the chat template by which it converses. Errors: ValueError where flags name another tokenizer, or no such template
    came with the weights."""
    from mega.core.training.start.inputs import weights_of

    weights = next(weights_of(options), None)
    if weights is None:
        return _as_the_data(options)
    from mega.core.inference.loading.identity import chosen_template

    (place, source), talks = weights, bool(options.data.chat_data or options.finetuning.dpo_data)
    found, lines = _tokenizer(options, place, source)
    if talks:
        template = chosen_template(_verb(options), source, place, options.data.chat_template)
        found["chat_template"] = template.value
        lines += template.notes
    for line in lines if is_first_rank() else ():
        print(f"mega: {line}", file=sys.stderr)
    return updated(options, found)


def _as_the_data(options: Options) -> Options:
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
    if is_first_rank():
        line = (
            f"was made with {kind} of {gone}, which is not there any more"
            if gone
            else f"its tokenizer is taken, {kind}"
        )
        print(f"mega: {prefix}: {line}", file=sys.stderr)
    return options if gone else updated(options, found)


def _tokenizer(options: Options, place: str, source: StoredWeights) -> tuple[dict[str, Any], list[str]]:
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
