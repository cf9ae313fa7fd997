"""Read weights in another program's format in place, through the interface of a mega checkpoint: any rectangle of any
tensor, under the project's tensor names.

Nothing is written. This module uses the tables and sources that the module of each format provides, and does not depend
on a particular format or family, or on ranks.
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

from mega.core.checkpoint.forms.form import Form, FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import assemble, check_copies, prove
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.disk import run_concurrently
from mega.core.checkpoint.own.model import check_model
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece, Tensors, naming
from mega.core.checkpoint.own.source import Readable

SAMPLES, SAMPLE_BYTES = 64, 1 << 12
"""Number of samples per file, and number of bytes per sample, in `files_digest`."""


def files_digest(place: Path) -> str:
    """Return a digest of the names, sizes and sampled bytes of a file, or of all files in a folder. Small files are
    covered completely.

    Hashing all bytes of large weights would take minutes. Samples are enough to distinguish models, because training
    changes nearly all values.
    """
    hasher = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file()):
        size = path.stat().st_size
        hasher.update(f"{path.name if path == place else path.relative_to(place)} {size}\n".encode())
        with path.open("rb") as file:
            for begin in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(begin)
                hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest()


SAMPLED = "weights-"
"""Prefix of a digest of sampled values. A digest without this prefix is the sha256 of a manifest."""
BLOCKS, SIDE = 8, 16
"""Number of samples per tensor in `weights_digest`, and the side of a square sample. Samples of a vector are runs of
SIDE x SIDE values. Samples of a matrix are squares, because reading a square takes the same time if the matrix is
stored transposed."""


def weights_digest(weights: Readable) -> str:
    """Return a digest of weights that does not depend on the file format: a hash of the project's tensor names, shapes,
    dtypes, and sampled values, including the first and last values of each tensor."""
    hasher, pieces = hashlib.sha256(), list[Piece]()
    for key in sorted(key for key in weights.tensors if key.startswith("weights/")):
        shape, dtype = weights.tensors[key]
        hasher.update(f"{key} {tuple(shape)} {dtype}\n".encode())
        limits = (*(1 for _ in shape[:-2]), SIDE, SIDE) if len(shape) > 1 else (SIDE * SIDE,)
        size = tuple(map(min, shape, limits))
        for number in range(BLOCKS):
            # The offsets include both ends of each dim, and each dim steps through its offsets in a different order.
            indices = (number * (2 * dim + 1) % BLOCKS for dim in range(len(shape)))
            start = (
                index * (whole - part) // (BLOCKS - 1) for index, whole, part in zip(indices, shape, size, strict=True)
            )
            pieces.append(Piece(key, shape, tuple(start), torch.empty(size, dtype=dtype)))
    weights.read(pieces, verify=False)
    for piece in pieces:
        hasher.update(piece.tensor.view(torch.uint8).numpy().tobytes())
    return SAMPLED + hasher.hexdigest()


def opened_foreign(form: Form, load: Path, options: FormOptions) -> OpenedForm:
    """Open a checkpoint of another format and check its model, dtypes and table, without reading tensors. The result's
    `notes` report tensors that are fp32 in a 16-bit model. Errors: CheckpointError naming the file, key or tensor at
    fault."""
    checkpoint = form.open(load, options)
    check_model(checkpoint.model, str(load))
    notes = (*checkpoint.notes, *dtype_notes(checkpoint))
    with naming(load):
        prove(checkpoint.table, checkpoint.source.tensors)
    check_copies(checkpoint.table, checkpoint.source)
    return replace(checkpoint, notes=notes)


def main_dtype(tensors: Tensors) -> torch.dtype:
    """The model's main dtype, taken from the embedding, or from the first tensor in a checkpoint of adapters."""
    first_dtype = next(dtype for _, dtype in tensors.values())
    return next((dtype for name, (_, dtype) in tensors.items() if name.endswith("embed_tokens.weight")), first_dtype)


def dtype_notes(opened: OpenedForm) -> tuple[str, ...]:
    """Messages about weights with a wider dtype than the rest, such as fp32 norms in a 16-bit model. These weights keep
    their dtype.

    A weight that has a wider dtype in one block must have it in every block. Any other mix of dtypes indicates a
    damaged file or a tensor that is not a weight. Errors: CheckpointError naming a weight with an unexpected dtype.
    """
    weights = [target for target in opened.table.targets if target.name.startswith("weights/")]
    dtypes = {name: dtype for name, (_, dtype) in opened.table.tensors(opened.source.tensors).items()}
    elements, kinds = Counter[torch.dtype](), Counter[tuple[str, torch.dtype]]()
    for target in weights:
        elements[dtypes[target.name]] += prod(target.shape)
        kinds[_in_every_block(target.name), dtypes[target.name]] += 1
    usual = max(elements, key=lambda dtype: (dtype.is_floating_point, elements[dtype]))
    of_kind = {kind: dtype for (kind, dtype), _ in reversed(kinds.most_common())}
    allowed = {usual, torch.float32} if usual in (torch.bfloat16, torch.float16) else {usual}
    for target in weights:
        common = of_kind[_in_every_block(target.name)]
        expected = common if common in allowed else usual
        if dtypes[target.name] != expected or not usual.is_floating_point:
            rule = f"the others are {expected}" if usual.is_floating_point else "must be a floating dtype"
            raise CheckpointError(f"{target.fragments[0].source}: is {dtypes[target.name]}, {rule}")
    wider = [target.name.removeprefix("weights/") for target in weights if dtypes[target.name] != usual]
    if not wider:
        return ()
    return (f"{len(wider)} of {len(weights)} tensors are fp32 among {usual} ({wider[0]}, ...): each keeps its dtype",)


def _in_every_block(name: str) -> str:
    """Return a tensor's name without the block index."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


class ForeignWeights:
    """The tensors of an `OpenedForm` whose table was checked by `opened_foreign`, under the project's names.

    path: the path to name in messages. tensors: key -> (whole shape, dtype), as in `Checkpoint`.
    """

    def __init__(self, path: Path, opened: OpenedForm) -> None:
        self.path, self._source = path, opened.source
        self._targets = {target.name: target for target in opened.table.targets}
        self.tensors: Tensors = opened.table.tensors(opened.source.tensors)

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `pieces` in place, reading several blocks concurrently. cast: whether to convert values
        where dtypes differ. verify: has no effect, because the files contain no hashes.

        Errors: CheckpointError naming the tensor (unknown key, wrong shape or dtype) or the damaged file.
        """
        jobs, size = list[tuple[Piece, Box]](), 0
        for piece in pieces:
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

        run_concurrently(fill, jobs, size)
