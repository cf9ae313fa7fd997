"""Checkpoints of ours and of others into one another, cut for any ranks: what `convert-llama` and `reshard` do.

Own to own keeps everything (own/reshard.py). A foreign form brings a table and files (form.py); here the table is
proven before a byte is written, and a ledger is kept of what was moved. Conversions stream: a few blocks are in memory
at a time (one part, where a torch file is written). A folder appears under its name only when it is complete.
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
from mega.core.checkpoint.forms.form import OWN, Form, Given, Opened, Own, SpecialTokens, no_tokens, writer_of
from mega.core.checkpoint.forms.mapping import Source, assemble, inverted, prove
from mega.core.checkpoint.forms.open import whole_model
from mega.core.checkpoint.forms.recognise import check_place, form_at
from mega.core.checkpoint.forms.upcycle import Upcycling, check_one_dtype, upcycled
from mega.core.checkpoint.own.base import MergedSource, named_base
from mega.core.checkpoint.own.folders import check_fresh, filled_folder, folder_next_to
from mega.core.checkpoint.own.layout import ONE, Layout, plan_files
from mega.core.checkpoint.own.ledger import ConversionReport, Ledger
from mega.core.checkpoint.own.pieces import NAMES, Box, CheckpointError, Piece, Tensors, naming
from mega.core.checkpoint.own.reshard import Progress, reshard
from mega.core.checkpoint.own.source import OwnSource, StoredWeights
from mega.core.checkpoint.own.store import Attachments, locate, store_at
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
    """Whatever lies at `load` -> a `to` at `save`; without `to`, own checkpoints become Hugging Face's and others own.

    layout to tokens: as of `Given`; where an optimizer's state is there and its form is not known, that is an error.
    progress: called as own checkpoints become own checkpoints.
    Errors: ValueError naming flag, file or tensor; `save` is then as it was.
    """
    given = Given(
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
        return _import(source, load, save, given)
    if source is OWN:
        return _export(load, save, to, given, load)
    check_fresh(save)
    with folder_next_to(save) as between:
        taken = _import(source, load, between / "own", dataclasses.replace(given, layout=ONE))
        report = _export(between / "own", save, to, given, load)
    return dataclasses.replace(report, notes=tuple(dict.fromkeys((*taken.notes, *report.notes))))


def default_target(source: Form) -> str:
    """What --to is where it is not given."""
    return "hf" if source is OWN else "mega"


def check_pair(load: Path, source: Form, to: str) -> None:
    """Errors: ValueError where `convert-llama` does not make a `to` of what lies at `load`."""
    if source is not OWN and source.verb != "convert-llama":
        raise ValueError(f"{load}: is {source.words}; `mega {source.verb}` reads it")
    if (source is OWN) == (writer_of(to) is OWN):
        raise ValueError(f"--to {to}: {load} is {source.words}; exactly one of the two must be mega")


# Into ours


def _import(form: Form, load: Path, save: Path, given: Given) -> ConversionReport:
    """A foreign checkpoint -> one step of the run directory `save`, in files for the ranks of the layout."""
    attachments = companions_of(form, load)
    why = unread_tokenizer(attachments)
    check_place(save)
    opened = opened_foreign(form, load, given)
    tokenizer: dict[str, Json] = {"tokenizer": tokenizer_kind(attachments)}
    if opened.base is not None:
        if tokenizer["tokenizer"] is None:
            tokenizer = below(opened.base.meta, "config", "tokenizer") or tokenizer
        attachments = {**opened.base.attachments, **attachments}
    report = _save_own(opened, load, save, given.layout, tokenizer, attachments)
    return report if why is None else _with_note(report, f"{load}: no tokenizer is read: {why}")


def _with_note(report: ConversionReport, note: str) -> ConversionReport:
    return dataclasses.replace(report, notes=(*report.notes, note))


def _save_own(
    opened: Opened,
    load: Path,
    save: Path,
    layout: Layout,
    tokenizer: Mapping[str, Json],
    attachments: Attachments,
) -> ConversionReport:
    """One step of the run directory `save`, in files for the ranks of the layout."""
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
    where = save / store.path(opened.step).name
    return ConversionReport(len(targets), opened.table.elements, saved.bytes, where, opened.notes)


def upcycle(
    load: Path, save: Path, how: Upcycling, layout: Layout = ONE, given: Given | None = None
) -> ConversionReport:
    """A dense model of any form at `load` -> a mixture of experts at `save`, step 0 of a run.

    given: how a foreign form is read. Errors: ValueError naming flag, file or tensor.
    """
    if form_at(load) is not OWN:
        with folder_next_to(save) as between:
            _import(form_at(load), load, between / "own", given or Given(layout=ONE, optimizer=False))
            return upcycle(between / "own", save, how, layout)
    check_place(save)
    own = opened_own(load)
    check_one_dtype(own, load)
    opened = upcycled(own, how)
    prove(dataclasses.replace(opened.table, repeats=frozenset(opened.source.tensors)), opened.source.tensors)
    tokenizer = below(own.checkpoint.meta, "config", "tokenizer")
    kept = {
        name: file for name, file in own.checkpoint.attachments.items() if name not in ("config.json", "params.json")
    }
    return _save_own(opened, load, save, layout, tokenizer, kept)


STATE = ("moment1", "moment2", "master")


def _check_state(key: str, tensor: torch.Tensor, finite: bool) -> None:
    """Errors: CheckpointError where an optimizer's state is none that Adam can have come to."""
    kind = key.partition("/")[0]
    below = kind == "moment2" and bool((tensor < 0).any())
    if kind in STATE and (below or not finite):
        has = "a number below zero" if below else "a NaN or an infinity"
        raise CheckpointError(f"{key}: holds {has}, which is no state of Adam; give --no-load-optim to leave it")


def _plain_state(opened: Opened, tensors: Tensors, layout: Layout, tokenizer: Mapping[str, Json]) -> dict[str, Json]:
    """What a checkpoint says besides its tensors; what the foreign one says of its run counts first."""
    config = {
        "model": dataclasses.asdict(opened.model),
        "precision": {"dtype": NAMES[main_dtype(tensors)]},
        "parallel": layout.section,
        "tokenizer": tokenizer,
    }
    progress = {"step": opened.step, "consumed": opened.consumed}
    known = {"progress": progress, "updates": opened.step, **opened.known}
    return {**known, "config": {**config, **below(known, "config")}}


# Out of ours


def _export(load: Path, save: Path, to: str, given: Given, named: Path) -> ConversionReport:
    """An own checkpoint -> a folder or tree at `save`. named: what messages call `load`."""
    own, form = opened_own(load, merged=to != "peft"), writer_of(to)
    losses: tuple[str, ...] = ()
    if own.model.mtp_layers and not form.ahead:
        losses = (f"mtp_layers {own.model.mtp_layers}: {form.words} has none; it is the model without them",)
        own = dataclasses.replace(own, model=dataclasses.replace(own.model, mtp_layers=0), source=_Plain(own))
    with naming(f"--load-dir {named}"):  # no flag of the verb is at fault, but this checkpoint
        export = form.export(own, to, given)
    source, table = _Watched(export.source or own.source, named), inverted(export.table)
    prove(table, source.tensors)
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in table.tensors(source.tensors).values())
    written = filled_folder(save, lambda folder: export.fill(folder, table, source), size)
    return ConversionReport(len(table.targets), table.elements, written, save, export.notes, (*losses, *export.losses))


class _Plain:
    """The weights of a model without its layers that predict further tokens."""

    def __init__(self, own: Own) -> None:
        self._source = own.source
        held = own.source.tensors.items()
        self.tensors: Tensors = {name: value for name, value in held if not name.startswith("weights/mtp.")}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._source.read(name, box)


class _Watched:
    """A source whose tensors must be finite. place: what errors call it."""

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


def opened_own(load: Path, *, merged: bool = True) -> Own:
    """What a user points at, and the model that it holds. merged: adapters are added to the weights of their base."""
    adapters = locate(load)
    checkpoint, model = whole_model(adapters)
    if architecture(model).adapters is None or named_base(adapters) is None:
        return Own(checkpoint, model, OwnSource(checkpoint))
    if not merged:
        return Own(adapters, model, OwnSource(adapters))
    return Own(checkpoint, without_adapters(model), MergedSource(OwnSource(checkpoint), model))
