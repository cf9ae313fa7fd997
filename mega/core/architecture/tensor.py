"""Descriptions of logical tensors. This module does not depend on torch, on ranks or on how layers fuse tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Unit = int | str
"""A part of the model that is never split between pipeline stages: a layer's number, or a name such as "embedding"."""

Partial = Literal["tp", "sequence"]
"""The condition under which the gradient on a tensor rank is partial. "tp": always (norms of heads, because a rank has
only some of the heads). "sequence": under sequence parallelism (other norms and biases of row-parallel layers, because
a rank has only some of the tokens)."""

TENSOR_AXES = {"dp": "tp", "edp": "etp"}
"""Data axis of a tensor -> the axis of the tensor ranks that shard or replicate it."""


@dataclass(frozen=True)
class Cut:
    """The sharding of dimension `dim` over `axis`, in equal ranges of whole parts (heads, columns, vocabulary rows)."""

    dim: int
    axis: str
    parts: int
    """The number of parts, for example heads, none of which may be split."""
    multiple: int = 0
    """The dimension is first padded to a multiple of `multiple x axis size`, and the last ranks hold the padding. If
    `multiple` is 0, `parts` must be a multiple of the axis size."""


@dataclass(frozen=True)
class Member:
    """The index of a tensor among `count` equal tensors, one per expert, which are distributed over an axis without
    being split."""

    axis: str
    index: int
    count: int


@dataclass(frozen=True)
class Init:
    """Initial values: a constant, or N(0, std) if std is positive."""

    constant: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """One logical tensor."""

    name: str
    shape: tuple[int, ...]
    units: tuple[Unit, ...]
    """The units that use the tensor. A tied tensor has several."""
    init: Init
    cuts: tuple[Cut, ...] = ()
    """The sharding of the tensor. Each cut has a different dimension and a different axis."""
    partial: tuple[Partial, ...] = ()
    """Conditions under which the gradient on a tensor rank is partial."""
    data: str = "dp"
    """The data axis over which the gradient is summed ("edp" for a tensor of an expert). Its ranks hold copies of the
    tensor and process different tokens."""
    trainable: bool = True
    """Whether the tensor is trained. A frozen tensor has no gradient, bucket, moments or master copy."""
    share: float = 1.0
    """The fraction of the layer's tokens that the tensor is applied to. For a tensor of an expert, this is the fraction
    of tokens that choose the expert."""
    member: Member | None = None
    """Index of the expert to which the tensor belongs; None for other tensors."""
    counted: bool = False
    """Whether each step updates the tensor from statistics of the batch (such as the experts' load) instead of a
    gradient, in fp32 or wider. Checkpoints store such a tensor like trained tensors."""

    @property
    def learned(self) -> bool:
        """Whether gradients update the tensor."""
        return self.trainable and not self.counted

    @property
    def tensor_axis(self) -> str:
        """The axis of the tensor ranks that shard or replicate the tensor."""
        return TENSOR_AXES[self.data]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to the tensor. As in Megatron-LM, one-dimensional tensors such as biases do not
        decay."""
        return len(self.shape) > 1

    @property
    def hidden_matrix(self) -> bool:
        """Whether the tensor is a matrix of a layer (not of the embedding, the output or a head)."""
        return len(self.shape) == 2 and all(isinstance(unit, int) for unit in self.units)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def cut(self) -> Cut | None:
        """Return the cut that shards the tensor over tensor ranks, or None if each tensor rank holds the whole
        tensor."""
        return next((cut for cut in self.cuts if cut.axis == self.tensor_axis), None)


def padded(parts: int, size: int, multiple: int) -> int:
    """Return `parts` rounded up to a multiple of `multiple x size`.

    >>> padded(50257, 1, 128), padded(50257, 8, 128)
    (50304, 51200)
    """
    unit = multiple * size
    return ceil(parts / unit) * unit
