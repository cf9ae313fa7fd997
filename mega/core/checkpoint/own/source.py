"""Tensors of a checkpoint of ours by name and rectangle, as conversions read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega.core.checkpoint.own.pieces import Box, Piece, Tensors
from mega.core.checkpoint.own.reader import Checkpoint


class OwnSource:
    """The tensors of an own checkpoint as a source of conversions: its weights, or some kinds."""

    def __init__(self, checkpoint: Checkpoint, kinds: Sequence[str] = ("weights",)) -> None:
        self._checkpoint = checkpoint
        self.tensors: Tensors = {
            key: value for key, value in checkpoint.tensors.items() if key.partition("/")[0] in kinds
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        whole, dtype = self.tensors[name]
        tensor = torch.empty(box.size, dtype=dtype)
        self._checkpoint.read([Piece(name, whole, box.start, tensor)])
        return tensor
