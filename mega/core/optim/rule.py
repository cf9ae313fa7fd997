"""What every update rule is to the optimizer: it keeps state for our span of a bucket, and moves the span's weights.

A rule that treats every element alike need not know where a span begins and ends. One that looks at whole tensors
asks the ranks that hold parts of them, for sums (LAMB, Adafactor) or for whole matrices (Muon).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mega.core.device import page_locked
from mega.core.parallel.gradients import Bucket
from mega.core.parallel.whole_matrices import MatrixFunction


class Ranks(NamedTuple):
    """What a rule may ask of all ranks that hold parts of a bucket's logical tensors. They ask alike."""

    sums: Callable[[Bucket, torch.Tensor], torch.Tensor]
    """Sums over whole tensors from each rank's sums over its own parts (`bucket_sums.whole_sums`)."""
    matrices: Callable[[Bucket, torch.Tensor, MatrixFunction], torch.Tensor]
    """Our span of a function of every whole matrix, from our span of the matrices (`WholeMatrices.mapped`)."""


class StepArgs(NamedTuple):
    """How far one update goes: its count from 1, the rate, what weights decay by."""

    step: int
    lr: float
    decay: float


class FlatState(NamedTuple):
    """A run of a bucket's elements: where in the bucket it begins, and one value for each."""

    begin: int
    values: torch.Tensor


class Allocator(NamedTuple):
    """Where state is kept, and how wide; `locked` where it is host memory that a device reads."""

    dtype: torch.dtype
    device: torch.device
    locked: bool = False

    def zeros(self, elements: int) -> torch.Tensor:
        made = torch.zeros(elements, dtype=self.dtype, device=self.device)
        return page_locked(made) if self.locked else made


@dataclass
class ShardState:
    """What the optimizer keeps for our span of one bucket, in max(fp32, dtype).

    master: the weights, where they are kept in addition to the model's own. moments: by kind. factors: vectors that
    belong to whole logical tensors, by "kind/name"; every rank that holds a part of the tensor keeps them whole.
    decays_all: whether biases and norms decay, too.
    """

    bucket: Bucket
    master: torch.Tensor | None
    moments: dict[str, FlatState] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    decays_all: bool = False

    @property
    def has_master(self) -> bool:
        """Whether a master is more precise than the weight."""
        return self.master is not None and self.master.dtype != self.bucket.own_weights.dtype

    @property
    def decay_end(self) -> int:
        """Where in our span decayed weights end."""
        begin, end = self.bucket.span
        if self.decays_all:
            return end - begin
        return min(max(self.bucket.decay_end, begin), end) - begin

    def decay_split(self) -> Iterator[tuple[slice, bool]]:
        """Our span cut where decayed weights end: (slice of the span, decayed)."""
        begin, end = self.bucket.span
        yield slice(0, self.decay_end), True
        yield slice(self.decay_end, end - begin), False

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is kept."""
        if self.master is not None:
            yield self.master
        yield from (flat.values for flat in self.moments.values())
        yield from self.factors.values()


class Rule(Protocol):
    """An update rule with its constants."""

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        """Make the state of a span that has seen no gradient."""

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        """One update of `master` in place; `grad` is ours to change. Both are our span's."""


class Elementwise:
    """A rule that treats every element alike."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Moments, of which every element has one value each."""
        raise NotImplementedError

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        """One update in place; all tensors flat, of one length and dtype."""
        raise NotImplementedError

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        begin, end = owned.bucket.span
        owned.moments = {kind: FlatState(begin, allocator.zeros(end - begin)) for kind in self.kinds}

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        for part, decays in owned.decay_split():
            moments = (flat.values[part] for flat in owned.moments.values())
            self.update(master[part], grad[part], *moments, args=args if decays else args._replace(decay=0.0))
