"""Check and resolve a run, and open its inputs: tokenizer and data. This module does not import torch, and imports
numpy only when data are opened.

resolve_run    once in every process that the user has started: check, derive, and read the vocabulary
open_inputs    once in every training process, and in the launcher, which reports mistakes in files before any rank
               starts, and stores the sample order in the cache for the ranks
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega.core.architecture import inventory, padded
from mega.core.architecture.adapters import with_adapters
from mega.core.config.check import ANY_VOCABULARY, check
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.resolve import implied_tokenizer, metrics_file, model_alone, resolve, with_named_step
from mega.core.config.retriever import with_retriever
from mega.core.config.run import Options, RunConfig, entries, flag_of, options_with, updated, value_of
from mega.core.config.sections import ModelOptions, TokenizerConfig
from mega.core.config.unread import unread
from mega.core.files import check_source, url_of
from mega.core.processes.world import is_first_rank
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer, least_vocab
from mega.core.training.kinds import kind_of

if TYPE_CHECKING:
    from mega.core.checkpoint.own.source import StoredWeights
    from mega.core.data.build import Datasets


USUAL_RATES = {"adam": 0.1, "lamb": 1.0, "sgd": 10.0}
"""Optimizer -> its highest usual learning rate."""

SWEEPS = ("range-test", "range-exponential")
"""Schedules that deliberately increase the learning rate until training diverges."""


@dataclass(frozen=True)
class ResolvedRun:
    """A checked and resolved run, and messages for the user. The launcher sends this object to ranks by pickle.

    tokenizer: the run's tokenizer; None if the run has none, or if this process has not opened it.
    """

    run: RunConfig
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return ResolvedRun, (self.run, self.notes)


@dataclass(frozen=True)
class Inputs:
    """A resolved run with its open inputs."""

    run: RunConfig
    tokenizer: Tokenizer | None
    datasets: Datasets
    notes: tuple[str, ...]
    """Messages for the user."""

    def fingerprint(self) -> str:
        """Return a hash of config and tokenizer. The hash must be identical on all ranks."""
        text = json.dumps(dataclasses.asdict(self.run), sort_keys=True, default=str)
        tokens = self.tokenizer.fingerprint() if self.tokenizer is not None else ""
        return hashlib.sha256(f"{text}\n{tokens}".encode()).hexdigest()

    def level(self) -> str:
        """Return a hash of everything, except the weights, on which losses and gradient norms depend: the construction
        of batches, and the tokens."""
        names = [name for name in options_with(on_resume="noted") if entries()[name].section in _OF_BATCHES]
        values = {name: value_of(self.run, name) for name in (*names, "seq_length")}
        tokens = [[content.get("lengths"), content.get("content")] for content in self.datasets.corpora.values()]
        return hashlib.sha256(json.dumps([values, tokens], sort_keys=True).encode()).hexdigest()[:16]


_OF_BATCHES = "batch", "data", "masking"


def resolve_run(options: Options, world: int) -> ResolvedRun:
    """Check `options` for `world` ranks and derive the values that `options` leaves open.

    Errors: ValueError naming the flag or file, its value, the rule and the valid values.
    """
    notes: list[str] = []
    options = with_checkpoint_model(with_named_step(options), notes)
    notes += [*unread(options), *_rates(options)]
    check(options, world)
    _check_port(options)
    options = _in_steps(options, world)
    _check_adapters(options, notes)
    if options.checkpoint.save is None and not options.evaluation.skip_train:
        notes.append(
            f"without --save this run keeps no weights, only {metrics_file(options)}; to keep them give --save DIR, "
            "and --save-interval STEPS to save on the way too"
        )
    tokenizer = _tokenizer(implied_tokenizer(options.tokenizer, options.model.family))
    vocab = _vocabulary(options, tokenizer, notes)
    if not options.model.mask_padded_vocab:
        options = updated(options, {"vocab": _with_padding(options, vocab)})
    return ResolvedRun(resolve(options, world, vocab), tuple(notes), tokenizer)


def _check_port(options: Options) -> None:
    """Check that --metrics-port is free on the first rank's host. Errors: ValueError if the port is in use."""
    port = options.log.metrics_port
    if port is None or options.runtime.dry_run or not is_first_rank():
        return
    try:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", port))
    except OSError as error:
        raise ValueError(f"--metrics-port {port}: {error.strerror or error}; valid: a free port") from None


def _rates(options: Options) -> list[str]:
    """Return a message about a learning rate that is far above the optimizer's usual rates."""
    rate, rule = options.optimizer.lr, options.optimizer.optimizer
    if rule not in USUAL_RATES or rate is None or rate <= USUAL_RATES[rule] or options.schedule.lr_decay in SWEEPS:
        return []
    return [f"--lr {rate:g}: is far above what {rule} trains with, which is at most {USUAL_RATES[rule]:g}"]


def _in_steps(options: Options, world: int) -> Options:
    """Convert --epochs to steps. Errors: ValueError naming flag or file."""
    questions, epochs = kind_of(options).questions, options.finetuning.epochs
    if epochs is None or questions is None or options.evaluation.skip_train:
        return options
    from mega.core.data.labelled import pass_length

    count, batch = questions(options), resolve(options, world, ANY_VOCABULARY).batch.global_batch
    steps = epochs * pass_length(count, batch, options.finetuning.keep_last_batch) // batch
    if options.batch.samples is not None or options.batch.steps not in (None, steps):
        flag = "steps" if options.batch.samples is None else "samples"
        raise ValueError(f"--epochs {epochs}: is {steps} steps here and excludes {flag_of(flag)}")
    options = updated(options, {"steps": steps})
    check(options, world)
    return options


def _check_adapters(options: Options, notes: list[str]) -> None:
    """Check that there are weights to add adapters to, and that --lora-targets names linear layers. In a dry run,
    missing weights are reported in `notes`. Errors: ValueError."""
    if not options.model.lora_rank:
        return
    # Adapters of random weights are not saved, because their checkpoint would not contain these weights.
    measured = options.data.mock_data and options.checkpoint.save is None
    rank = options.model.lora_rank
    if options.runtime.dry_run and model_place(options) is None:
        notes.append(f"--lora-rank {rank}: training also needs --load, the weights that adapters are added to")
    elif not measured and model_place(options) is None:
        raise ValueError(f"--lora-rank {rank}: needs --load, the weights that adapters are added to")
    next(inventory(model_alone(options, ANY_VOCABULARY)))


def open_inputs(resolved: ResolvedRun) -> Inputs:
    """Open tokenizer and data of a resolved run. Errors: ValueError, like `resolve_run`."""
    from mega.core.data.build import Datasets

    run = resolved.run
    tokenizer = resolved.tokenizer or _tokenizer(run.tokenizer)
    idle = run.runtime.dry_run and run.finetuning.task == "lm" and not _has_data(run)
    datasets = Datasets() if idle else kind_of(run).datasets(run, tokenizer)
    return Inputs(run, tokenizer, datasets, (*resolved.notes, *datasets.notes))


def _tokenizer(options: TokenizerConfig) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    return build(**dataclasses.asdict(options))


def _vocabulary(options: Options, tokenizer: Tokenizer | None, notes: list[str]) -> int:
    vocab, place = options.model.vocab, model_place(options) if options.checkpoint.use_checkpoint_config else None
    if tokenizer is None:
        if vocab is None:
            raise ValueError("--vocab is missing: give it, or a tokenizer with --tokenizer and its files")
        return vocab
    if vocab is None:
        return tokenizer.vocab_size
    if vocab < (least := least_vocab(tokenizer, options.model.family)):
        size_words = f"{tokenizer.kind} has {tokenizer.vocab_size} tokens"
        if place is not None:
            raise ValueError(f"{' '.join(place)}: has a vocabulary of {vocab}, and {size_words}: not its tokenizer")
        raise ValueError(f"--vocab {vocab}: {size_words}; must be at least {least}")
    if vocab > tokenizer.vocab_size:
        which = f"--vocab {vocab}:" if place is None else f"{' '.join(place)}: has a vocabulary of {vocab}, and"
        notes.append(f"{which} the tokenizer has {tokenizer.vocab_size:,} tokens")
    return vocab


def _with_padding(options: Options, vocab: int) -> int:
    """Return the vocabulary size, including padding rows that count as tokens. This is the initial checkpoint's size if
    it is large enough for the tokenizer, so that the run can continue in any layout; otherwise the padded size."""
    from mega.core.checkpoint.own.model import model_of
    from mega.core.checkpoint.own.pieces import CheckpointError

    for place, source in weights_of(options):
        with contextlib.suppress(CheckpointError):  # damage is reported where weights are read
            stored = model_of(source.meta, place).vocab
            return stored if stored >= vocab else padded(vocab, options.parallel.tp, options.model.vocab_multiple)
    return padded(vocab, options.parallel.tp, options.model.vocab_multiple)


def weights_of(options: Options) -> Iterator[tuple[str, StoredWeights]]:
    """Yield (path, weights) of the checkpoints from which a run may start, in order of precedence, without reading
    tensors. Missing and unreadable checkpoints are omitted; their errors are reported when the checkpoint is loaded."""
    checkpoint = options.checkpoint
    for place in (checkpoint.save if checkpoint.resume == "auto" else checkpoint.resume, checkpoint.load):
        if place is None or (url_of(place) is None and not os.path.exists(place)):
            continue
        from mega.core.checkpoint.forms.open import open_weights
        from mega.core.checkpoint.own.pieces import CheckpointError

        with contextlib.suppress(CheckpointError):
            yield place, open_weights(place)


def _has_data(run: RunConfig) -> bool:
    data = run.data
    return bool(data.data_path or data.train_data or data.chat_data or data.mock_data)


def model_place(options: Options) -> tuple[str, str] | None:
    """Return (flag, path) of the checkpoint whose model --use-checkpoint-config uses: the weights of --load, otherwise
    the checkpoint from which the run resumes; None if --save contains none yet. Errors: ValueError."""
    checkpoint = with_named_step(options).checkpoint
    if checkpoint.load is not None:
        return "--load", checkpoint.load
    if checkpoint.resume not in (None, "auto"):
        return "--resume", str(checkpoint.resume)
    if checkpoint.resume is None or checkpoint.save is None:
        return None
    from mega.core.checkpoint.own.store import store_at

    return ("--save", checkpoint.save) if store_at(checkpoint.save).steps() else None


def _without_checkpoint(options: Options, notes: list[str]) -> Options:
    """Return `options` without --use-checkpoint-config, for a run whose --save contains no checkpoint yet. Errors:
    ValueError if the options do not describe a model."""
    save, model = options.checkpoint.save, options.model
    if options.checkpoint.resume is None or save is None:
        return options  # `check` rejects these options
    words = f"--use-checkpoint-config: there is no checkpoint under {save} yet"
    if None in (model.layers, model.hidden, model.heads):
        raise ValueError(f"{words}; the first start needs --model, or --layers, --hidden and --heads")
    notes.append(f"{words}, so the model is that of the other options")
    return updated(options, {"use_checkpoint_config": False})


def with_checkpoint_model(options: Options, notes: list[str]) -> Options:
    """With --use-checkpoint-config, return `options` with the model of the checkpoint (`model_place`) and the sample
    kind of the model's family. Model options that a resumed run may change take precedence over the checkpoint; other
    options are ignored, with a message. If --save contains no checkpoint yet, the model is that of `options`, with a
    message. Errors: ValueError."""
    if not options.checkpoint.use_checkpoint_config:
        return options
    typed, place = options.model, model_place(options)
    if place is None:
        return _without_checkpoint(options, notes)
    check_source(*place)
    from mega.core.checkpoint.forms.open import open_weights
    from mega.core.checkpoint.own.model import model_of

    source = open_weights(place[1])  # errors are ignored here, because a later read of the weights reports them
    model, default = model_of(source.meta, place[1]), ModelOptions()
    if not model.lora_rank:
        model = with_adapters(model, typed)
    if typed.retriever and not model.retriever:
        model = with_retriever(model, typed)
    differing = {
        field.name: value
        for field in dataclasses.fields(ModelOptions)
        if (value := getattr(typed, field.name)) not in (getattr(default, field.name), getattr(model, field.name))
    }
    allowed = {name: differing[name] for name in options_with(on_resume="noted") if name in differing}
    if ignored := [f"{flag_of(name)} {value}" for name, value in differing.items() if name not in allowed]:
        notes.append(f"--use-checkpoint-config: the checkpoint's model counts, and not {', '.join(ignored)}")
    values = {**dataclasses.asdict(model), **allowed}
    if options.masking.sample_kind == "gpt":  # apply the default that --family would have set
        values["sample_kind"] = FAMILY_DEFAULTS[model.family].values.get("sample_kind", "gpt")
    return updated(options, values)
