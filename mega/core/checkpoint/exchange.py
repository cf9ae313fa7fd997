"""What `mega reshard` does: own checkpoints, Megatron-LM's trees and others' into one another, cut for any tp x pp.

Own to own keeps everything (reshard.py); to and from Megatron-LM goes the model, with iteration and consumed
samples, as Megatron's own tool does it; of what convert.py reads (Hugging Face, Meta, ...) there are only weights.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Literal

import torch

from mega.core.checkpoint import megatron, torch_dist
from mega.core.checkpoint.convert import (
    ConversionReport,
    OwnSource,
    filled_folder,
    import_weights,
    kind_of,
    open_own,
    report_of,
    to_mega,
)
from mega.core.checkpoint.disk import creating, write_all
from mega.core.checkpoint.mapping import assemble, prove
from mega.core.checkpoint.pieces import Box
from mega.core.checkpoint.reshard import Progress, reshard

Saver = Literal["mega", "megatron", "megatron-23.06", "mcore", "mcore-local"]

STYLES: dict[Saver, megatron.Style] = {
    "megatron": "legacy",
    "megatron-23.06": "legacy-layernorm",
    "mcore": "core",
    "mcore-local": "core-local",
}


def exchange(
    load: Path,
    save: Path,
    tp: int,
    pp: int,
    saver: Saver,
    vocab: int | None = None,
    heads: int | None = None,
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Whatever lies at `load` -> a `saver` at `save`, for tp x pp ranks.

    vocab: the true vocabulary of a Megatron tree. heads: attention heads, where a tree does not say. progress: told
    how far it has come, where own checkpoints become own checkpoints.
    Errors: ValueError naming flag, file or tensor; then nothing new is at `save`.
    """
    for flag, value in (
        ("--target-tensor-parallel-size", tp),
        ("--target-pipeline-parallel-size", pp),
        ("--true-vocab-size", 1 if vocab is None else vocab),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value}: must be 1 or more")
    tree = megatron.is_tree(load) or torch_dist.is_distributed(megatron.iteration_of(load))
    own = not tree and kind_of(load) == "mega"

    def to_own(save: Path, tp: int, pp: int) -> ConversionReport:
        return from_megatron(load, save, tp, pp, vocab, heads) if tree else to_mega(load, save, tp, pp)

    if saver == "mega" and own:
        report = reshard(load, save, tp, pp, progress)
        return ConversionReport(report.tensors, report.elements, report.bytes, report.path)
    if saver == "mega":
        return to_own(save, tp, pp)
    if own:
        return to_megatron(load, save, tp, pp, STYLES[saver])
    save.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=save.parent, prefix=f".{save.name}.") as between:
        to_own(Path(between), 1, 1)
        return to_megatron(Path(between), save, tp, pp, STYLES[saver])


def from_megatron(load: Path, save: Path, tp: int, pp: int, vocab: int | None, heads: int | None) -> ConversionReport:
    """A Megatron-LM tree, or a `torch_dist` folder, -> an own checkpoint at the same step."""
    folder = megatron.iteration_of(load)
    if torch_dist.is_distributed(folder):
        source = torch_dist.DistributedSource(folder)
        values = torch_dist.arguments(folder, source.tensors, heads)
        table = source.tensors.get("0.0.0/embedding.word_embeddings.weight")
        rows = table[0][0] if table else 0
        megatron.check_vocabulary(values, rows, tp=1)
        model = megatron.model_from_arguments(values, vocab or rows, str(folder))
        places = megatron.import_table(model, source.tensors, tp=1, pp=1, chunks=1, version=3)
        name = re.fullmatch(r"iter_(\d+)", folder.name)
        consumed = values.get("consumed_train_samples", 0)
        return import_weights(source, places, model, save, tp, pp, step=int(name[1]) if name else 0, consumed=consumed)
    tree = megatron.open_tree(load, vocab)
    return import_weights(
        tree.source, tree.table, tree.model, save, tp, pp, step=tree.iteration, consumed=tree.consumed
    )


def to_megatron(load: Path, save: Path, tp: int, pp: int, style: megatron.Style) -> ConversionReport:
    """An own checkpoint -> a tree that Megatron-LM loads; one rank's file is in memory at a time."""
    checkpoint, model = open_own(load)
    source = OwnSource(checkpoint)
    tables = megatron.export_tables(model, source.tensors, tp, pp)
    table = megatron.whole_table(tables.values())
    prove(table, source.tensors)
    iteration = max(1, checkpoint.step)  # Megatron's loader refuses 0
    progress = checkpoint.meta.get("progress")
    consumed = progress.get("consumed", 0) if isinstance(progress, dict) else 0
    arguments = megatron.arguments_of(model, tp, pp, iteration, consumed)

    def fill(folder: Path) -> int:
        written = 0
        for (rank, stage), mine in tables.items():
            content = {
                target.name: assemble(target, Box((0,) * len(target.shape), target.shape), source)
                for target in mine.targets
            }
            directory = folder / f"iter_{iteration:07d}" / megatron.rank_directory(rank, stage, pp)
            directory.mkdir(parents=True)
            path = directory / megatron.WEIGHTS
            torch.save(megatron.file_content(megatron.nested(content, style), arguments, iteration), path)
            written += path.stat().st_size
        with creating(folder / megatron.TRACKER) as descriptor:
            write_all(descriptor, str(iteration).encode())
        return written

    return report_of(table, filled_folder(save, fill), save)
