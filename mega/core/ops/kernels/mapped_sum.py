"""The sum of a tensor over devices that map each other's memory, as one kernel.

Every device writes its part into a place of each other one, marks it there, waits for the marks in its own memory, and
adds up what has come, in the order of ranks: the same bits everywhere. A lane is one program's share of the tensor,
with a place and a mark of its own. Two places take turns: where a part comes for the second time after a place was
read, its sender has seen the mark in between, so nothing has to be waited for at the end. It knows no process groups.
"""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, in_turn, jit, launch, overlapping, tl

LANES = 128
"""Programs of one sum at the most; all of them must be on the device at once."""

SHORT = 1024
"""Elements of a block, and at least of a lane; of more than one a lane four times as many are taken at once."""


@jit
def _sum(
    x_at, into_at, memories_at, counts_at, size, share,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr, MARKS: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """memories_at: addresses of each rank's memory. counts_at: sums that each lane has had. share: elements of a lane.
    MARKS: bytes before the marks. ADD: the sum is added to `into`, else it replaces x."""
    in_turn(OVERLAP)
    lane, part = tl.program_id(0), tl.arange(0, BLOCK)
    number = tl.load(counts_at + lane) + 1
    place = (number % 2) * (RANKS * LANES) + lane
    first = lane * share
    count = tl.minimum(share, size - first)
    for start in range(0, count, BLOCK):
        there = start + part < count
        values = tl.load(x_at + first + start + part, there, 0.0)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                to_at = tl.load(memories_at + rank).to(tl.pointer_type(x_at.dtype.element_ty))
                to_at = tl.multiple_of(to_at, 16) + (place + RANK * LANES) * LANE
                tl.store(to_at + start + part, values, there)
    tl.debug_barrier()  # one thread marks, when all have written
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            mark_at = (tl.load(memories_at + rank) + MARKS).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(mark_at + RANK * LANES + lane, number, sem="release", scope="sys")
    tl.store(counts_at + lane, number)
    own = tl.load(memories_at + RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            mark_at = (own + MARKS).to(tl.pointer_type(tl.int64)) + rank * LANES + lane
            while tl.atomic_add(mark_at, 0, sem="acquire", scope="sys") < number:
                pass
    tl.debug_barrier()
    from_at = tl.multiple_of(own.to(tl.pointer_type(x_at.dtype.element_ty)), 16)
    for start in range(0, count, BLOCK):
        there = start + part < count
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                total += tl.load(x_at + first + start + part, there, 0.0).to(tl.float32)
            else:
                at = from_at + (place + rank * LANES) * LANE + start + part
                total += tl.load(at, there, 0.0, cache_modifier=".cg").to(tl.float32)
        if ADD:
            total += tl.load(into_at + first + start + part, there, 0.0).to(tl.float32)
            tl.store(into_at + first + start + part, total.to(into_at.dtype.element_ty), there)
        else:
            tl.store(x_at + first + start + part, total.to(x_at.dtype.element_ty), there)


def memory_bytes(ranks: int, limit: int) -> tuple[int, int]:
    """Bytes of a rank's memory for tensors of `limit` bytes: before its marks, and of all.

    >>> memory_bytes(2, 1 << 20)
    (4194304, 4196352)
    """
    marks = 2 * ranks * limit
    return marks, marks + 8 * ranks * LANES


def mapped_sum(
    x: torch.Tensor, into: torch.Tensor | None, memories: torch.Tensor, counts: torch.Tensor, rank: int, limit: int
) -> None:
    """x: contiguous, of a multiple of 16 bytes, at most `limit`. into: the sum is added to it, else it replaces x.
    memories: int64 [ranks], addresses. counts: int64 [LANES], of this device."""
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
