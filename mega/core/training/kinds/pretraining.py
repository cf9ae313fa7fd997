"""Language modelling as a kind of task: reads token files, conversations or random tokens, each token once per
epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mega.core.architecture import architecture
from mega.core.config.resolve import lengths
from mega.core.config.run import RunConfig
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.kinds.kind import TaskKind

if TYPE_CHECKING:
    from mega.core.data.build import Check, Datasets
    from mega.core.data.phases import BlendPhase
    from mega.core.parallel.mesh import Mesh
    from mega.core.training.kinds.task import Task


def datasets(run: RunConfig, tokenizer: Tokenizer | None, phases: Sequence[BlendPhase] = ()) -> Datasets:
    """Return the datasets given by --data-path and similar flags, with the neighbours of their chunks if --retro is
    given.

    phases: earlier blends of the training set. Errors: ValueError naming flag and file.
    """
    if run.data.retro is None:
        return plain_datasets(run, tokenizer, phases)
    from pathlib import Path

    from mega.core.data.neighbours import manifest_for, query_folder, with_neighbours

    model, folder = run.model, Path(run.data.retro)
    manifest = manifest_for(folder, model.retro_chunk_length, tokenizer)
    return with_neighbours(
        plain_datasets(run, tokenizer, phases, partial(query_folder, folder)),
        folder,
        manifest,
        each=model.retro_neighbours,
        retrieved=model.retro_retrieved_chunks,
        crossing=model.retro_cross_documents,
        eod_loss=run.data.eod_mask_loss,
    )


def plain_datasets(
    run: RunConfig, tokenizer: Tokenizer | None, phases: Sequence[BlendPhase] = (), check: Check | None = None
) -> Datasets:
    """Return the datasets without neighbours. check: see `build_datasets`."""
    from mega.core.data.build import build_datasets

    batch = run.batch
    return build_datasets(
        run.data,
        seq_length=batch.seq_length,
        seed=run.runtime.seed,
        vocab=architecture(run.model).input.vocab,
        samples=requested(run),
        tokenizer=tokenizer,
        masking=run.masking,
        pairs=run.model.binary_head,
        by_corpus=run.evaluation.valid_by_corpus,
        phases=phases,
        check=check,
        defer=run.runtime.dry_run and run.data.retro is None,  # neighbours need the order
    )


def former_blends(run: RunConfig, meta: Mapping[str, Any]) -> tuple[BlendPhase, ...]:
    """Return the earlier blends of the training set, from the metadata of the checkpoint from which the run resumes."""
    from mega.core.config.corpora import expand
    from mega.core.data.build import parse_blend
    from mega.core.data.phases import BlendPhase

    past = tuple(map(BlendPhase.from_json, meta.get("blends", ())))
    sections = meta.get("config", {})
    data, batch = sections.get("data", {}), sections.get("batch", {})
    stored, current = data.get("data_path") or data.get("train_data"), run.data.data_path or run.data.train_data
    if (
        not stored
        or not current
        or "cyclic" in (run.data.order, data.get("order"))
        or run.masking.sample_kind == "tfrecords"
    ):
        return past
    stored_blend = parse_blend("--data-path", expand(stored, data.get("corpora")))
    if stored_blend == parse_blend("--data-path", expand(current, run.data.corpora)):
        return past
    samples = batch.get("samples") or (batch.get("steps") or 0) * (batch.get("global_batch") or 0)
    return (*past, BlendPhase(int(meta["progress"]["consumed"]), int(samples), stored_blend))


def requested(run: RunConfig) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test samples that a run may read."""
    from mega.core.data.build import samples_requested

    batch, evaluation = run.batch, run.evaluation
    counts = samples_requested(
        steps=lengths(run).steps,
        global_batch=batch.global_batch,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        train_samples=batch.samples,
    )
    return (0, *counts[1:]) if evaluation.skip_train else counts


def task(run: RunConfig, data: Datasets, tokenizer: Tokenizer | None, mesh: Mesh) -> Task:
    """Return this data rank's shard of the datasets of a run."""
    from mega.core.data.batches import Batches
    from mega.core.data.dataset import Dataset
    from mega.core.family import collate
    from mega.core.training.kinds.task import HeldOut, Task

    micro_batch, vocab, options = run.batch.micro_batch, architecture(run.model).input.vocab, run.data

    def batches(dataset: Dataset) -> Batches:
        return Batches(
            dataset,
            micro_batch=micro_batch,
            vocab=vocab,
            dp_index=mesh.dp.index,
            dp_size=mesh.dp.size,
            eod=tokenizer.eod if tokenizer is not None else None,
            order="cyclic" if options.order == "cyclic" else "single",
            sharding=options.data_sharding,
            eod_mask_loss=options.eod_mask_loss,
            reset_positions=options.reset_positions,
            reset_attention=options.reset_attention,
            read_ahead=options.data_workers > 0,
            collate=collate(run),
        )

    held_out = [] if data.valid is None else [HeldOut("valid", batches(data.valid), continues=run.data.retro is None)]
    return Task(
        None if data.train is None else batches(data.train),
        (*held_out, *(HeldOut(name, batches(dataset)) for name, dataset in data.named.items())),
        () if data.test is None else (HeldOut("test", batches(data.test)),),
    )


KIND = TaskKind(datasets, task)
