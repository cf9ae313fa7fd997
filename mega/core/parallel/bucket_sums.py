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

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose bits are those of an element of so many bytes."""

_EXACT = (1 << 52) - 1


def square_sum(grads: GradBuffer, *, weights: bool = False, sound: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of squares of the model's gradients, or weights, float64 []. All ranks call it together.

    sound: bool []; where it is false on any rank, the sum is NaN on all of them.
    """
    wide = torch.promote_types(grads.dtype, torch.float32)

    def squares(buckets: Sequence[Bucket]) -> torch.Tensor:
        return square_sums([bucket.own_weights if weights else bucket.own_grads for bucket in buckets], wide).sum()

    return _model_sum(grads, squares, spoilt=None if sound is None else torch.where(sound, 0.0, torch.nan).double())


def tied_buckets(grads: GradBuffer) -> list[Bucket]:
    """Those of this rank that other stages hold too, in one order on all of them."""
    return sorted((each for each in grads.buckets if each.holders.size > 1), key=Bucket.tied_name)


def tied_difference(grads: GradBuffer) -> torch.Tensor | None:
    """Do the reduced gradients of a tensor that several stages hold have the same bits on all that hold them?

    int64 [2]: 0, or the number, from 1, of the first of `tied_buckets` that differs; and a hash of this rank's copy of
    it, which a float64 holds exactly. None on stages that share nothing.

    Norms count the first copy only, so a damaged one would pass them, and the update would break it. The sum of all
    bits as whole numbers is exact in any order, and one flipped bit changes it.
    """
    found = None
    for number, bucket in reversed(list(enumerate(tied_buckets(grads), 1))):
        bits = bucket.own_grads.detach().view(BITS[bucket.own_grads.element_size()]).sum(dtype=torch.int64)
        both = torch.stack([bits, -bits])
        all_reduce(both, bucket.holders, "max")
        differs = (both[0] != -both[1]).long()
        if not bucket.zero:  # every data rank has all of it, and all must come to the same end
            all_reduce(differs, bucket.data.axis, "max")
        here = torch.stack([torch.full_like(bits, number), bits & _EXACT])
        found = torch.where(differs == 0, torch.zeros_like(here) if found is None else found, here)
    return found


def count_zeros(grads: GradBuffer) -> torch.Tensor:
    """[zeros, elements] among the model's gradients, float64 [2], without padding. All ranks call it together."""

    def counts(buckets: Sequence[Bucket]) -> torch.Tensor:
        found = torch.zeros(2, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
        for bucket in buckets:
            for _, _, part in bucket.rectangles(bucket.own_grads, bucket.span[0]):
                found += torch.stack([(part == 0).sum(), found.new_tensor(part.numel())])
        return found

    return _model_sum(grads, counts, 2)


def _model_sum(
    grads: GradBuffer,
    local: Callable[[Sequence[Bucket]], torch.Tensor],
    *shape: int,
    spoilt: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of local(buckets), float64, over the ranks that hold the model's elements once each. spoilt: is added."""
    found = torch.zeros(shape, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
    axes: dict[tuple[int, ...], tuple[Axis, set[str]]] = {}
    for name, data in grads.mesh.data_axes.items():
        axis = grads.mesh.everyone if grads.zero else data.model
        axes.setdefault(axis.ranks, (axis, set()))[1].add(name)
    for axis, names in axes.values():
        counted = [bucket for bucket in grads.buckets if bucket.counted and bucket.data.name in names]
        part = local(counted) if counted else torch.zeros_like(found)
        if spoilt is not None:
            part, spoilt = part + spoilt, None
        all_reduce(part, axis)
        found += part
    return found


def whole_sums(grads: GradBuffer, bucket: Bucket, sums: torch.Tensor) -> torch.Tensor:
    """Sums over whole logical tensors, from what each rank of the stage has summed over its span of `bucket`.

    Where tensor ranks hold copies, the first one's count; all stages that hold a tied tensor get the first one's.
    """
    whole = sums.to(bucket.own_weights.device)
    if bucket.replicated and not bucket.data.tensor.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, grads.mesh.stage if grads.zero else bucket.data.parts)
    if not bucket.holders.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, bucket.holders)
    return whole.to(sums.device)
