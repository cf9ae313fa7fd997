"""From reduced gradients to new weights, bucket by bucket, on the spans that this rank owns.

    1 norm over the whole model      square sums of counted gradients, added over ranks
    2 clip                           scale down to the limit
    3 update                         masters and moments of our spans, by the rule
    4 write back                     weights from masters, and every rank's spans to all (ZeRO)

Masters are the weights themselves where these are fp32 or fp64, and wherever none are kept: then an update begins with
the 16-bit weights and ends in them. Offloaded, masters and moments lie in pinned memory of the host, and updates are
computed there. Knows no model, no schedule and no disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mega.core.ops.suite import REFERENCE, Ops
from mega.core.optim.adam import AdamW
from mega.core.optim.rule import Owned, Room, Rule
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.gradients import Bucket, GradBuffer


@dataclass(frozen=True)
class Outcome:
    """What one step did; device values, so that nobody has to wait for them.

    grad_norm: before clipping. fine: 0 where the gradients were not finite and the step was skipped.
    """

    grad_norm: torch.Tensor
    fine: torch.Tensor


class Optimizer:
    """A rule over a `GradBuffer`: AdamW by the suite's one pass on the device, any rule by its own steps.

    masters: keep fp32 masters of 16-bit weights. offload: keep masters and moments on the host, and update there.
    """

    def __init__(
        self,
        grads: GradBuffer,
        rule: Rule,
        clip: float,
        ops: Ops = REFERENCE,
        *,
        masters: bool = True,
        offload: bool = False,
    ):
        self.grads, self.rule, self.clip, self.ops = grads, rule, clip, ops
        self._pass = ops.adamw if not offload else None
        self._masters, self._offload = masters, offload
        self.owned = [self._own(bucket) for bucket in grads.buckets]
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
        if self._pass is not None and isinstance(self.rule, AdamW):
            self._update_on_device(self._pass, self.rule, fine, factor, lr, decay)
        elif bool(fine):
            self._update(factor if self.clip or scale is not None else None, lr, decay)
        self.grads.share_weights()
        return Outcome(norm, fine)

    def _update(self, factor: torch.Tensor | None, lr: float, decay: float) -> None:
        """The update by the rule's own steps."""
        step = self.updates
        for owned in self.owned:
            weights = owned.bucket.own_weights
            master = weights.to(_wide(weights)) if owned.master is None else owned.master
            grad = _beside(owned.bucket.own_grads, master)
            if factor is not None:
                grad.mul_(factor.to(grad.device))
            self.rule.move(owned, master, grad, self.grads.whole_sums, step=step, lr=lr, decay=decay)
            if master is not weights:
                weights.copy_(master)

    def _update_on_device(
        self,
        adamw: Callable[..., None],
        rule: AdamW,
        fine: torch.Tensor,
        factor: torch.Tensor,
        lr: float,
        decay: float,
    ) -> None:
        """The update in one pass a bucket; whether it counts is decided on the device, so nobody waits."""
        t = self._updates
        facts = torch.stack([fine.double(), factor.double(), 1 - rule.beta1**t, 1 - rule.beta2**t]).float()
        for owned in self.owned:
            weights = owned.bucket.own_weights
            adamw(
                weights if owned.master is None else owned.master,
                owned.bucket.own_grads,
                *(flat.values for flat in owned.moments.values()),
                None if owned.master is None else weights,
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
            if owned.master is not None:
                owned.master.copy_(owned.bucket.own_weights)

    def _own(self, bucket: Bucket) -> Owned:
        """Masters and moments as they are before the first step."""
        weights = bucket.own_weights
        leaves = self._offload and weights.is_cuda
        room = Room(_wide(weights), torch.device("cpu") if leaves else weights.device, pinned=leaves)
        apart = self._offload or (self._masters and room.dtype != weights.dtype)
        owned = Owned(bucket, room.zeros(weights.numel()).copy_(weights) if apart else None)
        self.rule.start(owned, room)
        return owned


def _wide(weights: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weights.dtype, torch.float32)


def _beside(grad: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A gradient where the master is, in its dtype; the gradient itself where that is so already."""
    if grad.device != master.device:
        grad = torch.empty_like(grad, device=master.device, pin_memory=True).copy_(grad)
    return grad.to(master.dtype)
