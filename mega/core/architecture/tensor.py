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
class Init:
    """Initial values: a constant, or N(0, std) when std is positive."""

    constant: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """One logical tensor. Several units mean one tensor used several times (tied embeddings).

    data: the data axis: the ranks that hold copies of it and see other tokens, over which its gradient is summed ("dp",
        or "edp" for what is cut over the expert axis). trainable: whether it gets gradients; what does not has no
        bucket, no moments and no masters. share: of the tokens that its layer reads, how many it is multiplied with (an
        expert's: those that choose it).
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

    @property
    def decays(self) -> bool:
        """Megatron's rule: neither biases nor one-dimensional tensors decay."""
        return len(self.shape) > 1

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def cut(self, axis: str = "tp") -> Cut | None:
        """How `axis` cuts it; None where every rank of the axis holds it whole."""
        return next((cut for cut in self.cuts if cut.axis == axis), None)


def padded(parts: int, size: int, multiple: int) -> int:
    """`parts` rounded up to a multiple of `multiple x size`.

    >>> padded(50257, 1, 128), padded(50257, 8, 128)
    (50304, 51200)
    """
    unit = multiple * size
    return ceil(parts / unit) * unit
