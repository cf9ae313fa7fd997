"""Others' weights read where they lie, as a checkpoint of ours is read: rectangles by our names, in any layout.

Nothing is written. It knows tables and tensors; no form, no model, no rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from mega.core.checkpoint.forms.form import Opened
from mega.core.checkpoint.forms.mapping import assemble
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.disk import side_by_side
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece, Tensors

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


class ForeignWeights:
    """The tensors of an `Opened` whose table was proven (`convert.opened_foreign`), by our names.

    path: as messages call it. tensors: key -> (whole shape, dtype), as of `Checkpoint`.
    """

    def __init__(self, path: Path, opened: Opened) -> None:
        self.path, self._source = path, opened.source
        self._targets = {target.name: target for target in opened.table.targets}
        self.tensors: Tensors = opened.table.tensors(opened.source.tensors)

    def read(self, wanted: Iterable[Piece], *, cast: bool = False) -> None:
        """Fill the tensors of `wanted` in place, a block at a time, several side by side. cast: convert where dtypes
        differ.

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
