"""The interface through which weights are read, in any format, and a checkpoint as the source of conversions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mega.core.checkpoint.own.pieces import Box, Piece, Tensors
from mega.core.untrusted import Json


class Readable(Protocol):
    """Tensors under the project's names, whose rectangles can be read."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Tensors: ...

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None: ...


class StoredWeights(Readable, Protocol):
    """A mega checkpoint, a checkpoint of adapters with its base, or foreign weights.

    foreign: whether these are foreign weights, which have no optimizer state and no progress. meta: the plain state of
    the run that saved the weights. attachments: small files stored with the weights, by name.
    """

    @property
    def step(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def foreign(self) -> bool: ...

    @property
    def meta(self) -> Mapping[str, Json]: ...

    @property
    def attachments(self) -> Mapping[str, Path]: ...


def read_part(checkpoint: StoredWeights, key: str, box: Box) -> torch.Tensor:
    """A rectangle of the tensor `key`. Errors: CheckpointError naming the damaged file."""
    whole, dtype = checkpoint.tensors[key]
    tensor = torch.empty(box.size, dtype=dtype)
    checkpoint.read([Piece(key, whole, box.start, tensor)])
    return tensor


class OwnSource:
    """The tensors of a mega checkpoint as a source of conversions: its weights, or some kinds of tensors."""

    def __init__(self, checkpoint: StoredWeights, kinds: Sequence[str] = ("weights",)) -> None:
        self._checkpoint = checkpoint
        self.tensors: Tensors = {
            key: value for key, value in checkpoint.tensors.items() if key.partition("/")[0] in kinds
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        return read_part(self._checkpoint, name, box)
