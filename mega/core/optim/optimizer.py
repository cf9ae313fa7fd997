"""From reduced gradients to new weights, bucket by bucket, on the spans that this rank owns.

    1 norm over the whole model      square sums of counted gradients, added over ranks
    2 clip                           scale down to the limit
    3 update                         masters and moments of our spans, by the rule
    4 write back                     weights from masters, and every rank's spans to all (ZeRO)

Masters are the weights themselves where these are fp32 or fp64, and where none are kept: then an update begins with
the 16-bit weights and ends in them. Offloaded, masters and moments lie in locked memory of the host, and updates are
computed there. Knows no model, no schedule and no disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mega.core.ops.suite import REFERENCE, Ops
from mega.core.optim.adam import AdamW
from mega.core.optim.rule import Allocator, Ranks, Rule, ShardState, StepArgs
from mega.core.parallel.bucket_sums import square_sum, tied_difference, whole_sums
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.whole_matrices import WholeMatrices


@dataclass(frozen=True)
class Outcome:
    """What one step did; device values, so that the host need not wait for them.

    grad_norm: before clipping. finite: 0 where the step was skipped, as the gradients were not finite.
    """

    grad_norm: torch.Tensor
    finite: torch.Tensor


class GradNorm(NamedTuple):
    """Of the whole model's gradients, before clipping; NaN where anything is not sound on a rank that holds a part of
    it. tied: of `tied_difference`."""

    norm: torch.Tensor
    tied: torch.Tensor | None


class Optimizer:
    """A rule over a `GradBuffer`: AdamW by the suite's one pass on the device, any rule by its own steps.

    masters: keep fp32 masters of 16-bit weights. offload: keep masters and moments on the host, and update there.
    decays_all: biases and norms decay, too.
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
        decays_all: bool = False,
    ):
        self.grads, self.rule, self.clip, self.ops = grads, rule, clip, ops
        self._pass = ops.adamw if not offload else None
        self._masters, self._offload, self._decays_all = masters, offload, decays_all
        self._ranks = Ranks(partial(whole_sums, grads), WholeMatrices().mapped)
        self.shards = [self._own(bucket) for bucket in grads.buckets]
        self._landing = self._landed() if offload else None
        self._updates = torch.zeros((), dtype=torch.float64, device=grads.buckets[0].own_grads.device)

    @property
    def updates(self) -> int:
        """Steps that were not skipped. Reading it waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def grad_norm(self, scale: torch.Tensor | None = None, sound: torch.Tensor | None = None) -> GradNorm:
        """Of the gradients that `grads.finish()` left; `scale` is what losses were multiplied by. sound: bool [],
        whether this rank has found nothing wrong; else there is no norm on any rank."""
        tied = tied_difference(self.grads)
        if tied is not None:
            sound = tied[0] == 0 if sound is None else sound & (tied[0] == 0)
        norm = square_sum(self.grads, sound=sound).sqrt()
        return GradNorm(norm if scale is None else norm / scale, tied)

    def step(
        self,
        lr: float,
        decay: float,
        scale: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
    ) -> Outcome:
        """One update. norm: as of `grad_norm`, where that was asked for before. allowed: bool [], where it is false the
        step is skipped; the same on all ranks."""
        # 1
        if norm is None:
            norm = self.grad_norm(scale).norm
        finite = torch.isfinite(norm) if allowed is None else allowed
        self._updates += finite
        # 2
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
        if scale is not None:
            factor = factor / scale
        # 3, 4
        if self._pass is not None and isinstance(self.rule, AdamW):
            self._update_on_device(self._pass, self.rule, finite, factor, lr, decay)
        elif bool(finite):
            self._update(factor if self.clip or scale is not None else None, lr, decay)
        else:
            return Outcome(norm, finite)  # weights stay as they are: a damaged copy is still there to be named
        self.grads.start_param_gather()
        return Outcome(norm, finite)

    def _update(self, factor: torch.Tensor | None, lr: float, decay: float) -> None:
        """The update by the rule's own steps."""
        args = StepArgs(self.updates, lr, decay)
        # Stages meet over the tensors they share, which come first in one and last in another.
        for owned in sorted(self.shards, key=lambda owned: owned.bucket.tied_name()):
            weights = owned.bucket.own_weights
            master = weights.to(_wide(weights)) if owned.master is None else owned.master
            grad = owned.bucket.own_grads
            if self._landing is not None:
                grad = self._landing[: grad.numel()].copy_(grad)
            grad = grad.to(master.dtype)
            if factor is not None:
                grad.mul_(factor.to(grad.device))
            self.rule.step(owned, master, grad, self._ranks, args)
            if master is not weights:
                weights.copy_(master)

    def _update_on_device(
        self,
        adamw: Callable[..., None],
        rule: AdamW,
        finite: torch.Tensor,
        factor: torch.Tensor,
        lr: float,
        decay: float,
    ) -> None:
        """The update in one pass a bucket; whether it counts is decided on the device, so the host does not wait."""
        t = self._updates
        scalars = torch.stack([finite.double(), factor.double(), 1 - rule.beta1**t, 1 - rule.beta2**t]).float()
        for owned in self.shards:
            weights = owned.bucket.own_weights
            adamw(
                weights if owned.master is None else owned.master,
                owned.bucket.own_grads,
                *(flat.values for flat in owned.moments.values()),
                None if owned.master is None else weights,
                scalars,
                decay_end=owned.decay_end,
                lr=lr,
                decay=decay,
                beta1=rule.beta1,
                beta2=rule.beta2,
                eps=rule.eps,
            )

    def masters_from_weights(self) -> None:
        """Start masters from the weights, where a checkpoint had none."""
        for owned in self.shards:
            if owned.master is not None:
                owned.master.copy_(owned.bucket.own_weights)

    def _own(self, bucket: Bucket) -> ShardState:
        """Masters and moments as they are before the first step."""
        weights = bucket.own_weights
        leaves = self._offload and weights.is_cuda
        allocator = Allocator(_wide(weights), torch.device("cpu") if leaves else weights.device, locked=leaves)
        apart = self._offload or (self._masters and allocator.dtype != weights.dtype)
        master = allocator.zeros(weights.numel()).copy_(weights) if apart else None
        owned = ShardState(bucket, master, decays_all=self._decays_all)
        self.rule.start(owned, allocator)
        return owned

    def _landed(self) -> torch.Tensor:
        """Host memory in which one span's gradients arrive."""
        grads = max((bucket.own_grads for bucket in self.grads.buckets), key=torch.Tensor.numel)
        return Allocator(grads.dtype, torch.device("cpu"), locked=grads.is_cuda).zeros(grads.numel())


def _wide(weights: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weights.dtype, torch.float32)
