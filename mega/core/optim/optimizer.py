"""From reduced gradients to new weights, bucket by bucket, on the spans that this rank owns.

    1 norm over the whole model      square sums of counted gradients, added over ranks
    2 clip                           scale down to the limit
    3 update                         masters and moments of our spans
    4 write back                     weights from masters, and every rank's spans to all (ZeRO)

Masters are the weights themselves where these are fp32 or fp64. Knows no model, no schedule and no disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mega.core.optim.adam import AdamW
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.parallel.gradients import Bucket, GradBuffer


@dataclass(frozen=True)
class Outcome:
    """What one step did; device values, so that nobody has to wait for them.

    grad_norm: before clipping. fine: 0 where the gradients were not finite and the step was skipped.
    """

    grad_norm: torch.Tensor
    fine: torch.Tensor


@dataclass
class Owned:
    """Optimizer state of our span of one bucket, flat and of the span's length."""

    bucket: Bucket
    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor

    @property
    def has_master(self) -> bool:
        """Whether masters are kept besides the weights."""
        return self.master.dtype != self.bucket.weights.dtype

    def halves(self) -> Iterator[tuple[slice, bool]]:
        """Our span cut where decayed weights end: (slice of the span, decayed)."""
        begin, end = self.bucket.span
        border = min(max(self.bucket.decay_end, begin), end) - begin
        yield slice(0, border), True
        yield slice(border, end - begin), False


class Optimizer:
    """AdamW over a `GradBuffer`. `updates` counts the steps that were not skipped."""

    def __init__(self, grads: GradBuffer, rule: AdamW, clip: float, *, reference: bool = False):
        self.grads, self.rule, self.clip = grads, rule, clip
        self.updates = 0
        self._apply = rule.reference if reference else rule.update
        self.owned = [_own(bucket) for bucket in grads.buckets]

    def step(self, lr: float, decay: float) -> Outcome:
        """One update from the gradients that `grads.finish()` left."""
        # 1
        squares = self.grads.square_sum()
        all_reduce(squares, self.grads.norm_axis)
        norm = squares.sqrt()
        fine = torch.isfinite(norm)
        if not bool(fine):
            return Outcome(norm, fine)
        self.updates += 1
        # 2
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else None
        for owned in self.owned:
            bucket = owned.bucket
            grad = bucket.own_grads
            if factor is not None:
                grad.mul_(factor)
            grad = grad.to(owned.master.dtype)
            # 3
            for part, decays in owned.halves():
                self._apply(
                    owned.master[part],
                    grad[part],
                    owned.moment1[part],
                    owned.moment2[part],
                    step=self.updates,
                    lr=lr,
                    decay=decay if decays else 0.0,
                )
            # 4
            if owned.has_master:
                bucket.own_weights.copy_(owned.master)
        self.share_weights()
        return Outcome(norm, fine)

    def share_weights(self) -> None:
        """Every rank's spans to all ranks of the data axis, where spans are shared out."""
        if self.grads.zero and self.grads.mesh.data.size > 1:
            for bucket in self.grads.buckets:
                bucket.weights.copy_(all_gather(bucket.own_weights, self.grads.mesh.data))

    def masters_from_weights(self) -> None:
        """Start masters from the weights, where a checkpoint had none."""
        for owned in self.owned:
            if owned.has_master:
                owned.master.copy_(owned.bucket.own_weights)


def _own(bucket: Bucket) -> Owned:
    weights = bucket.own_weights
    wide = torch.promote_types(weights.dtype, torch.float32)
    master = weights if weights.dtype == wide else weights.to(wide, copy=True)
    return Owned(bucket, master, torch.zeros_like(weights, dtype=wide), torch.zeros_like(weights, dtype=wide))
