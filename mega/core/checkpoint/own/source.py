"""Tensors of a checkpoint of ours by name and rectangle, as conversions read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega.core.checkpoint.own.pieces import Box, Piece, Tensors
from mega.core.checkpoint.own.reader import Checkpoint


def read_part(checkpoint: Checkpoint, key: str, box: Box) -> torch.Tensor:
    """A rectangle of the tensor `key`. Errors: CheckpointError naming the damaged file."""
    whole, dtype = checkpoint.tensors[key]
    tensor = torch.empty(box.size, dtype=dtype)
    checkpoint.read([Piece(key, whole, box.start, tensor)])
    return tensor


class OwnSource:
    """The tensors of an own checkpoint as a source of conversions: its weights, or some kinds."""

    def __init__(self, checkpoint: Checkpoint, kinds: Sequence[str] = ("weights",)) -> None:
        self._checkpoint = checkpoint
        self.tensors: Tensors = {
            key: value for key, value in checkpoint.tensors.items() if key.partition("/")[0] in kinds
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        return read_part(self._checkpoint, name, box)
