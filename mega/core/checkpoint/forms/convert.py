"""Convert between mega checkpoints and formats of other programs, for any layout of ranks. The commands `convert-llama`
and `reshard` use this module.

The conversion of a mega checkpoint to a different layout is in own/reshard.py. The module of every other format
provides a table and reads or writes files (form.py). This module checks the table before any byte is written, and
counts the moved elements in a ledger. Conversions hold only a few blocks in memory at a time, or one file if torch
files are written. A folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch

from mega.core.architecture import architecture, without_adapters
from mega.core.checkpoint.forms.companions import companions_of, tokenizer_kind, unread_tokenizer
from mega.core.checkpoint.forms.direct import main_dtype, opened_foreign
from mega.core.checkpoint.forms.form import (
    OWN,
    ExportSource,
    Form,
    FormOptions,
    OpenedForm,
    SpecialTokens,
    no_tokens,
    writer_of,
)
from mega.core.checkpoint.forms.mapping import Source, assemble, inverted, prove
from mega.core.checkpoint.forms.open import whole_model
from mega.core.checkpoint.forms.recognise import check_place, form_at
from mega.core.checkpoint.forms.upcycle import Upcycling, check_one_dtype, upcycled
from mega.core.checkpoint.own.base import MergedSource, named_base
from mega.core.checkpoint.own.folders import check_fresh, filled_folder, folder_next_to
from mega.core.checkpoint.own.layout import ONE, Layout, plan_files
from mega.core.checkpoint.own.ledger import ConversionReport, Ledger
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece, Tensors, naming
from mega.core.checkpoint.own.reshard import Progress, reshard
from mega.core.checkpoint.own.source import OwnSource, StoredWeights
from mega.core.checkpoint.own.store import Attachments, locate, store_at
from mega.core.device import DTYPE_NAMES
from mega.core.untrusted import Json, below


def convert(
    load: Path,
    save: Path,
    to: str | None = None,
    layout: Layout = ONE,
    *,
    base: Path | None = None,
    parts: int = 1,
    vocab: int | None = None,
    heads: int | None = None,
    optimizer: bool = True,
    distributed: bool = False,
    tokenizer_type: str | None = None,
    outtype: str | None = None,
    tokens: Callable[[StoredWeights], SpecialTokens] = no_tokens,
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Convert the checkpoint at `load` to the format `to` at `save`. Default: hf for a mega checkpoint, otherwise mega.

    The arguments from `layout` to `tokens` are those of `FormOptions`. Optimizer state in an unknown format is an
    error. progress: called only during a conversion from mega to mega.
    Errors: ValueError naming the flag, file or tensor. After an error, `save` is unchanged.
    """
    options = FormOptions(
        layout=layout,
        base=base,
        parts=parts,
        vocab=vocab,
        heads=heads,
        optimizer=optimizer,
        distributed=distributed,
        tokenizer_type=tokenizer_type,
        outtype=outtype,
        tokens=tokens,
    )
    source = form_at(load)
    to = to or default_target(source)
    target = writer_of(to)
    if source is OWN and target is OWN:
        check_place(save)
        return reshard(load, save, layout, progress)
    if target is OWN:
        return _import(source, load, save, options)
    if source is OWN:
        return _export(load, save, to, options, load)
    check_fresh(save)  # other formats are converted via a mega checkpoint
    with folder_next_to(save) as between:
        imported = _import(source, load, between / "own", dataclasses.replace(options, layout=ONE))
        report = _export(between / "own", save, to, options, load)
    return dataclasses.replace(report, notes=tuple(dict.fromkeys((*imported.notes, *report.notes))))


def default_target(source: Form) -> str:
    """Return the default of --to."""
    return "hf" if source is OWN else "mega"


def check_pair(load: Path, source: Form, to: str) -> None:
    """Check the source and target of `convert-llama`. Errors: ValueError if the format at `load` cannot be converted to
    `to`."""
    if source is not OWN and source.verb != "convert-llama":
        raise ValueError(f"{load}: is {source.words}; `mega {source.verb}` reads it")
    if (source is OWN) == (writer_of(to) is OWN):
        raise ValueError(f"--to {to}: {load} is {source.words}; exactly one of the two must be mega")


# To mega


def _import(form: Form, load: Path, save: Path, options: FormOptions) -> ConversionReport:
    """Convert another program's checkpoint to one step of the run directory `save`, split into files for the ranks of
    the layout."""
    attachments = companions_of(form, load)
    reason = unread_tokenizer(attachments)
    check_place(save)
    foreign = opened_foreign(form, load, options)
    tokenizer: dict[str, Json] = {"tokenizer": tokenizer_kind(attachments)}
    if foreign.base is not None:
        if tokenizer["tokenizer"] is None:
            tokenizer = below(foreign.base.meta, "config", "tokenizer") or tokenizer
        attachments = {**foreign.base.attachments, **attachments}
    report = _save_own(foreign, load, save, options.layout, tokenizer, attachments)
    return report if reason is None else _with_note(report, f"{load}: no tokenizer is read: {reason}")


def _with_note(report: ConversionReport, note: str) -> ConversionReport:
    return dataclasses.replace(report, notes=(*report.notes, note))


def _save_own(
    opened: OpenedForm,
    load: Path,
    save: Path,
    layout: Layout,
    tokenizer: Mapping[str, Json],
    attachments: Attachments,
) -> ConversionReport:
    """Write one step of the run directory `save`, split into files for the ranks of `layout`."""
    targets = {target.name: target for target in opened.table.targets}
    tensors = opened.table.tensors(opened.source.tensors)
    files = plan_files(tensors, opened.model, layout)
    ledger = Ledger({name: prod(shape) for name, (shape, _) in tensors.items()})

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        tensor = assemble(targets[piece.key], box, opened.source)
        finite = bool(torch.isfinite(tensor).all())
        _check_state(piece.key, tensor, finite)
        if not finite:
            raise CheckpointError(f"{load}: {piece.key.removeprefix('weights/')}: holds a NaN or an infinity")
        ledger.moved(piece.key, box.elements)
        return tensor

    store = store_at(save)
    state = _plain_state(opened, tensors, layout, tokenizer)
    saved = store.save_all(opened.step, files, state, fetch=fetch, check=ledger.close, attachments=attachments)
    path = save / store.path(opened.step).name
    return ConversionReport(len(targets), opened.table.elements, saved.bytes, path, opened.notes)


def upcycle(
    load: Path, save: Path, upcycling: Upcycling, layout: Layout = ONE, options: FormOptions | None = None
) -> ConversionReport:
    """Make a mixture of experts from a dense model of any format at `load`, and save it as step 0 of a run at `save`.
    options: options for reading formats of other programs. Errors: ValueError naming the flag, file or tensor.
    """
    if form_at(load) is not OWN:
        with folder_next_to(save) as between:
            _import(form_at(load), load, between / "own", options or FormOptions(layout=ONE, optimizer=False))
            return upcycle(between / "own", save, upcycling, layout)
    check_place(save)
    dense = opened_own(load)
    check_one_dtype(dense, load)
    mixture = upcycled(dense, upcycling)
    prove(dataclasses.replace(mixture.table, repeats=frozenset(mixture.source.tensors)), mixture.source.tensors)
    tokenizer = below(dense.checkpoint.meta, "config", "tokenizer")
    attachments = {
        name: file for name, file in dense.checkpoint.attachments.items() if name not in ("config.json", "params.json")
    }
    return _save_own(mixture, load, save, layout, tokenizer, attachments)


STATE = ("moment1", "moment2", "master")


def _check_state(key: str, tensor: torch.Tensor, finite: bool) -> None:
    """Check the values of an optimizer state tensor. Errors: CheckpointError if Adam cannot produce such values."""
    kind = key.partition("/")[0]
    has_negative = kind == "moment2" and bool((tensor < 0).any())
    if kind in STATE and (has_negative or not finite):
        problem = "a number below zero" if has_negative else "a NaN or an infinity"
        raise CheckpointError(
            f"{key}: holds {problem}, which Adam cannot produce; give --no-load-optim to leave the state out"
        )


def _plain_state(
    opened: OpenedForm, tensors: Tensors, layout: Layout, tokenizer: Mapping[str, Json]
) -> dict[str, Json]:
    """Return the plain state of the new checkpoint. Values that the source checkpoint contains replace the defaults."""
    config = {
        "model": dataclasses.asdict(opened.model),
        "precision": {"dtype": DTYPE_NAMES[main_dtype(tensors)]},
        "parallel": layout.section,
        "tokenizer": tokenizer,
    }
    progress = {"step": opened.step, "consumed": opened.consumed}
    state = {"progress": progress, "updates": opened.step, **opened.known}
    return {**state, "config": {**config, **below(state, "config")}}


# From mega


def _export(load: Path, save: Path, to: str, options: FormOptions, named: Path) -> ConversionReport:
    """Export a mega checkpoint to a folder at `save`. named: the name of `load` in messages."""
    form = writer_of(to)
    exported, losses = export_source(load, form)
    if named_base(exported.checkpoint) is not None:  # the optimizer state of adapters has no place in merged weights
        options = dataclasses.replace(options, optimizer=False)
    with naming(f"--load-dir {named}"):  # errors name this checkpoint, not a flag of the command
        export = form.export(exported, to, options)
    source, table = _FiniteSource(export.source or exported.source, named), inverted(export.table)
    prove(table, source.tensors)
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in table.tensors(source.tensors).values())
    bytes_written = filled_folder(save, lambda folder: export.fill(folder, table, source), size)
    return ConversionReport(
        len(table.targets), table.elements, bytes_written, save, export.notes, (*losses, *export.losses)
    )


def export_source(load: Path, form: Form) -> tuple[ExportSource, tuple[str, ...]]:
    """Return (the part of the mega checkpoint at `load` that a format can store, messages about the rest). Adapters are
    merged, except in the format of peft."""
    exported = opened_own(load, merged=form.name != "peft")
    count = exported.model.mtp_layers
    if not count or form.ahead:
        return exported, ()
    model = dataclasses.replace(exported.model, mtp_layers=0)
    exported = dataclasses.replace(exported, model=model, source=_WithoutPredictors(exported))
    return exported, (f"mtp_layers {count}: {form.words} has none; it is the model without them",)


class _WithoutPredictors:
    """A source of a model's weights, without the model's multi-token prediction layers."""

    def __init__(self, own: ExportSource) -> None:
        self._source = own.source
        entries = own.source.tensors.items()
        self.tensors: Tensors = {name: value for name, value in entries if not name.startswith("weights/mtp.")}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._source.read(name, box)


class _FiniteSource:
    """A source that checks that all values it reads are finite. place: the source's name in errors."""

    def __init__(self, source: Source, place: Path) -> None:
        self._source, self._place = source, place

    @property
    def tensors(self) -> Tensors:
        return self._source.tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        tensor = self._source.read(name, box)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self._place}: {name.removeprefix('weights/')}: holds a NaN or an infinity")
        return tensor


def opened_own(load: Path, *, merged: bool = True) -> ExportSource:
    """Open the mega checkpoint at `load` for export. merged: whether adapters are added to the weights of their
    base."""
    adapters = locate(load)
    checkpoint, model = whole_model(adapters)
    if architecture(model).adapters is None or named_base(adapters) is None:
        return ExportSource(checkpoint, model, OwnSource(checkpoint))
    if not merged:
        return ExportSource(adapters, model, OwnSource(adapters))
    return ExportSource(checkpoint, without_adapters(model), MergedSource(OwnSource(checkpoint), model))
