"""Check that replicas are equal: ranks that hold the same tensor compare a hash of its bits, and report the ranks whose
hash differs.

If replicas differ by one bit, the run continues and its loss looks normal; in one large run this lasted for thousands
of steps. The hash is the sum of bits x (2 position + 1) in wrapping int64: changing one element always changes the
hash, because odd numbers have inverses modulo 2^64. An audit costs one pass over the weights and two small collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mega.core.parallel.bucket_sums import BITS
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.parallel.mesh import SINGLE, Axis
from mega.core.training.state import TrainState

BLOCK = 1 << 22
"""Number of elements that are hashed at a time, which bounds the memory use."""


@dataclass(frozen=True)
class Copy:
    """A tensor with replicas on other ranks: its name, this rank's replica, and the ranks that hold a replica."""

    name: str
    tensor: torch.Tensor
    axis: Axis


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 hash of a tensor's bits.

    >>> a = torch.tensor([1.0, 2.0]); b = torch.nextafter(a, torch.tensor(9.0))
    >>> bool(bit_hash(a) == bit_hash(a.clone())), bool(bit_hash(a) == bit_hash(b))
    (True, False)
    """
    bits = tensor.detach().reshape(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), BLOCK):
        part = bits[begin : begin + BLOCK].to(torch.int64)
        offsets = torch.arange(begin, begin + part.numel(), device=tensor.device)
        total += (part * (2 * offsets + 1)).sum()
    return total


def copies(state: TrainState) -> Iterator[Copy]:
    """Yield every weight and optimizer tensor of this rank that has replicas on other ranks."""
    mesh, zero = state.mesh, state.grads.zero
    # Sorted, because stages that share several tensors must compare them in the same order.
    for owned in sorted(state.optimizer.shards, key=lambda one: one.bucket.tied_name()):
        bucket = owned.bucket
        # Unsharded tensors are replicated across tensor ranks; tied tensors are replicated across stages.
        copies = bucket.data.with_tp if bucket.replicated else bucket.data.axis
        flats = {kind: (flat.begin, flat.values) for kind, flat in owned.moments.items()}
        if owned.has_master:
            assert owned.master is not None
            flats["master"] = (bucket.span[0], owned.master)
        for name, factor in owned.factors.items():
            yield from _copy(name, factor, mesh.stage)
            yield from _copy(name, factor, bucket.holders)
        for weight, begin, end in bucket.offsets:
            name = ", ".join(segment.shard.name for segment in weight.segments)  # a fused weight has one hash
            if zero < 3:
                whole = bucket.weights[begin:end]
                yield from _copy(f"weights/{name}", whole, copies)
                yield from _copy(f"weights/{name}", whole, bucket.holders)
            axis = copies if not zero else bucket.data.tensor if bucket.replicated else SINGLE
            for kind, (base, values) in flats.items():
                first, last = max(begin, base), min(end, base + values.numel())
                if first < last:
                    yield from _copy(f"{kind}/{name}", values[first - base : last - base], axis)


def _copy(name: str, tensor: torch.Tensor, axis: Axis) -> Iterator[Copy]:
    if axis.size > 1:
        yield Copy(name, tensor, axis)


def audit(state: TrainState) -> None:
    """Compare all replicas. This is a collective that all ranks must call.

    Errors: FloatingPointError on all ranks, naming tensors and ranks.
    """
    by_axis: dict[tuple[int, ...], list[Copy]] = {}
    for copy in copies(state):
        by_axis.setdefault(copy.axis.ranks, []).append(copy)
    lines: list[str] = []
    for axis_copies in by_axis.values():
        axis = axis_copies[0].axis
        hashes = torch.stack([bit_hash(copy.tensor).to(state.device.torch) for copy in axis_copies])
        table = all_gather(hashes[None, :], axis)  # [ranks, tensors]
        for number in (table != table[:1]).any(0).nonzero().flatten().tolist():
            lines.append(f"{axis_copies[number].name}: {odd_ranks(table[:, number].tolist(), axis.ranks)}")
    count = torch.tensor(float(len(lines)), device=state.device.torch)
    all_reduce(count, state.mesh.everyone, "max")
    if float(count):
        differences = sorted({line for each in state.exchange(lines) for line in each})
        text = "; ".join(differences[:8]) + (f"; and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise FloatingPointError(
            f"step {state.progress.step}: copies have drifted apart: {text}. Resume from a checkpoint that is older "
            "than the drift, without the device that drifted"
        )


def odd_ranks(values: list[int], ranks: tuple[int, ...]) -> str:
    """Return a message that names the ranks whose values differ from the majority.

    >>> odd_ranks([7, 7, 9, 7], (0, 2, 4, 6))
    'rank 4 differs from 3 others'
    >>> odd_ranks([7, 9], (0, 2))
    'ranks 0 and 2 differ (two copies cannot tell which is right)'
    """
    majority, count = Counter(values).most_common(1)[0]
    minority = [rank for rank, value in zip(ranks, values, strict=True) if value != majority]
    if 2 * count <= len(values):
        return f"ranks {' and '.join(map(str, ranks))} differ (two copies cannot tell which is right)"
    names, plural = ", ".join(map(str, minority)), len(minority) > 1
    return f"rank{'s' if plural else ''} {names} differ{'' if plural else 's'} from {count} others"
