"""Sums a tensor over devices that map each other's memory, in a single kernel.

Every device writes its tensor into a buffer on every other device, and then sets a mark on that device. Every device
then waits for the marks of the other devices, and sums the received tensors in the order of ranks, so that the result
is bitwise identical on all devices. A lane is one program's share of the tensor, with a separate section of the buffers
and separate marks.

    memory of a rank:   buffer 0 [ranks, lanes, lane] | buffer 1 [ranks, lanes, lane] | marks [ranks, lanes], int64

Consecutive sums use the two buffers alternately. A device sets the mark for a sum only after it has read the buffer of
the previous sum. Before a sender writes to a buffer again, it has waited for this mark, so no wait is needed at the end
of a sum. This module does not use process groups.
"""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, in_turn, jit, launch, overlapping, tl

LANES = 128
"""Maximum number of programs that compute one sum. All programs must be resident on the device at the same time."""

SHORT = 1024
"""Number of elements of a block, and minimum number of elements of a lane. If a lane has several blocks, each block has
four times as many elements."""


@jit
def _sum(
    x_at, into_at, memories_at, counts_at, size, share,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr, MARKS: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum one lane. memories_at: addresses of the ranks' memory. counts_at: number of earlier sums of each lane. share:
    number of elements of a lane. MARKS: number of bytes before the marks. ADD: whether to add the sum to `into`; if
    False, the sum replaces x."""
    in_turn(OVERLAP)
    lane, part = tl.program_id(0), tl.arange(0, BLOCK)
    number = tl.load(counts_at + lane) + 1
    place = (number % 2) * (RANKS * LANES) + lane
    first = lane * share
    count = tl.minimum(share, size - first)
    for start in range(0, count, BLOCK):
        mask = start + part < count
        values = tl.load(x_at + first + start + part, mask, 0.0)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                to_at = tl.load(memories_at + rank).to(tl.pointer_type(x_at.dtype.element_ty))
                to_at = tl.multiple_of(to_at, 16) + (place + RANK * LANES) * LANE
                tl.store(to_at + start + part, values, mask)
    tl.debug_barrier()  # all threads have written before one thread sets the mark
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            mark_at = (tl.load(memories_at + rank) + MARKS).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(mark_at + RANK * LANES + lane, number, sem="release", scope="sys")
    tl.store(counts_at + lane, number)
    own_memory = tl.load(memories_at + RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            mark_at = (own_memory + MARKS).to(tl.pointer_type(tl.int64)) + rank * LANES + lane
            while tl.atomic_add(mark_at, 0, sem="acquire", scope="sys") < number:
                pass
    tl.debug_barrier()
    from_at = tl.multiple_of(own_memory.to(tl.pointer_type(x_at.dtype.element_ty)), 16)
    for start in range(0, count, BLOCK):
        mask = start + part < count
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                total += tl.load(x_at + first + start + part, mask, 0.0).to(tl.float32)
            else:
                address = from_at + (place + rank * LANES) * LANE + start + part
                total += tl.load(address, mask, 0.0, cache_modifier=".cg").to(tl.float32)
        if ADD:
            total += tl.load(into_at + first + start + part, mask, 0.0).to(tl.float32)
            tl.store(into_at + first + start + part, total.to(into_at.dtype.element_ty), mask)
        else:
            tl.store(x_at + first + start + part, total.to(x_at.dtype.element_ty), mask)


def memory_bytes(ranks: int, limit: int) -> tuple[int, int]:
    """Return (bytes before the marks, total bytes) of a rank's memory, for tensors of at most `limit` bytes.

    >>> memory_bytes(2, 1 << 20)
    (4194304, 4196352)
    """
    marks = 2 * ranks * limit
    return marks, marks + 8 * ranks * LANES


def mapped_sum(
    x: torch.Tensor, into: torch.Tensor | None, memories: torch.Tensor, counts: torch.Tensor, rank: int, limit: int
) -> None:
    """Sum x over ranks, in place or into another tensor.

    x: contiguous tensor of at most `limit` bytes, a multiple of 16. into: tensor to which the sum is added; if None,
    the sum replaces x.
    memories: int64 [ranks], addresses of the ranks' memory. counts: int64 [LANES], number of earlier sums of each lane
    on this device.
    """
    size = x.numel()
    block, warps = (SHORT, 4) if size <= LANES * SHORT else (4 * SHORT, 8)
    lane = limit // LANES // x.element_size()
    share = cdiv(cdiv(size, min(cdiv(size, SHORT), LANES)), 16) * 16
    assert share <= lane, (size, limit)
    launch(
        _sum, (cdiv(size, share),), x, into, memories, counts, size, share, RANK=rank, RANKS=len(memories), LANES=LANES,
        LANE=lane, MARKS=memory_bytes(len(memories), limit)[0], BLOCK=block,
        ADD=into is not None, num_warps=warps, **overlapping(x.device),
    )  # fmt: skip
