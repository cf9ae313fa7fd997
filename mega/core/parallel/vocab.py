"""The vocabulary cut over the tensor axis: look-up, logits and cross entropy without ever gathering logits.

Rank r owns ids [r n, (r + 1) n), n the padded vocabulary over the axis. Padding at the end holds no token: its
logits are minus infinity, so it takes no probability and gets no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mega.core.inventory import Tensor
from mega.core.ops.norm import accurate
from mega.core.parallel.collectives import all_reduce, leave_region
from mega.core.parallel.linear import column_product
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import Maker, Weight


class _LookUp(torch.autograd.Function):
    """ids [tokens] -> rows [tokens, h]; zeros for ids of other ranks."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: Weight, first: int) -> torch.Tensor:
        local = ids - first
        ours = (local >= 0) & (local < weight.shape[0])
        local = local.masked_fill(~ours, 0)
        ctx.save_for_backward(local, ours)
        ctx.weight = weight
        return weight.detach()[local].masked_fill(~ours[:, None], 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        local, ours = ctx.saved_tensors
        return None, ctx.weight.add_rows(local, grad.masked_fill(~ours[:, None], 0)), None


class VocabEmbedding(nn.Module):
    """Token ids [tokens] -> [tokens, h], or our tokens under sequence."""

    def __init__(self, make: Maker, tensor: Tensor, axis: Axis, sequence: bool):
        super().__init__()
        self.weight = make(tensor)
        self.axis, self.sequence = axis, sequence

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = _LookUp.apply(ids, self.weight, self.axis.index * self.weight.shape[0])  # type: ignore[no-untyped-call]
        return leave_region(rows, self.axis, self.sequence)


def logits(x: torch.Tensor, weight: Weight, axis: Axis, sequence: bool) -> torch.Tensor:
    """x [tokens, h] (our tokens under sequence) -> [tokens, ids of this rank], padding at minus infinity."""
    out = column_product(x, weight, axis, sequence)
    real = weight.slots[0].shard.size[0]
    if real == weight.shape[0]:
        return out
    padding = torch.arange(weight.shape[0], device=out.device) >= real
    return out.masked_fill(padding, -math.inf)


class _CrossEntropy(torch.autograd.Function):
    """Numbered phases: 1 subtract the largest logit of all ranks; 2 pick the label's logit where it lives;
    3 sum the exponentials of all ranks. Backward: softmax minus one at the label."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, labels: torch.Tensor, axis: Axis) -> torch.Tensor:
        wide = x.to(accurate(x.dtype))
        # 1
        largest = wide.amax(-1)
        all_reduce(largest, axis, "max")
        shifted = wide - largest[:, None]
        # 2
        local = labels - axis.index * x.shape[1]
        ours = (local >= 0) & (local < x.shape[1])
        local = local.masked_fill(~ours, 0)
        target = shifted.gather(1, local[:, None]).squeeze(1).masked_fill(~ours, 0)
        all_reduce(target, axis)
        # 3
        softmax = shifted.exp_()
        total = softmax.sum(-1)
        all_reduce(total, axis)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, local, ours)
        ctx.dtype = x.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, local, ours = ctx.saved_tensors
        out = softmax.scatter_add(1, local[:, None], -ours.to(softmax.dtype)[:, None])
        return (out * grad[:, None]).to(ctx.dtype), None, None


def cross_entropy(x: torch.Tensor, labels: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Negative log-likelihood [tokens] in max(fp32, dtype): x [tokens, ids of this rank], labels int64 [tokens]."""
    return _CrossEntropy.apply(x, labels, axis)  # type: ignore[no-any-return, no-untyped-call]
