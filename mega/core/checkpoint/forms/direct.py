"""Others' weights read where they lie, as a checkpoint of ours is read: rectangles by our names, in any layout.

Nothing is written. It knows what every form brings, tables and tensors; no one form, no family, no rank.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from mega.core.checkpoint.forms.form import Form, Given, Opened
from mega.core.checkpoint.forms.mapping import assemble, check_copies, prove
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.disk import side_by_side
from mega.core.checkpoint.own.model import check_model
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece, Tensors, naming
from mega.core.checkpoint.own.source import Readable

SAMPLES, SAMPLE_BYTES = 64, 1 << 12
"""Of each file, what its digest is made of."""


def files_digest(place: Path) -> str:
    """Of a file, or of all in a folder: names, sizes, and bytes of many places, of small files all.

    Hashing all bytes of others' weights would take minutes; training changes them nearly everywhere.
    """
    found = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file()):
        size = path.stat().st_size
        found.update(f"{path.name if path == place else path.relative_to(place)} {size}\n".encode())
        with path.open("rb") as file:
            for begin in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(begin)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


SAMPLED = "weights-"
"""What a digest of numbers begins with; one of a manifest is hexadecimal digits alone."""
BLOCKS, SIDE = 8, 16
"""Of each tensor, what such a digest is made of: squares, or of a vector runs of as many numbers. Of squares as much is
read in a form that has rows for our columns."""


def weights_digest(weights: Readable) -> str:
    """Of weights by our names, whatever files they lie in: names, shapes, dtypes, and numbers from the first to the
    last of each tensor."""
    found, pieces = hashlib.sha256(), list[Piece]()
    for key in sorted(key for key in weights.tensors if key.startswith("weights/")):
        shape, dtype = weights.tensors[key]
        found.update(f"{key} {tuple(shape)} {dtype}\n".encode())
        most = (*(1 for _ in shape[:-2]), SIDE, SIDE) if len(shape) > 1 else (SIDE * SIDE,)
        size = tuple(map(min, shape, most))
        for number in range(BLOCKS):
            # Each dimension's ends are among the offsets, and no two dimensions go through theirs in one order.
            turns = (number * (2 * dim + 1) % BLOCKS for dim in range(len(shape)))
            start = (at * (whole - part) // (BLOCKS - 1) for at, whole, part in zip(turns, shape, size, strict=True))
            pieces.append(Piece(key, shape, tuple(start), torch.empty(size, dtype=dtype)))
    weights.read(pieces, verify=False)
    for piece in pieces:
        found.update(piece.tensor.view(torch.uint8).numpy().tobytes())
    return SAMPLED + found.hexdigest()


def opened_foreign(form: Form, load: Path, given: Given) -> Opened:
    """A foreign checkpoint whose model, dtypes and table were checked; no tensor is moved yet. Its notes tell of fp32
    tensors too. Errors: CheckpointError naming the file, key or tensor at fault."""
    opened = form.open(load, given)
    check_model(opened.model, str(load))
    notes = (*opened.notes, *dtype_notes(opened))
    with naming(load):
        prove(opened.table, opened.source.tensors)
    check_copies(opened.table, opened.source)
    return replace(opened, notes=notes)


def main_dtype(tensors: Tensors) -> torch.dtype:
    """The dtype that most elements of a model have: its embedding's; of adapters alone that of the first."""
    others = next(dtype for _, dtype in tensors.values())
    return next((dtype for name, (_, dtype) in tensors.items() if name.endswith("embed_tokens.weight")), others)


def dtype_notes(opened: Opened) -> tuple[str, ...]:
    """Lines on weights that are wider than most: fp32 ones of a 16-bit model, such as norms. They are kept as they are.

    They must be of one kind in every block. Any other mixture is damage, or was never meant to be a weight.
    Errors: CheckpointError naming a weight of a dtype that it should not have.
    """
    weights = [target for target in opened.table.targets if target.name.startswith("weights/")]
    dtypes = {name: dtype for name, (_, dtype) in opened.table.tensors(opened.source.tensors).items()}
    elements, kinds = Counter[torch.dtype](), Counter[tuple[str, torch.dtype]]()
    for target in weights:
        elements[dtypes[target.name]] += prod(target.shape)
        kinds[_in_every_block(target.name), dtypes[target.name]] += 1
    usual = max(elements, key=lambda dtype: (dtype.is_floating_point, elements[dtype]))
    of_kind = {kind: dtype for (kind, dtype), _ in reversed(kinds.most_common())}
    kept = {usual, torch.float32} if usual in (torch.bfloat16, torch.float16) else {usual}
    for target in weights:
        common = of_kind[_in_every_block(target.name)]
        wanted = common if common in kept else usual
        if dtypes[target.name] != wanted or not usual.is_floating_point:
            others = f"the others are {wanted}" if usual.is_floating_point else "a floating dtype is wanted"
            raise CheckpointError(f"{target.fragments[0].source}: is {dtypes[target.name]}, {others}")
    wide = [target.name.removeprefix("weights/") for target in weights if dtypes[target.name] != usual]
    if not wide:
        return ()
    return (f"{len(wide)} of {len(weights)} tensors are fp32 among {usual} ({wide[0]}, ...): each keeps its dtype",)


def _in_every_block(name: str) -> str:
    """The name that a tensor has in every block."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


class ForeignWeights:
    """The tensors of an `Opened` whose table was proven (`opened_foreign`), by our names.

    path: as messages call it. tensors: key -> (whole shape, dtype), as of `Checkpoint`.
    """

    def __init__(self, path: Path, opened: Opened) -> None:
        self.path, self._source = path, opened.source
        self._targets = {target.name: target for target in opened.table.targets}
        self.tensors: Tensors = opened.table.tensors(opened.source.tensors)

    def read(self, wanted: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `wanted` in place, a block at a time, several side by side. cast: convert where dtypes
        differ. verify: of no effect; there are no hashes to compare with.

        Errors: CheckpointError naming the tensor (unknown key, other shape or dtype) or the damaged file.
        """
        jobs, size = list[tuple[Piece, Box]](), 0
        for piece in wanted:
            piece.check()
            if piece.key not in self.tensors:
                raise CheckpointError(f"{self.path}: holds nothing for {piece.key}")
            piece.check_source(self.path, self.tensors[piece.key], cast)
            if piece.box.elements:
                jobs += [(piece, box) for box in blocks(piece.box, self.tensors[piece.key][1].itemsize)]
                size += piece.bytes

        def fill(job: tuple[Piece, Box]) -> None:
            piece, box = job
            with torch.no_grad():
                part = assemble(self._targets[piece.key], box, self._source)
                piece.tensor[box.inside(piece.box)].copy_(part)

        side_by_side(fill, jobs, size)
