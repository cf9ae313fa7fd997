"""From reduced gradients to new weights, bucket by bucket, on the spans that this rank owns.

    1 norm over the whole model      square sums of counted gradients, added over ranks
    2 clip                           scale down to the limit
    3 update                         masters and moments of our spans
    4 write back                     weights from masters, and every rank's spans to all (ZeRO)

Masters are the weights themselves where these are fp32 or fp64. Knows no model, no schedule and no disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mega.core.ops.suite import REFERENCE, Ops
from mega.core.optim.adam import AdamW
from mega.core.parallel.collectives import all_reduce
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

    @property
    def decay_end(self) -> int:
        """Where in our span decayed weights end."""
        begin, end = self.bucket.span
        return min(max(self.bucket.decay_end, begin), end) - begin

    def halves(self) -> Iterator[tuple[slice, bool]]:
        """Our span cut where decayed weights end: (slice of the span, decayed)."""
        yield slice(0, self.decay_end), True
        yield slice(self.decay_end, self.master.numel()), False


class Optimizer:
    """AdamW over a `GradBuffer`, by the suite's one pass on the device or by the rule's own steps."""

    def __init__(self, grads: GradBuffer, rule: AdamW, clip: float, ops: Ops = REFERENCE):
        self.grads, self.rule, self.clip, self.ops = grads, rule, clip, ops
        self._apply = rule.reference if ops.plain else rule.update
        self.owned = [_own(bucket) for bucket in grads.buckets]
        self._updates = torch.zeros((), dtype=torch.float64, device=grads.buckets[0].own_grads.device)

    @property
    def updates(self) -> int:
        """Steps that were not skipped. Reading it waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def step(self, lr: float, decay: float, scale: torch.Tensor | None = None) -> Outcome:
        """One update from the gradients that `grads.finish()` left; `scale` is what losses were multiplied by."""
        # 1
        squares = self.grads.square_sum()
        all_reduce(squares, self.grads.norm_axis)
        norm = squares.sqrt() if scale is None else squares.sqrt() / scale
        fine = torch.isfinite(norm)
        self._updates += fine
        # 2
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
        if scale is not None:
            factor = factor / scale
        # 3, 4
        if self.ops.adamw is not None:
            self._update_on_device(self.ops.adamw, fine, factor, lr, decay)
        elif bool(fine):
            self._update(factor if self.clip or scale is not None else None, lr, decay)
        self.grads.share_weights()
        return Outcome(norm, fine)

    def _update(self, factor: torch.Tensor | None, lr: float, decay: float) -> None:
        """The update by the rule's own steps."""
        step = self.updates
        for owned in self.owned:
            grad = owned.bucket.own_grads.to(owned.master.dtype)
            if factor is not None:
                grad.mul_(factor)
            for part, decays in owned.halves():
                self._apply(
                    owned.master[part],
                    grad[part],
                    owned.moment1[part],
                    owned.moment2[part],
                    step=step,
                    lr=lr,
                    decay=decay if decays else 0.0,
                )
            if owned.has_master:
                owned.bucket.own_weights.copy_(owned.master)

    def _update_on_device(
        self, adamw: Callable[..., None], fine: torch.Tensor, factor: torch.Tensor, lr: float, decay: float
    ) -> None:
        """The update in one pass a bucket; whether it counts is decided on the device, so nobody waits."""
        rule, t = self.rule, self._updates
        facts = torch.stack([fine.double(), factor.double(), 1 - rule.beta1**t, 1 - rule.beta2**t]).float()
        for owned in self.owned:
            adamw(
                owned.master,
                owned.bucket.own_grads,
                owned.moment1,
                owned.moment2,
                owned.bucket.own_weights if owned.has_master else None,
                facts,
                decay_end=owned.decay_end,
                lr=lr,
                decay=decay,
                beta1=rule.beta1,
                beta2=rule.beta2,
                eps=rule.eps,
            )

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
