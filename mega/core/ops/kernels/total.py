"""The sum of a few blocks: a program takes the same stretch of each."""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, tl


@jit
def _total(blocks_at, out_at, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    sum_ = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(COUNT):
        sum_ += tl.load(blocks_at + number * size + at, real, 0.0).to(tl.float32)
    tl.store(out_at + at, sum_.to(out_at.dtype.element_ty), real)


def total(blocks: torch.Tensor) -> torch.Tensor:
    """As the reference, for blocks that are adjacent in memory."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks[0])
    block = 4096
    launch(_total, (cdiv(out.numel(), block),), blocks, out, out.numel(), COUNT=len(blocks), BLOCK=block, num_warps=8)
    return out
