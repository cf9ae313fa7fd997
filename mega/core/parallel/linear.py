"""Linear layers cut over the tensor axis. They own their collectives and the way of their weight's gradient.

    ColumnLinear  every rank computes its own outputs      y_r = x W_r^T            x enters the region
    RowLinear     every rank sums over its own inputs      y = sum_r x_r W_r^T + b  y leaves the region

Under sequence parallelism tokens are shared out between regions: entering gathers them, leaving scatters the sum.
The gathered input is not kept; backward gathers it again while it multiplies (Korthikanti et al. 2022, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.inventory import Tensor
from mega.core.parallel.collectives import all_gather, all_reduce, leave_region, start_all_gather, start_reduce_scatter
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import Maker, Weight


class _ColumnProduct(torch.autograd.Function):
    """x [tokens or our tokens, in] -> [tokens, out of this rank]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight, axis: Axis, sequence: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.sequence = weight, axis, sequence
        return F.linear(all_gather(x, axis) if sequence else x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, axis, sequence = ctx.weight, ctx.axis, ctx.sequence
        # 1 ask for the whole input again while the input's gradient is computed
        whole, gathered = start_all_gather(x, axis) if sequence else (x, None)
        grad_x = grad @ weight
        # 2 sum the input's gradient over ranks while the weight's gradient is computed
        if sequence:
            grad_x, summed = start_reduce_scatter(grad_x, axis)
        else:
            summed = all_reduce(grad_x, axis, wait=False)
        if gathered is not None:
            gathered.wait()
        grad_weight = weight.add_product(grad, whole)
        summed.wait()
        return grad_x, grad_weight, None, None


class _Product(torch.autograd.Function):
    """x [tokens, in of this rank] -> [tokens, out], this rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, ctx.weight.add_product(grad, x)


def column_product(x: torch.Tensor, weight: Weight, axis: Axis, sequence: bool) -> torch.Tensor:
    """Enter the region and multiply: x [tokens, in] (our tokens under sequence) -> [tokens, rows of weight]."""
    return _ColumnProduct.apply(x, weight, axis, sequence and axis.size > 1)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """Outputs cut over the axis; several logical tensors may be stacked (query, key, value)."""

    def __init__(self, make: Maker, weight: list[Tensor], bias: list[Tensor], axis: Axis, sequence: bool):
        super().__init__()
        self.weight = make(*weight)
        self.bias = make(*bias) if bias else None
        self.axis, self.sequence = axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = column_product(x, self.weight, self.axis, self.sequence)
        return y if self.bias is None else y + self.bias


class RowLinear(nn.Module):
    """Inputs cut over the axis; the bias is added once, after the sum."""

    def __init__(self, make: Maker, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool):
        super().__init__()
        self.weight = make(weight)
        self.bias = make(bias) if bias is not None else None
        self.axis, self.sequence = axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave_region(_Product.apply(x, self.weight), self.axis, self.sequence)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias
