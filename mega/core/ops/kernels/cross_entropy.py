"""Cross entropy over a row of logits by one program each: one reading forward, one reading and writing backward; or
one reading and writing for both, where the second reading finds the row in the cache.

Masks of loads are of `stride`, which 16 divides as a rule, where `real` is any number: by 16 bytes at a time.
"""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, tl

BLOCK, WARPS = 4096, 4
PART, STAGES = 2048, 3
"""Of the forward pass: elements that are computed at once, and how many times as many are in flight, by H200."""
BOTH, BOTH_STAGES, BOTH_WARPS = 4096, 1, 16
"""The same of both passes in one, by H200: 16,384 rows of 50,304 in bf16 take 1.03 ms, with 8 warps and 3 stages 1.19;
before the sum was by the first block's largest, 1.28. More rows in flight than the cache holds would be read twice."""


@jit
def _softmax_parts(
    x_at, label_at, largest_at, total_at, target_at, stride, real, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_at + row)
    top = -3.4028234663852886e38
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, real, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_at + row * stride + at, at < stride, 0.0).to(tl.float32)
        x = tl.where(at < real, x, -float("inf"))
        # One exponential an element: the row has one running maximum, not one for each lane.
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    tl.store(largest_at + row, top)
    tl.store(total_at + row, tl.sum(total, 0))
    ours = (label >= 0) & (label < real)
    target = tl.load(x_at + row * stride + label, ours, 0.0).to(tl.float32)
    tl.store(target_at + row, target)


@jit
def _softmax_gradient(x_at, label_at, log_total_at, scale_at, stride, real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_at + row)
    log_total = tl.load(log_total_at + row)
    scale = tl.load(scale_at + row)
    x = tl.load(x_at + row * stride + at, at < stride, 0.0).to(tl.float32)
    x = tl.where(at < real, x, -float("inf"))
    grad = tl.exp(x - log_total) - tl.where((at == label) & (at < real), 1.0, 0.0)
    tl.store(x_at + row * stride + at, (grad * scale).to(x_at.dtype.element_ty), at < stride)


@jit
def _total(x_at, base, stride, real, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The sum of 2^(x log2(e) - base) over a row."""
    total = tl.zeros([BLOCK], tl.float32)
    whole = real // BLOCK * BLOCK
    for begin in tl.range(0, whole, BLOCK, num_stages=STAGES):
        x = tl.load(x_at + begin + tl.arange(0, BLOCK), eviction_policy="evict_last").to(tl.float32)
        total += tl.exp2(x * 1.4426950408889634 - base)
    at = whole + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, at < stride, 0.0, eviction_policy="evict_last").to(tl.float32)
    return tl.sum(total + tl.where(at < real, tl.exp2(x * 1.4426950408889634 - base), 0.0), 0)


@jit
def _nll_and_gradient(
    x_at, label_at, scale_at, nll_at, stride, real, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at += row * stride
    label = tl.load(label_at + row)
    scale = tl.load(scale_at + row)
    ours = (label >= 0) & (label < real)
    target = tl.load(x_at + label, ours, 0.0).to(tl.float32)
    # 1. The sum, by the largest of the first block: all warps would have to meet for the largest so far.
    at = tl.arange(0, BLOCK)
    first = tl.load(x_at + at, at < stride, 0.0).to(tl.float32)
    first = tl.where(at < real, first, -3.4028234663852886e38)
    base = tl.max(first, 0) * 1.4426950408889634
    total = _total(x_at, base, stride, real, BLOCK, STAGES)
    if not (total < float("inf")):
        # Something later is larger by more than a power of 2 holds: once more, by the largest of all.
        largest = first
        for begin in tl.range(0, real, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(x_at + at, at < stride, 0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.where(at < real, x, -3.4028234663852886e38))
        base = tl.max(largest, 0) * 1.4426950408889634
        total = _total(x_at, base, stride, real, BLOCK, STAGES)
    log_total = tl.log2(total)
    tl.store(nll_at + row, (log_total + (base - target * 1.4426950408889634)) * 0.6931471805599453)
    log_total += base
    # 2. The gradient, as if no token were the label; all have been read by all warps.
    whole = real // BLOCK * BLOCK
    for begin in tl.range(0, whole, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, eviction_policy="evict_first").to(tl.float32)
        grad = tl.exp2(x * 1.4426950408889634 - log_total) * scale
        tl.store(x_at + at, grad.to(x_at.dtype.element_ty))
    for begin in tl.range(whole, stride, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, at < stride, 0.0, eviction_policy="evict_first").to(tl.float32)
        grad = tl.where(at < real, tl.exp2(x * 1.4426950408889634 - log_total), 0.0) * scale
        tl.store(x_at + at, grad.to(x_at.dtype.element_ty), at < stride)
    # 3. The label's own, once the other has been written.
    tl.debug_barrier()
    grad = (tl.exp2(target * 1.4426950408889634 - log_total) - 1.0) * scale
    tl.store(x_at + label, grad.to(x_at.dtype.element_ty), ours)


def softmax_parts(x: torch.Tensor, labels: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.cross_entropy.softmax_parts`."""
    assert x.is_contiguous()
    largest, total, target = torch.empty(3, x.shape[0], dtype=torch.float32, device=x.device)
    launch(
        _softmax_parts, (x.shape[0],), x, labels, largest, total, target, x.shape[1], real,
        BLOCK=PART, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return largest, total, target


def softmax_gradient(
    x: torch.Tensor, labels: torch.Tensor, log_total: torch.Tensor, scale: torch.Tensor, real: int
) -> torch.Tensor:
    """`ops.cross_entropy.softmax_gradient`, written over `x`."""
    grid = (x.shape[0], cdiv(x.shape[1], BLOCK))
    launch(
        _softmax_gradient,
        grid,
        x,
        labels,
        log_total,
        scale.contiguous(),
        x.shape[1],
        real,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return x


def nll_and_gradient(
    x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.cross_entropy.nll_and_gradient`."""
    assert x.is_contiguous()
    nll = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch(
        _nll_and_gradient, (x.shape[0],), x, labels, scale.contiguous(), nll, x.shape[1], real,
        BLOCK=BOTH, STAGES=BOTH_STAGES, num_warps=BOTH_WARPS,
    )  # fmt: skip
    return nll, x
