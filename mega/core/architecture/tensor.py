"""The description of one logical tensor. This module does not depend on torch, ranks or the way layers fuse tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Unit = int | str
"""A part of the model that one pipeline stage holds whole: a layer's number, or a name such as "embedding"."""

Partial = Literal["tp", "sequence"]
"""When the gradient on a tensor rank is partial: "tp" always (norms of a rank's own heads), "sequence" if the tensor
ranks split the sequence (norms and row biases then get the gradient of the rank's own tokens)."""

TENSOR_AXES = {"dp": "tp", "edp": "etp"}
"""Data axis of a tensor -> the axis of the tensor ranks that shard or replicate it."""


@dataclass(frozen=True)
class Cut:
    """`dim` is sharded over `axis` in equal ranges of whole parts (heads, columns, vocabulary rows)."""

    dim: int
    axis: str
    parts: int
    """The number of parts that must not be split, for example heads."""
    multiple: int = 0
    """0 if the axis size must divide `parts`. Otherwise the dim is first padded to a multiple of `multiple x axis
    size`, and the last ranks hold padding."""


@dataclass(frozen=True)
class Member:
    """The index of a tensor among `count` equal tensors, one per expert, that are distributed whole over an axis."""

    axis: str
    index: int
    count: int


@dataclass(frozen=True)
class Init:
    """Initial values: a constant, or N(0, std) when std is positive."""

    constant: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """One logical tensor."""

    name: str
    shape: tuple[int, ...]
    units: tuple[Unit, ...]
    """The units that use the tensor; several for a tied tensor."""
    init: Init
    cuts: tuple[Cut, ...] = ()
    """How the tensor is sharded. Each cut has a different dim and a different axis."""
    partial: tuple[Partial, ...] = ()
    """When the gradient on a tensor rank is partial."""
    data: str = "dp"
    """The data axis, over which the gradient is summed: ranks that hold copies of the tensor and have different tokens
    ("edp" for a tensor of an expert)."""
    trainable: bool = True
    """Whether the tensor gets gradients. A frozen tensor has no bucket, no moments and no master copy."""
    share: float = 1.0
    """The fraction of the layer's tokens with which the tensor is multiplied (for an expert, the tokens that choose the
    expert)."""
    member: Member | None = None
    """The expert's index, for a tensor of one of several experts; otherwise None."""
    counted: bool = False
    """Whether the tensor has no gradient, but is set from counts in each step, in fp32 at least. Checkpoints store it
    like trained tensors."""

    @property
    def learned(self) -> bool:
        """Whether gradients update the tensor."""
        return self.trainable and not self.counted

    @property
    def tensor_axis(self) -> str:
        """The axis of the tensor ranks that shard or replicate it."""
        return TENSOR_AXES[self.data]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies. As in Megatron, biases and other one-dimensional tensors do not decay."""
        return len(self.shape) > 1

    @property
    def hidden_matrix(self) -> bool:
        """Whether the tensor is a matrix of a layer (not of the embedding, the output or a head)."""
        return len(self.shape) == 2 and all(isinstance(unit, int) for unit in self.units)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def cut(self) -> Cut | None:
        """How tensor ranks shard the tensor; None if each rank holds it whole."""
        return next((cut for cut in self.cuts if cut.axis == self.tensor_axis), None)


def padded(parts: int, size: int, multiple: int) -> int:
    """`parts` rounded up to a multiple of `multiple x size`.

    >>> padded(50257, 1, 128), padded(50257, 8, 128)
    (50304, 51200)
    """
    unit = multiple * size
    return ceil(parts / unit) * unit
