"""Is a conversion what it was made from? Both sides are opened again, and every element of one is compared.

What lies in the foreign files is read by the form's table, which is also the one, inverted, that a conversion wrote by.
So this shows that the files hold every element, complete and undamaged, where the table says; a table whose order of
rows is wrong would go unnoticed. That the tables are right is shown without them: the tests write every form by hand
(tests/support/foreign_forms.py), compute with what was read, and read what was written with each format's own rules;
--verify runs both models where the other side is Hugging Face's (proof/logits.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mega.core.checkpoint.forms.form import OWN, Given, Opened
from mega.core.checkpoint.forms.mapping import Target, assemble, check_copies, prove
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.layout import ONE
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, whole_box
from mega.core.checkpoint.own.source import read_part
from mega.core.checkpoint.own.store import Checkpoint, locate


@dataclass(frozen=True)
class ReadBack:
    """How much was compared: tensors of ours, and their elements. rounded: tensors that the other form holds less
    exactly, or in another type, and that were compared after the same rounding."""

    tensors: int
    elements: int
    rounded: int = 0

    def __str__(self) -> str:
        rounded = f", {self.rounded:,} of them rounded to the file's types" if self.rounded else ""
        return (
            f"read back: all {self.tensors:,} tensors, {self.elements:,} elements, are bit for bit those of the other "
            f"form{rounded} (places and bytes; no forward pass)"
        )


def read_back(one: Path, other: Path, heads: int | None = None) -> ReadBack:
    """Compare an own checkpoint with what it was made from, or what was made of it, in either order.

    heads: as of `Given`. Errors: CheckpointError naming the first tensor that differs.
    """
    own, foreign = (one, other) if form_at(one) is OWN else (other, one)
    checkpoint = locate(own)
    vocab = model_of(checkpoint.meta, str(checkpoint.path)).vocab
    state = any(name.startswith("moment1/") for name in checkpoint.tensors)
    found = form_at(foreign).open(foreign, Given(layout=ONE, vocab=vocab, heads=heads, optimizer=state))
    return compare(found, checkpoint)


def check_comparable(load: Path, to_ours: bool) -> None:
    """Errors: ValueError unless one side of a conversion is ours and the other is not."""
    if (form_at(load) is OWN) == to_ours:
        other = "; `mega checkpoint diff` compares two of ours" if to_ours else ""
        raise ValueError(f"--verify: {load}: one of source and target must be ours, and only one{other}")


def compare(opened: Opened, checkpoint: Checkpoint) -> ReadBack:
    """Every tensor of `checkpoint` against what is made of a foreign one, in blocks; the table is proven first."""
    source, table = opened.source, opened.table
    prove(table, source.tensors)
    check_copies(table, source)
    tensors = table.tensors(source.tensors)
    kinds = {name.partition("/")[0] for name in tensors}
    wanted = {name for name in checkpoint.tensors if name.partition("/")[0] in kinds}
    if odd := wanted ^ tensors.keys():
        raise CheckpointError(f"--verify: {min(odd)}: is in one of the two only")
    rounded = sum(_compared(target, tensors[target.name], opened, checkpoint) for target in table.targets)
    return ReadBack(len(tensors), table.elements, rounded)


def _compared(
    target: Target, expected: tuple[tuple[int, ...], torch.dtype], opened: Opened, checkpoint: Checkpoint
) -> bool:
    """Whether a tensor had to be rounded to be the same. Errors: CheckpointError where it is another one."""
    name, origin, rounded = target.name, target.fragments[0].source, False
    shape, dtype = expected
    if checkpoint.tensors[name] != expected and (opened.rounded is None or checkpoint.tensors[name][0] != shape):
        raise CheckpointError(f"--verify: {name}: is {checkpoint.tensors[name]}, not {expected}")
    for box in blocks(whole_box(shape), dtype.itemsize):
        found, other = read_part(checkpoint, name, box), assemble(target, box, opened.source).contiguous()
        if not _same(found, other):
            if opened.rounded is None or not _same(opened.rounded(origin, found), other):
                raise CheckpointError(f"--verify: {name}: is not what {origin} holds")
            rounded = True
    return rounded


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
