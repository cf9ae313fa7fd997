"""The interface of update rules. A rule keeps state for this rank's span of a bucket, and updates the span's weights.

An elementwise rule does not depend on the boundaries of tensors in the span. Other rules communicate with the ranks
that hold other shards of a tensor, to obtain sums (LAMB, Adafactor) or whole matrices (Muon).
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
    """Collectives for rules, over all ranks that hold shards of a bucket's logical tensors. All these ranks must call
    each collective."""

    sums: Callable[[Bucket, torch.Tensor], torch.Tensor]
    """Function that reduces the ranks' sums over shards to sums over whole tensors (`bucket_sums.whole_sums`)."""
    matrices: Callable[[Bucket, torch.Tensor, MatrixFunction], torch.Tensor]
    """Function that applies another function to whole matrices. Input and result are this rank's span
    (`WholeMatrices.mapped`)."""


class StepArgs(NamedTuple):
    """The scalars of one update: the update's number (counted from 1), the learning rate and the weight decay."""

    step: int
    lr: float
    decay: float


class FlatState(NamedTuple):
    """State of consecutive elements of a bucket. begin: index of the first element. values: one value per element."""

    begin: int
    values: torch.Tensor


class Allocator(NamedTuple):
    """The dtype and device of optimizer state. locked: whether to use page-locked host memory, which a GPU copies
    directly."""

    dtype: torch.dtype
    device: torch.device
    locked: bool = False

    def zeros(self, elements: int) -> torch.Tensor:
        tensor = torch.zeros(elements, dtype=self.dtype, device=self.device)
        return page_locked(tensor) if self.locked else tensor


@dataclass
class ShardState:
    """Optimizer state for this rank's span of one bucket, in fp32 or, if wider, the weights' dtype."""

    bucket: Bucket
    master: torch.Tensor | None
    """A master copy of the weights; None if the rule updates the model's weights."""
    moments: dict[str, FlatState] = field(default_factory=dict)
    """Name of a moment -> one value per element."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key "kind/name" -> a vector for a whole logical tensor. All ranks that hold shards of the tensor hold the whole
    vector."""
    decays_all: bool = False
    """Whether biases and norms also decay."""

    @property
    def has_master(self) -> bool:
        """Whether the state has a master copy of the weights in a higher precision."""
        return self.master is not None and self.master.dtype != self.bucket.own_weights.dtype

    @property
    def decay_end(self) -> int:
        """The index in the span of the first weight that does not decay. Weights that decay come first in a bucket."""
        begin, end = self.bucket.span
        if self.decays_all:
            return end - begin
        return min(max(self.bucket.decay_end, begin), end) - begin

    def decay_split(self) -> Iterator[tuple[slice, bool]]:
        """Yield the two parts of the span, as (slice of the span, whether the weights in the slice decay)."""
        begin, end = self.bucket.span
        yield slice(0, self.decay_end), True
        yield slice(self.decay_end, end - begin), False

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the state."""
        if self.master is not None:
            yield self.master
        yield from (flat.values for flat in self.moments.values())
        yield from self.factors.values()


class Rule(Protocol):
    """An update rule with its constants."""

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        """Allocate the initial state of a span in `owned`."""

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        """Update `master` in place; `grad` may be overwritten. Both tensors are flat and cover this rank's span."""


class Elementwise:
    """A rule whose update of an element depends only on that element."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments, each of which has one value per element."""
        raise NotImplementedError

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        """Update `master` and `moments` in place. All tensors are flat and have the same length and dtype."""
        raise NotImplementedError

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        begin, end = owned.bucket.span
        owned.moments = {kind: FlatState(begin, allocator.zeros(end - begin)) for kind in self.kinds}

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        for part, decays in owned.decay_split():
            moments = (flat.values[part] for flat in owned.moments.values())
            self.update(master[part], grad[part], *moments, args=args if decays else args._replace(decay=0.0))
