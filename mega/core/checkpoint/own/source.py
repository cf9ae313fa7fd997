"""The interface for reading weights of any format, and a wrapper that presents a checkpoint as a source for
conversions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mega.core.checkpoint.own.pieces import Box, Piece, Tensors
from mega.core.untrusted import Json


class Readable(Protocol):
    """An object from which rectangles of tensors can be read. The tensors have the project's names."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Tensors: ...

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None: ...


class StoredWeights(Readable, Protocol):
    """A mega checkpoint, a checkpoint of adapters combined with its base, or weights of another program's format.

    foreign: whether the weights have another program's format, without optimizer state and progress. meta: the plain
    state of the run that saved the weights. attachments: file name -> path of small files stored with the weights.
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
    """Read the rectangle `box` of the tensor `key`. Errors: CheckpointError naming the damaged file."""
    whole, dtype = checkpoint.tensors[key]
    tensor = torch.empty(box.size, dtype=dtype)
    checkpoint.read([Piece(key, whole, box.start, tensor)])
    return tensor


class OwnSource:
    """A mega checkpoint as a source for conversions, restricted to the weights or to some kinds of tensors."""

    def __init__(self, checkpoint: StoredWeights, kinds: Sequence[str] = ("weights",)) -> None:
        self._checkpoint = checkpoint
        self.tensors: Tensors = {
            key: value for key, value in checkpoint.tensors.items() if key.partition("/")[0] in kinds
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        return read_part(self._checkpoint, name, box)
