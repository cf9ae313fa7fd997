"""The interface of update rules: a rule keeps state for this rank's span of a bucket, and updates the span's weights.

An elementwise rule does not depend on the boundaries of tensors in the span. A rule on whole tensors communicates with
the ranks that hold the other parts, to obtain sums (LAMB, Adafactor) or whole matrices (Muon).
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
    """Collectives of a rule over all ranks that hold parts of a bucket's logical tensors. All these ranks must call
    them."""

    sums: Callable[[Bucket, torch.Tensor], torch.Tensor]
    """Sums over whole tensors from each rank's sums over its own parts (`bucket_sums.whole_sums`)."""
    matrices: Callable[[Bucket, torch.Tensor, MatrixFunction], torch.Tensor]
    """Applies a function to whole matrices; takes and returns this rank's span (`WholeMatrices.mapped`)."""


class StepArgs(NamedTuple):
    """The scalars of one update: its number, counted from 1, the learning rate, the weight decay."""

    step: int
    lr: float
    decay: float


class FlatState(NamedTuple):
    """State of consecutive elements of a bucket: the index of the first element in the bucket, and one value per
    element."""

    begin: int
    values: torch.Tensor


class Allocator(NamedTuple):
    """The dtype and device of optimizer state. locked: page-locked host memory, which a GPU copies directly."""

    dtype: torch.dtype
    device: torch.device
    locked: bool = False

    def zeros(self, elements: int) -> torch.Tensor:
        tensor = torch.zeros(elements, dtype=self.dtype, device=self.device)
        return page_locked(tensor) if self.locked else tensor


@dataclass
class ShardState:
    """Optimizer state for this rank's span of one bucket, in max(fp32, dtype)."""

    bucket: Bucket
    master: torch.Tensor | None
    """A copy of the weights in addition to the model's, or None."""
    moments: dict[str, FlatState] = field(default_factory=dict)
    """Kind -> one value per element."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key "kind/name" -> a vector for a whole logical tensor; all ranks that hold parts of the tensor hold the whole
    vector."""
    decays_all: bool = False
    """Whether biases and norms decay, too."""

    @property
    def has_master(self) -> bool:
        """Whether there is a master that is more precise than the weights."""
        return self.master is not None and self.master.dtype != self.bucket.own_weights.dtype

    @property
    def decay_end(self) -> int:
        """The end of the decayed weights, which come first, relative to the span."""
        begin, end = self.bucket.span
        if self.decays_all:
            return end - begin
        return min(max(self.bucket.decay_end, begin), end) - begin

    def decay_split(self) -> Iterator[tuple[slice, bool]]:
        """The two parts of the span: (slice of the span, whether its weights decay)."""
        begin, end = self.bucket.span
        yield slice(0, self.decay_end), True
        yield slice(self.decay_end, end - begin), False

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state."""
        if self.master is not None:
            yield self.master
        yield from (flat.values for flat in self.moments.values())
        yield from self.factors.values()


class Rule(Protocol):
    """An update rule with its constants."""

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        """Allocate the initial state of a span in `owned`."""

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        """Update `master` in place; `grad` may be overwritten. Both are this rank's span, flat."""


class Elementwise:
    """A rule whose update of an element depends on that element alone."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments; each has one value per element."""
        raise NotImplementedError

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        """Update in place; all tensors are flat and have the same length and dtype."""
        raise NotImplementedError

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        begin, end = owned.bucket.span
        owned.moments = {kind: FlatState(begin, allocator.zeros(end - begin)) for kind in self.kinds}

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        for part, decays in owned.decay_split():
            moments = (flat.values[part] for flat in owned.moments.values())
            self.update(master[part], grad[part], *moments, args=args if decays else args._replace(decay=0.0))
