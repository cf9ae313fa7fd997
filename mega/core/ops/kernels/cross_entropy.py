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
BOTH, BOTH_STAGES, BOTH_WARPS = 4096, 3, 8
"""The same of both passes in one, by H200: 16,384 rows of 50,304 in bf16 take 1.31 ms, by 8,192 and 16 warps 1.54, by
4,096 and 4 warps, where more rows are in flight than the cache holds, 2.16; the two passes 1.55."""


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
def _nll_and_gradient(
    x_at, label_at, scale_at, nll_at, stride, real, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at += row * stride
    label = tl.load(label_at + row)
    scale = tl.load(scale_at + row)
    # Now: a sum over the row, for which all warps meet, lies between this and the first writing.
    target = tl.load(x_at + label, (label >= 0) & (label < real), 0.0).to(tl.float32)
    top = -3.4028234663852886e38
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, real, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, at < stride, 0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.where(at < real, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    log_total = tl.log(tl.sum(total, 0)) + top
    tl.store(nll_at + row, log_total - target)
    for begin in tl.range(0, stride, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_at + at, at < stride, 0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.where(at < real, x, -float("inf"))
        grad = tl.exp(x - log_total) - tl.where((at == label) & (at < real), 1.0, 0.0)
        tl.store(x_at + at, (grad * scale).to(x_at.dtype.element_ty), at < stride)


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
