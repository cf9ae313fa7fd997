"""Compare a conversion with its source: both sides are opened again, and every element is compared.

Each format has one table. Files are read through the table, and were written through its inverse. The comparison
therefore shows that the files contain every element, undamaged, at the position that the table specifies. It cannot
detect an error in the table, such as a wrong order of rows. The tables are tested separately: tests write every format
by hand (tests/support/foreign_forms.py), run models with the tensors that were read, and read exported files by the
rules of each format. With --verify, both models are run if one side is a Hugging Face folder (proof/logits.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from mega.core.checkpoint.forms.convert import export_source
from mega.core.checkpoint.forms.form import OWN, FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import Source, Target, assemble, check_copies, prove
from mega.core.checkpoint.forms.open import open_base
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.layout import ONE
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, whole_box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate


@dataclass(frozen=True)
class ReadBack:
    """The amount of data that was compared."""

    tensors: int  # number of tensors in the mega checkpoint
    elements: int  # number of elements in the mega checkpoint
    rounded: int = 0  # tensors that the other format stores with lower precision, compared after rounding
    quantised: int = 0  # tensors that the other format stores in blocks, compared with a bound for each element
    error: float = 0.0  # |difference| / |weights| over all tensors stored in blocks

    def __str__(self) -> str:
        rounded = f", {self.rounded:,} of them rounded to the file's types" if self.rounded else ""
        line = (
            f"read back: all {self.tensors:,} tensors, {self.elements:,} elements, are bit for bit those of the other "
            f"form{rounded} (places and bytes; no forward pass)"
        )
        if not self.quantised:
            return line
        return (
            f"{line}, apart from {self.quantised:,} tensors in blocks: each of their elements is within half a step of "
            f"the file's type, and their relative error is {self.error:.2%}"
        )


def read_back(one: Path, other: Path, heads: int | None = None) -> ReadBack:
    """Compare a mega checkpoint with the checkpoint from which it was converted, or with its export. The arguments may
    be in either order.

    heads: as in `FormOptions`. Errors: CheckpointError naming the first tensor that differs.
    """
    own_path, foreign = (one, other) if form_at(one) is OWN else (other, one)
    checkpoint, form = locate(own_path), form_at(foreign)
    base = open_base(checkpoint, None)
    vocab = model_of(checkpoint.meta, str(checkpoint.path)).vocab
    state = base is None and any(name.startswith("moment1/") for name in checkpoint.tensors)
    options = FormOptions(
        layout=ONE, vocab=vocab, heads=heads, optimizer=state, base=None if base is None else base.path
    )
    foreign_weights = form.open(foreign, options)
    if own_path == other:  # values read from the file already have the file's precision
        foreign_weights = replace(foreign_weights, rounded=None, bounds=None)
    kinds = {target.name.partition("/")[0] for target in foreign_weights.table.targets}
    own_source = (
        export_source(own_path, form)[0].source if kinds == {"weights"} else OwnSource(checkpoint, tuple(kinds))
    )
    return compare(foreign_weights, own_source)


def check_comparable(load: Path, to_ours: bool) -> None:
    """Check that exactly one side of a conversion is a mega checkpoint. Errors: ValueError if both sides or neither
    side is one."""
    if (form_at(load) is OWN) == to_ours:
        other = "; `mega checkpoint diff` compares two mega checkpoints" if to_ours else ""
        raise ValueError(f"--verify: {load}: exactly one of source and target must be a mega checkpoint{other}")


def compare(opened: OpenedForm, own: Source) -> ReadBack:
    """Check the table, then compare every tensor of a mega checkpoint with the tensor of the other format, in
    blocks."""
    source, table = opened.source, opened.table
    prove(table, source.tensors)
    check_copies(table, source)
    tensors = table.tensors(source.tensors)
    if unmatched := own.tensors.keys() ^ tensors.keys():
        raise CheckpointError(f"--verify: {min(unmatched)}: is in one of the two only")
    found = [_compared(target, tensors[target.name], opened, own) for target in table.targets]
    quantised = [each for each in found if each.difference]
    difference, total = (sum(each[n] for each in quantised) for n in (1, 2))
    error = math.sqrt(difference / total) if quantised else 0.0
    return ReadBack(len(tensors), table.elements, sum(each.rounded for each in found), len(quantised), error)


class _Found(NamedTuple):
    """The comparison of two copies of a tensor. rounded: whether the copies are equal only after rounding. difference,
    total: sums of squares of the differences and of the values, for tensors compared with bounds."""

    rounded: bool = False
    difference: float = 0.0
    total: float = 0.0


def _compared(target: Target, expected: tuple[tuple[int, ...], torch.dtype], opened: OpenedForm, own: Source) -> _Found:
    """Compare a tensor block by block. Errors: CheckpointError if the tensor differs by more than the precision of
    the other format."""
    name, origin = target.name, target.fragments[0].source
    shape, dtype = expected
    if own.tensors[name] != expected and (opened.rounded is None or own.tensors[name][0] != shape):
        raise CheckpointError(f"--verify: {name}: is {own.tensors[name]}, not {expected}")
    rounded, difference, total = False, 0.0, 0.0
    for box in blocks(whole_box(shape), dtype.itemsize):
        values, other = own.read(name, box), assemble(target, box, opened.source).contiguous()
        if opened.bounds is not None:
            error = (values.double() - other.double()).abs()
            if not (error <= assemble(target, box, opened.bounds)).all():
                raise CheckpointError(f"--verify: {name}: is further from {origin} than its precision allows")
            difference, total = difference + float(error.square().sum()), total + float(values.double().square().sum())
        elif not _same(values, other):
            if opened.rounded is None or not _same(opened.rounded(origin, values), other):
                raise CheckpointError(f"--verify: {name}: is not what {origin} holds")
            rounded = True
    return _Found(rounded, difference, total)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
