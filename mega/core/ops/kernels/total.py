"""The sum of a few blocks, and of what is added to an fp32 tensor: a program takes the same stretch of each."""

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


@jit
def _accumulate(main_at, x_at, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    sum_ = tl.load(main_at + at, real, 0.0).to(tl.float32) + tl.load(x_at + at, real, 0.0).to(tl.float32)
    tl.store(main_at + at, sum_.to(main_at.dtype.element_ty), real)


def accumulate(main: torch.Tensor, x: torch.Tensor) -> None:
    """As the reference. torch reads and writes single elements where the dtypes differ."""
    if not main.is_contiguous():
        main.add_(x)
        return
    x, block = x.contiguous(), 4096
    launch(_accumulate, (cdiv(main.numel(), block),), main, x, main.numel(), BLOCK=block, num_warps=8)
