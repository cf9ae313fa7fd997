"""Sums over all elements of a model, such as norms and sums for an optimizer, computed from the buckets of all ranks.

Each element counts once. If several tensor ranks or pipeline stages hold copies of a tensor, only the first copy
counts. The sharding of a bucket (gradients.py) determines the ranks over which a sum is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mega.core.ops.square_sum import square_sums
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.mesh import Axis

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer dtype of the same width."""

_EXACT = (1 << 52) - 1


def square_sum(grads: GradBuffer, *, weights: bool = False, sound: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of squares of the model's gradients or weights, float64 []. All ranks must call this together.

    sound: bool []; the sum is NaN on all ranks if `sound` is false on any rank.
    """
    sum_dtype = torch.promote_types(grads.dtype, torch.float32)

    def squares(buckets: Sequence[Bucket]) -> torch.Tensor:
        return square_sums([bucket.own_weights if weights else bucket.own_grads for bucket in buckets], sum_dtype).sum()

    return _model_sum(grads, squares, spoilt=None if sound is None else torch.where(sound, 0.0, torch.nan).double())


def tied_buckets(grads: GradBuffer) -> list[Bucket]:
    """Return the buckets of this rank that other stages also hold, in the same order on all these stages."""
    return sorted((each for each in grads.buckets if each.holders.size > 1), key=Bucket.tied_name)


def tied_difference(grads: GradBuffer) -> torch.Tensor | None:
    """Compare the reduced gradients of tied tensors bit by bit over the stages that hold the tensors.

    Returns int64 [2]: the position, counted from 1, of the first of `tied_buckets` that differs (0 if all are equal),
    and a hash of this rank's copy of that bucket. A float64 represents the hash exactly. Returns None on stages without
    tied tensors.

    A norm includes only the first copy of a tied tensor, so the norm does not reveal a corrupted gradient of another
    copy. The update would then make the copies differ. The checksum is the integer sum of all elements' bit patterns.
    Integer sums are exact in any order, and one flipped bit changes the checksum.
    """
    difference = None
    for number, bucket in reversed(list(enumerate(tied_buckets(grads), 1))):
        bits = bucket.own_grads.detach().view(BITS[bucket.own_grads.element_size()]).sum(dtype=torch.int64)
        extremes = torch.stack([bits, -bits])
        all_reduce(extremes, bucket.holders, "max")
        differs = (extremes[0] != -extremes[1]).long()
        if not bucket.zero:  # every data rank holds all gradients, and all ranks must reach the same decision
            all_reduce(differs, bucket.data.axis, "max")
        candidate = torch.stack([torch.full_like(bits, number), bits & _EXACT])
        difference = torch.where(
            differs == 0, torch.zeros_like(candidate) if difference is None else difference, candidate
        )
    return difference


def count_zeros(grads: GradBuffer) -> torch.Tensor:
    """Return the number of zeros and the number of all elements in the model's gradients, float64 [2], without padding.

    All ranks must call this together.
    """

    def counts(buckets: Sequence[Bucket]) -> torch.Tensor:
        totals = torch.zeros(2, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
        for bucket in buckets:
            for _, _, part in bucket.rectangles(bucket.own_grads, bucket.span[0]):
                totals += torch.stack([(part == 0).sum(), totals.new_tensor(part.numel())])
        return totals

    return _model_sum(grads, counts, 2)


def _model_sum(
    grads: GradBuffer,
    local: Callable[[Sequence[Bucket]], torch.Tensor],
    *shape: int,
    spoilt: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of local(buckets), float64, over the ranks that together hold every element of the model once.

    spoilt: value that every rank adds to the sum once; NaN marks the sum as unusable.
    """
    total = torch.zeros(shape, dtype=torch.float64, device=grads.buckets[0].own_grads.device)
    # Dense and expert weights may have different data axes. Buckets that reduce over the same ranks share a collective.
    axes: dict[tuple[int, ...], tuple[Axis, set[str]]] = {}
    for name, data in grads.mesh.data_axes.items():
        axis = grads.mesh.everyone if grads.zero else data.model
        axes.setdefault(axis.ranks, (axis, set()))[1].add(name)
    for axis, names in axes.values():
        buckets = [bucket for bucket in grads.buckets if bucket.counted and bucket.data.name in names]
        part = local(buckets) if buckets else torch.zeros_like(total)
        if spoilt is not None:
            part, spoilt = part + spoilt, None
        all_reduce(part, axis)
        total += part
    return total


def whole_sums(grads: GradBuffer, bucket: Bucket, sums: torch.Tensor) -> torch.Tensor:
    """Return sums over whole logical tensors. sums: this rank's sums over its span of `bucket`.

    If tensor ranks hold copies, only the first copy counts. All stages that hold a tied tensor get the sums of the
    first such stage.
    """
    whole = sums.to(bucket.own_weights.device)
    if bucket.replicated and not bucket.data.tensor.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, grads.mesh.stage if grads.zero else bucket.data.parts)
    if not bucket.holders.first:
        whole = torch.zeros_like(whole)
    all_reduce(whole, bucket.holders)
    return whole.to(sums.device)
