"""Sums over a model's elements, each counted once, from what every rank has in its buckets: norms, and a rule's own.

Where tensor ranks, or stages that share a tensor, hold copies, the first one's count; over which ranks parts are added
up follows from how a bucket is shared out (gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mega.core.ops.square_sum import square_sums
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.mesh import Axis


def square_sum(grads: GradBuffer, *, weights: bool = False) -> torch.Tensor:
    """Sum of squares of the model's gradients, or weights, float64 []. All ranks call it together."""
    wide = torch.promote_types(grads.dtype, torch.float32)

    def squares(buckets: Sequence[Bucket]) -> torch.Tensor:
        return square_sums([bucket.own_weights if weights else bucket.own_grads for bucket in buckets], wide).sum()

    return _model_sum(grads, squares)


def count_zeros(grads: GradBuffer) -> torch.Tensor:
    """[zeros, elements] among the model's gradients, float64 [2], without padding. All ranks call it together."""

    def counts(buckets: Sequence[Bucket]) -> torch.Tensor:
        found = torch.zeros(2, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
        for bucket in buckets:
            for _, _, part in bucket.rectangles(bucket.own_grads, bucket.span[0]):
                found += torch.stack([(part == 0).sum(), found.new_tensor(part.numel())])
        return found

    return _model_sum(grads, counts, 2)


def _model_sum(grads: GradBuffer, local: Callable[[Sequence[Bucket]], torch.Tensor], *shape: int) -> torch.Tensor:
    """The sum of local(buckets), float64, over the ranks that hold the model's elements once each."""
    found = torch.zeros(shape, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
    axes: dict[tuple[int, ...], tuple[Axis, set[str]]] = {}
    for name, data in grads.mesh.data_axes.items():
        axis = grads.mesh.everyone if grads.zero else data.model
        axes.setdefault(axis.ranks, (axis, set()))[1].add(name)
    for axis, names in axes.values():
        counted = [bucket for bucket in grads.buckets if bucket.counted and bucket.data.name in names]
        part = local(counted) if counted else torch.zeros_like(found)
        all_reduce(part, axis)
        found += part
    return found


def whole_sums(grads: GradBuffer, bucket: Bucket, sums: torch.Tensor) -> torch.Tensor:
    """Sums over whole logical tensors, from what each rank of the stage has summed over its span of `bucket`.

    Where tensor ranks hold copies, the first one's count; all stages that hold a tied tensor get the first one's.
    """
    whole = sums.to(bucket.own_weights.device)
    if bucket.replicated and not grads.mesh.tp.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, grads.mesh.stage if grads.zero else bucket.data.parts)
    if not bucket.holders.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, bucket.holders)
    return whole.to(sums.device)
