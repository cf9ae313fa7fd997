"""What `mega reshard` does: own checkpoints, Megatron-LM's trees and others' into one another, cut for any ranks.

Own to own keeps everything (reshard.py); to and from Megatron-LM go the model, iteration and consumed samples, and
Adam's state where its form is known (megatron_state.py); of what convert.py reads (Hugging Face, Meta, ...) there are
only weights.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import torch

from mega.core.checkpoint.forms import megatron, torch_dist
from mega.core.checkpoint.forms.convert import (
    OwnSource,
    import_weights,
    open_own,
    report_of,
    to_mega,
    write_torch,
)
from mega.core.checkpoint.forms.folders import check_fresh, filled_folder, folder_beside
from mega.core.checkpoint.forms.kinds import kind_of
from mega.core.checkpoint.forms.ledger import ConversionReport
from mega.core.checkpoint.forms.mapping import assemble, joined, prove
from mega.core.checkpoint.forms.megatron_arguments import (
    arguments_of,
    check_vocabulary,
    model_from_arguments,
    vocabulary,
)
from mega.core.checkpoint.forms.megatron_state import LEAVE, Facts, facts_of, written_alike, written_state
from mega.core.checkpoint.own.disk import creating, write_all
from mega.core.checkpoint.own.layout import ONE, Layout, check_model
from mega.core.checkpoint.own.pieces import Box, CheckpointError
from mega.core.checkpoint.own.reshard import Progress, reshard
from mega.core.checkpoint.own.store import Checkpoint

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
    layout: Layout,
    saver: Saver,
    vocab: int | None = None,
    heads: int | None = None,
    progress: Progress = lambda done, total: None,
    *,
    optimizer: bool = True,
) -> ConversionReport:
    """Whatever lies at `load` -> a `saver` at `save`, for the ranks of `layout`; trees know only its tp and pp.

    vocab: the true vocabulary of a Megatron tree. heads: attention heads, where a tree does not say. progress: told
    how far it has come, where own checkpoints become own checkpoints. optimizer: take Adam's state along, from and to
    Megatron's trees; where it is there and its form is not known, that is an error.
    Errors: ValueError naming flag, file or tensor; then nothing new is at `save`.
    """
    kind = kind_of(load)
    own, tree = kind == "mega", kind in ("megatron", "torch_dist")

    def to_own(save: Path, layout: Layout) -> ConversionReport:
        return from_megatron(load, save, layout, vocab, heads, optimizer) if tree else to_mega(load, save, layout)

    if saver == "mega" and own:
        return reshard(load, save, layout, progress)
    if saver == "mega":
        return to_own(save, layout)
    if own:
        return to_megatron(load, save, layout, STYLES[saver], optimizer)
    check_fresh(save)
    with folder_beside(save) as between:
        taken = to_own(between / "own", ONE)
        report = to_megatron(between / "own", save, layout, STYLES[saver], optimizer)
    return dataclasses.replace(report, notes=tuple(dict.fromkeys((*taken.notes, *report.notes))))


def from_megatron(
    load: Path, save: Path, layout: Layout, vocab: int | None, heads: int | None, optimizer: bool
) -> ConversionReport:
    """A Megatron-LM tree, or a `torch_dist` folder, -> an own checkpoint at the same step."""
    tree = opened_tree(load, vocab, heads, optimizer)
    check_model(tree.model, str(load))
    report = import_weights(
        tree.source,
        tree.table,
        tree.model,
        save,
        layout,
        step=tree.iteration,
        consumed=tree.consumed,
        known=_known(tree),
    )
    return dataclasses.replace(report, notes=(*tree.notes, *report.notes, _said(tree.optimizer, optimizer, "taken")))


def opened_tree(load: Path, vocab: int | None, heads: int | None, optimizer: bool) -> megatron.Tree:
    """A Megatron-LM tree or a `torch_dist` folder, opened. Arguments: as of `exchange`."""
    folder = megatron.iteration_of(load)
    if not torch_dist.is_distributed(folder):
        return megatron.open_tree(load, vocab, optimizer=optimizer)
    source = torch_dist.DistributedSource(folder)
    if source.state and optimizer:
        raise CheckpointError(f"{folder}: {source.state[0]}: the form of this state is not known; {LEAVE}")
    values = torch_dist.arguments(folder, source.tensors, heads)
    table = source.tensors.get("0.0.0/embedding.word_embeddings.weight")
    rows = table[0][0] if table else 0
    check_vocabulary(values, rows, tp=1)
    tokens, notes = vocabulary(values, rows, vocab, load)
    model = model_from_arguments(values, tokens, str(folder))
    places = megatron.import_table(model, source.tensors, tp=1, pp=1, chunks=1, version=3)
    name = re.fullmatch(r"iter_(\d+)", folder.name)
    consumed = values.get("consumed_train_samples", 0)
    return megatron.Tree(source, model, places, int(name[1]) if name else 0, consumed, 0, None, notes)


def _known(tree: megatron.Tree) -> dict[str, Any]:
    """What an own checkpoint says of its run, where it has the optimizer's state."""
    facts = tree.optimizer
    if facts is None:
        return {}
    unscheduled = 0 if facts.samples is None else max(0, tree.consumed - facts.samples)
    return {
        "config": {"optimizer": {"optimizer": "adam", **facts.constants}},
        "progress": {
            "step": tree.iteration,
            "consumed": tree.consumed,
            "consumed_valid": tree.consumed_valid,
            "skipped": max(0, tree.iteration - facts.updates),
            "unscheduled": unscheduled,
        },
        "updates": facts.updates,
        "scaler": facts.scaler,
        "schedule": facts.schedule,
    }


def _said(facts: Facts | None, wanted: bool, done: str) -> str:
    """One line on the optimizer's state."""
    if not wanted:
        return "optimizer: left behind, if there is any (--no-load-optim)"
    if facts is None:
        return "optimizer: the source holds no state of one"
    beside = [name for name, value in (("loss scale", facts.scaler), ("schedule", facts.schedule)) if value]
    return f"optimizer: Adam's state after {facts.updates:,} updates {done}" + "".join(f", {name}" for name in beside)


def to_megatron(
    load: Path, save: Path, layout: Layout, style: megatron.Style, optimizer: bool = True
) -> ConversionReport:
    """An own checkpoint -> a tree that Megatron-LM loads; one rank's file is in memory at a time."""
    tp, pp = layout.tp, layout.pp
    checkpoint, model = open_own(load)
    kinds = _state_kinds(checkpoint, style) if optimizer else ()
    facts = facts_of(checkpoint.meta, str(checkpoint.path)) if kinds else None
    source = OwnSource(checkpoint, ("weights", *kinds))
    of_weights = megatron.export_tables(model, source.tensors, tp, pp)
    tables = {
        rank: joined([table, *(written_alike(table, kind) for kind in kinds)]) for rank, table in of_weights.items()
    }
    table = megatron.whole_table(tables.values())
    prove(table, source.tensors)
    iteration = max(1, checkpoint.step)  # Megatron's loader refuses 0
    progress = checkpoint.meta.get("progress")
    consumed = progress.get("consumed", 0) if isinstance(progress, dict) else 0
    arguments = arguments_of(model, tp, pp, iteration, consumed)
    if facts is not None and isinstance(progress, dict):
        arguments["consumed_valid_samples"] = progress.get("consumed_valid", 0)
        arguments["lr_warmup_init"] = facts.schedule["lr"]["initial"] if facts.schedule else 0.0

    def fill(folder: Path) -> int:
        written = 0
        for (rank, stage), mine in tables.items():
            content = {
                target.name: assemble(target, Box((0,) * len(target.shape), target.shape), source)
                for target in mine.targets
            }
            state = {key: content.pop(key) for key in list(content) if key.partition("/")[0] in kinds}
            said = written_state(state, facts) if facts is not None else {}
            directory = folder / f"iter_{iteration:07d}" / megatron.rank_directory(rank, stage, pp)
            directory.mkdir(parents=True)
            kept = megatron.file_content(megatron.nested(content, style), arguments, iteration, said)
            written += write_torch(directory / megatron.WEIGHTS, kept)
        with creating(folder / megatron.TRACKER) as descriptor:
            write_all(descriptor, str(iteration).encode())
        return written

    report = report_of(table, filled_folder(save, fill), save)
    return dataclasses.replace(report, notes=(_said(facts, optimizer, "written"),))


def _state_kinds(checkpoint: Checkpoint, style: megatron.Style) -> tuple[str, ...]:
    """The kinds of state that go into a tree; none where there is none.

    Errors: CheckpointError where there is state that such a tree does not hold.
    """
    kinds = {key.partition("/")[0] for key in checkpoint.tensors} - {"weights"}
    if not kinds:
        return ()
    if style.startswith("core"):
        raise CheckpointError(
            f"{checkpoint.path}: holds an optimizer's state, and its form for Megatron-core is not known; {LEAVE}"
        )
    narrow = {dtype for key, (_, dtype) in checkpoint.tensors.items() if key.startswith("weights/")} != {torch.float32}
    wanted = {"moment1", "moment2", *(["master"] if narrow else [])}
    if kinds != wanted:
        raise CheckpointError(
            f"{checkpoint.path}: holds {', '.join(sorted(kinds))} beside its weights, a tree of Megatron-LM "
            f"{', '.join(sorted(wanted))}; {LEAVE}"
        )
    return tuple(sorted(wanted))
