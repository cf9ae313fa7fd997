"""Everything that can be found wrong before a rank starts: tokenizer, vocabulary, data. No torch.

The launcher's own process runs `prepare` first, so a mistake is told once and before anything starts, and the cache
of the sample order is filled; each rank then runs it again and finds the cache warm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.config.check import check
from mega.core.config.resolve import lengths, resolve
from mega.core.config.run import RunConfig, flag_of
from mega.core.config.sections import ModelConfig
from mega.core.inventory import padded
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.data.build import Datasets


@dataclass(frozen=True)
class Prepared:
    """A run with nothing left to derive, and its inputs. `notes` are lines for the user."""

    run: RunConfig
    tokenizer: Tokenizer | None
    datasets: Datasets
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        """Hash of what every rank must agree on: the config but for where this rank runs, and the tokenizer."""
        text = json.dumps(dataclasses.asdict(self.run), sort_keys=True, default=str)
        tokens = self.tokenizer.fingerprint() if self.tokenizer is not None else ""
        return hashlib.sha256(f"{text}\n{tokens}".encode()).hexdigest()


def prepare(run: RunConfig, world: int) -> Prepared:
    """Check and complete `run` for `world` ranks, open its tokenizer and data.

    Errors: ValueError naming the flag or file, its value, the rule and the valid values.
    """
    from mega.core.data.build import Datasets

    run, tokenizer, notes = complete(run, world)
    datasets = Datasets() if run.runtime.dry_run and not _has_data(run) else _datasets(run, tokenizer)
    return Prepared(run, tokenizer, datasets, (*notes, *datasets.notes))


def complete(run: RunConfig, world: int) -> tuple[RunConfig, Tokenizer | None, tuple[str, ...]]:
    """The checked run with nothing left to derive, its tokenizer, and lines for the user; no data, so no numpy.

    Errors: ValueError, as of `prepare`.
    """
    check(run, world)
    notes: list[str] = []
    if run.checkpoint.use_checkpoint_config:
        run = dataclasses.replace(run, model=_checkpoint_model(run, notes))
        check(run, world)
    resolved = resolve(run, world)
    tokenizer = _tokenizer(resolved)
    vocab = _vocabulary(resolved, tokenizer, notes)
    if not run.model.mask_padded_vocab:
        vocab = padded(vocab, run.parallel.tp, run.model.vocab_multiple)
    run = resolve(dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab)), world)
    return run, tokenizer, tuple(notes)


def _tokenizer(run: RunConfig) -> Tokenizer | None:
    options = run.tokenizer
    if options.tokenizer is None:
        return None
    return build(**{field.name: getattr(options, field.name) for field in dataclasses.fields(options)})


def _vocabulary(run: RunConfig, tokenizer: Tokenizer | None, notes: list[str]) -> int:
    given = run.model.vocab
    if tokenizer is None:
        if given is None:
            raise ValueError("--vocab is missing: give it, or a tokenizer with --tokenizer and its files")
        return given
    if given is None:
        return tokenizer.vocab_size
    if given < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab {given}: {tokenizer.kind} has {tokenizer.vocab_size} tokens; "
            f"must be at least {tokenizer.vocab_size}"
        )
    if given > tokenizer.vocab_size:
        notes.append(f"vocabulary of {given}, of which the tokenizer uses {tokenizer.vocab_size}")
    return given


def _has_data(run: RunConfig) -> bool:
    data = run.data
    return bool(data.data_path or data.train_data or data.chat_data or data.mock_data)


def _datasets(run: RunConfig, tokenizer: Tokenizer | None) -> Datasets:
    from mega.core.data.build import build_datasets, samples_requested

    batch, evaluation = run.batch, run.evaluation
    assert batch.global_batch is not None and batch.seq_length is not None and run.model.vocab is not None
    requested = samples_requested(
        steps=lengths(run).steps,
        global_batch=batch.global_batch,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        train_samples=batch.samples,
    )
    if evaluation.skip_train:
        requested = (0, *requested[1:])
    return build_datasets(
        run.data,
        seq_length=batch.seq_length,
        seed=run.runtime.seed,
        vocab=run.model.vocab,
        samples=requested,
        tokenizer=tokenizer,
        masking=run.masking,
    )


def _checkpoint_model(run: RunConfig, notes: list[str]) -> ModelConfig:
    """The checkpoint's model; of what the user says of the model, dropout counts, and what does not is told."""
    from mega.core.checkpoint.own.model import model_of
    from mega.core.checkpoint.own.store import locate

    assert run.checkpoint.load is not None
    origin = locate(Path(run.checkpoint.load), report=lambda line: None)  # told when weights are read
    model, silent = model_of(origin.meta, run.checkpoint.load), ModelConfig()
    said = {
        field.name: value
        for field in dataclasses.fields(ModelConfig)
        if (value := getattr(run.model, field.name)) not in (getattr(silent, field.name), getattr(model, field.name))
    }
    kept = {name: value for name, value in said.items() if name in ("hidden_dropout", "attention_dropout")}
    if left := [f"{flag_of(name)} {value}" for name, value in said.items() if name not in kept]:
        notes.append(f"--use-checkpoint-config: the checkpoint's model counts, and not {', '.join(left)}")
    return dataclasses.replace(model, **kept)
