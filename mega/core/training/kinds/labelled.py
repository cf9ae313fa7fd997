"""Labelled rows as a kind of task: training reads all of --train-data together, and validation reads each set of
--valid-data separately and completely.

A `Format` (data/labelled.py) describes the files; `kinds/__init__.py` creates a kind of task from each format.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.config.run import Options, RunConfig
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.kinds.kind import TaskKind
from mega.core.training.kinds.pretraining import requested

if TYPE_CHECKING:
    from mega.core.data.build import Datasets
    from mega.core.data.labelled import Format, LabelledSet
    from mega.core.parallel.mesh import Mesh
    from mega.core.training.kinds.task import Task


def kind(form: Format) -> TaskKind:
    """Return the kind of task for files in the format `form`."""
    return TaskKind(partial(_datasets, form), task, questions=partial(_questions, form))


def _set(
    form: Format, run: RunConfig, tokenizer: Tokenizer | None, flag: str, path: str, notes: list[str]
) -> LabelledSet:
    from mega.core.data.labelled import labelled_set

    if tokenizer is None:
        raise ValueError(f"--task {form.name}: needs a tokenizer; give --tokenizer and its files")
    cache, length = run.data.data_cache, run.batch.seq_length
    rows = labelled_set(
        flag, path, form, tokenizer, seq_length=length, cache=Path(cache) if cache else None, note=notes.append
    )
    if (rows.labels < 0).any():
        raise ValueError(f"{flag} {path}: has no labels; `mega eval --task {form.name}` predicts them")
    return rows


def _questions(form: Format, options: Options) -> int:
    """Return the number of rows in --train-data. Errors: ValueError naming flag, file and line."""
    return sum(1 for path in options.data.train_data for _ in form.read("--train-data", Path(path), lambda note: None))


def _datasets(form: Format, run: RunConfig, tokenizer: Tokenizer | None) -> Datasets:
    """Return the datasets of a run. Errors: ValueError naming flag, file and line."""
    from mega.core.data.build import Datasets
    from mega.core.data.labelled import LabelledDataset, set_names

    notes: list[str] = []
    batch, samples = run.batch.global_batch, requested(run)[0]
    train, corpora = None, {}
    if samples:
        sets = [_set(form, run, tokenizer, "--train-data", path, notes) for path in run.data.train_data]
        corpora = {path: {"content": one.digest} for path, one in zip(run.data.train_data, sets, strict=True)}
        keep = run.finetuning.keep_last_batch
        train = LabelledDataset(sets, samples=samples, batch=batch, seed=run.runtime.seed, keep_last=keep)
        notes.append(f"{train.questions} questions to train on, of which a pass reads {train.passed}")
    held_out = set_names(run.data.valid_data) if run.evaluation.eval_iters else {}
    held_out_sets = {}
    for name, path in held_out.items():
        one = _set(form, run, tokenizer, "--valid-data", path, notes)
        held_out_sets[name] = LabelledDataset([one], samples=1, batch=batch, seed=None, keep_last=True)
    return Datasets(train=train, named=held_out_sets, notes=tuple(notes), corpora=corpora)


def task(run: RunConfig, data: Datasets, tokenizer: Tokenizer | None, mesh: Mesh) -> Task:
    """Return this data rank's shard of the datasets; each validation reads every held-out set completely."""
    from dataclasses import replace

    from mega.core.training.kinds import pretraining

    base, batch = pretraining.task(run, data, tokenizer, mesh), run.batch.global_batch
    sizes = {name: -(-len(one) // batch) for name, one in data.named.items()}
    whole_sets = (replace(one, iterations=sizes[one.name]) for one in base.validation)
    return replace(base, validation=tuple(whole_sets))
