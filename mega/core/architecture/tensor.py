"""What is known of one logical tensor. It refuses to know torch, ranks, and how layers fuse tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

Unit = int | str
"""A part of the model that one pipeline stage holds whole: a layer's number, or a name such as "embedding"."""

Partial = Literal["tp", "sequence"]
"""Axes over which a rank's gradient is only a part of the whole: "tp" always (norms of a rank's own heads),
"sequence" when the tensor ranks split the sequence (norms and row biases see only their tokens)."""

TENSOR_AXES = {"dp": "tp", "edp": "etp"}
"""Data axis of a tensor -> the axis of the tensor ranks that cut it or hold copies."""


@dataclass(frozen=True)
class Cut:
    """`dim` is shared out over `axis` in equal runs of whole parts (heads, columns, vocabulary rows).

    multiple: 0 if `parts` must divide by the axis; else the dim is first padded to a multiple of
        `multiple x axis size`, and ranks at the end hold padding.
    """

    dim: int
    axis: str
    parts: int
    multiple: int = 0


@dataclass(frozen=True)
class Member:
    """One of `count` tensors alike that an axis shares out whole, in equal runs: an expert's."""

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
    """One logical tensor. Several units mean one tensor used several times (tied embeddings).

    data: the data axis: the ranks that hold copies of it and see other tokens, over which its gradient is summed ("dp",
        or "edp" for an expert's). trainable: whether it gets gradients; what does not has no bucket, no moments and no
        masters. share: of the tokens that its layer reads, how many it is multiplied with (an expert's: those that
        choose it). member: of a tensor of one expert of several. counted: it has no gradient; a step sets it by what it
        has counted, in fp32 at least, and checkpoints hold it as they hold what is trained.
    """

    name: str
    shape: tuple[int, ...]
    units: tuple[Unit, ...]
    init: Init
    cuts: tuple[Cut, ...] = ()
    """Each along a dim and an axis of its own."""
    partial: tuple[Partial, ...] = ()
    data: str = "dp"
    trainable: bool = True
    share: float = 1.0
    member: Member | None = None
    counted: bool = False

    @property
    def learned(self) -> bool:
        """Whether a gradient changes it."""
        return self.trainable and not self.counted

    @property
    def tensor_axis(self) -> str:
        """The axis of the tensor ranks that share it."""
        return TENSOR_AXES[self.data]

    @property
    def decays(self) -> bool:
        """Megatron's rule: neither biases nor one-dimensional tensors decay."""
        return len(self.shape) > 1

    @property
    def hidden_matrix(self) -> bool:
        """Whether it is a matrix of a layer, and not of the embedding, the output or a head."""
        return len(self.shape) == 2 and all(isinstance(unit, int) for unit in self.units)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def cut(self) -> Cut | None:
        """How its tensor ranks cut it; None where each of them holds it whole."""
        return next((cut for cut in self.cuts if cut.axis == self.tensor_axis), None)


def padded(parts: int, size: int, multiple: int) -> int:
    """`parts` rounded up to a multiple of `multiple x size`.

    >>> padded(50257, 1, 128), padded(50257, 8, 128)
    (50304, 51200)
    """
    unit = multiple * size
    return ceil(parts / unit) * unit
