"""Computes new weights from reduced gradients, bucket by bucket, on the spans owned by this rank.

    1 norm over the whole model      squared gradients, summed over ranks, with each tensor counted once
    2 clip                           scale down to the limit
    3 update                         apply the rule to masters and moments of this rank's spans
    4 write back                     copy masters to weights; all ranks gather all spans (ZeRO)

Weights in fp32 or fp64 also serve as masters. Without masters, an update reads and writes the 16-bit weights. With
offloading, masters and moments are in page-locked host memory, and the host computes the updates. This module does not
depend on the model, the schedule or files.
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
    """The result of one step, as device tensors, so that the host need not wait for the device.

    grad_norm: the gradient norm before clipping. finite: 0 if the step was skipped because gradients were not finite.
    """

    grad_norm: torch.Tensor
    finite: torch.Tensor


class GradNorm(NamedTuple):
    """The result of `Optimizer.grad_norm`. norm: gradient norm of the whole model before clipping; NaN if a rank has
    found a fault. tied: the result of `tied_difference`."""

    norm: torch.Tensor
    tied: torch.Tensor | None


class Optimizer:
    """Applies an update rule to the buckets of a `GradBuffer`. AdamW uses a fused kernel of `ops`; other rules use
    their method `step`.

    masters: whether to keep fp32 masters of 16-bit weights. offload: whether to keep masters and moments on the host,
    and to run updates on the host. decays_all: whether biases and norms also decay.
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
        self._fused_adamw = ops.adamw if not offload else None
        self._masters, self._offload, self._decays_all = masters, offload, decays_all
        self._ranks = Ranks(partial(whole_sums, grads), WholeMatrices().mapped)
        self.shards = [self._own(bucket) for bucket in grads.buckets]
        self._host_grads = self._host_buffer() if offload else None
        self._updates = torch.zeros((), dtype=torch.float64, device=grads.buckets[0].own_grads.device)

    @property
    def updates(self) -> int:
        """Number of steps that were not skipped. Reading this property waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def grad_norm(self, scale: torch.Tensor | None = None, sound: torch.Tensor | None = None) -> GradNorm:
        """Return the norm of the gradients. Call `grads.finish()` first. scale: the loss scale. sound: bool [], false
        if this rank has found a fault, in which case the norm is NaN on all ranks."""
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
        """Update the weights once. norm: the norm from `grad_norm`; None to compute the norm in this method. allowed:
        bool [], identical on all ranks; false skips the step."""
        # 1 norm
        if norm is None:
            norm = self.grad_norm(scale).norm
        finite = torch.isfinite(norm) if allowed is None else allowed
        self._updates += finite
        # 2 clip
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
        if scale is not None:
            factor = factor / scale
        # 3 update, 4 write back
        if self._fused_adamw is not None and isinstance(self.rule, AdamW):
            self._update_on_device(self._fused_adamw, self.rule, finite, factor, lr, decay)
        elif bool(finite):
            self._update(factor if self.clip or scale is not None else None, lr, decay)
        else:
            return Outcome(norm, finite)  # no gather, because a gather would hide a corrupted replica from an audit
        self.grads.start_param_gather()
        return Outcome(norm, finite)

    def _update(self, factor: torch.Tensor | None, lr: float, decay: float) -> None:
        """Update the weights with the rule's method `step`."""
        args = StepArgs(self.updates, lr, decay)
        # Rules call collectives. Stages that share a tied tensor hold its bucket at different positions, so buckets are
        # ordered by the tensor's name to avoid a deadlock.
        for owned in sorted(self.shards, key=lambda owned: owned.bucket.tied_name()):
            weights = owned.bucket.own_weights
            # Without a stored master, the master is a temporary copy of 16-bit weights, or the fp32 weights themselves.
            master = weights.to(_master_dtype(weights)) if owned.master is None else owned.master
            grad = owned.bucket.own_grads
            if self._host_grads is not None:
                grad = self._host_grads[: grad.numel()].copy_(grad)
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
        """Update the weights with one kernel per bucket. The kernel reads from device memory whether to skip the step,
        so the host does not wait."""
        # Computed in float64, because 1 - beta^t loses digits in float32, and on the device, because `t` counts only
        # the steps that the device has not skipped.
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
        """Copy the weights to the masters, for a checkpoint without masters."""
        for owned in self.shards:
            if owned.master is not None:
                owned.master.copy_(owned.bucket.own_weights)

    def _own(self, bucket: Bucket) -> ShardState:
        """Return the masters and moments of a bucket before the first step."""
        weights = bucket.own_weights
        on_host = self._offload and weights.is_cuda
        allocator = Allocator(
            _master_dtype(weights), torch.device("cpu") if on_host else weights.device, locked=on_host
        )
        needs_master = self._offload or (self._masters and allocator.dtype != weights.dtype)
        master = allocator.zeros(weights.numel()).copy_(weights) if needs_master else None
        owned = ShardState(bucket, master, decays_all=self._decays_all)
        self.rule.start(owned, allocator)
        return owned

    def _host_buffer(self) -> torch.Tensor:
        """Allocate host memory for the gradients of the largest span."""
        grads = max((bucket.own_grads for bucket in self.grads.buckets), key=torch.Tensor.numel)
        return Allocator(grads.dtype, torch.device("cpu"), locked=grads.is_cuda).zeros(grads.numel())


def _master_dtype(weights: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weights.dtype, torch.float32)
