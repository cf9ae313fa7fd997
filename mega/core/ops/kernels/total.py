"""Sums of a few blocks, and accumulation into an fp32 tensor, in Triton. Each program sums one range of elements over
all blocks."""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, tl


@jit
def _total(blocks_at, out_at, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    sum_ = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(COUNT):
        sum_ += tl.load(blocks_at + number * size + offset, mask, 0.0).to(tl.float32)
    tl.store(out_at + offset, sum_.to(out_at.dtype.element_ty), mask)


def total(blocks: torch.Tensor) -> torch.Tensor:
    """Implement `ops.total.total`. Blocks are made contiguous."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks[0])
    block = 4096
    launch(_total, (cdiv(out.numel(), block),), blocks, out, out.numel(), COUNT=len(blocks), BLOCK=block, num_warps=8)
    return out


@jit
def _accumulate(main_at, x_at, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    sum_ = tl.load(main_at + offset, mask, 0.0).to(tl.float32) + tl.load(x_at + offset, mask, 0.0).to(tl.float32)
    tl.store(main_at + offset, sum_.to(main_at.dtype.element_ty), mask)


def accumulate(main: torch.Tensor, x: torch.Tensor) -> None:
    """Implement `ops.total.accumulate`. For tensors of different dtypes, torch's kernel accesses single elements,
    whereas this kernel is vectorised."""
    if not main.is_contiguous():
        main.add_(x)
        return
    x, block = x.contiguous(), 4096
    launch(_accumulate, (cdiv(main.numel(), block),), main, x, main.numel(), BLOCK=block, num_warps=8)
