"""Is a conversion what it was made from? Both sides are opened anew, and every element of one is compared.

What others wrote is read by the table that imports it, in either direction. After a conversion to Meta or Megatron-LM
that is not the table that wrote, so it is a second opinion; after one from them it shows that the files hold what was
read. Nothing is computed with the weights: agreement.py does that, for Hugging Face's folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mega.core.checkpoint.forms.convert import opened
from mega.core.checkpoint.forms.exchange import opened_tree
from mega.core.checkpoint.forms.kinds import kind_of
from mega.core.checkpoint.forms.mapping import Source, Table, assemble, check_copies, prove
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.layout import model_of
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.store import Checkpoint, locate


@dataclass(frozen=True)
class ReadBack:
    """How much was compared: tensors of ours, and their elements."""

    tensors: int
    elements: int

    def __str__(self) -> str:
        return (
            f"read back: all {self.tensors:,} tensors, {self.elements:,} elements, are bit for bit those of the other "
            "form (places and bytes; no forward pass)"
        )


def read_back(one: Path, other: Path, heads: int | None = None) -> ReadBack:
    """Compare an own checkpoint with what it was made from, or what was made of it, in either order.

    heads: as of `exchange`. Errors: CheckpointError naming the first tensor that differs.
    """
    own, foreign = (one, other) if kind_of(one) == "mega" else (other, one)
    checkpoint = locate(own)
    if kind_of(foreign) not in ("megatron", "torch_dist"):
        source, _, table = opened(foreign)
        return compare(source, table, checkpoint)
    vocab = model_of(checkpoint.meta, str(checkpoint.path)).vocab
    state = any(name.startswith("moment1/") for name in checkpoint.tensors)
    found = opened_tree(foreign, vocab, heads, state)
    return compare(found.source, found.table, checkpoint)


def check_comparable(load: Path, to_ours: bool) -> None:
    """Errors: ValueError unless one side of a conversion is ours and the other is not."""
    if (kind_of(load) == "mega") == to_ours:
        other = "; `mega checkpoint diff` compares two of ours" if to_ours else ""
        raise ValueError(f"--verify: {load}: one of source and target must be ours, and only one{other}")


def compare(source: Source, table: Table, checkpoint: Checkpoint) -> ReadBack:
    """Every tensor of `checkpoint` against what `table` makes of `source`, in blocks; the table is proven first."""
    prove(table, source.tensors)
    check_copies(table, source)
    targets = {target.name: target for target in table.targets}
    kinds = {name.partition("/")[0] for name in targets}
    wanted = {name for name in checkpoint.tensors if name.partition("/")[0] in kinds}
    if odd := wanted ^ targets.keys():
        raise CheckpointError(f"--verify: {min(odd)}: is in one of the two only")
    for name, target in targets.items():
        if checkpoint.tensors[name] != (target.shape, target.dtype):
            raise CheckpointError(
                f"--verify: {name}: is {checkpoint.tensors[name]}, not {(target.shape, target.dtype)}"
            )
        for box in blocks(Box((0,) * len(target.shape), target.shape), target.dtype.itemsize):
            found = torch.empty(box.size, dtype=target.dtype)
            checkpoint.read([Piece(name, target.shape, box.start, found)])
            expected = assemble(target, box, source).contiguous()
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                raise CheckpointError(f"--verify: {name}: is not what {target.fragments[0].source} says")
    return ReadBack(len(targets), sum(prod(target.shape) for target in table.targets))
