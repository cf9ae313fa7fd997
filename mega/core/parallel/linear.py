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

from mega.core.inventory import Tensor
from mega.core.ops.sink import keep, kept
from mega.core.parallel.collectives import (
    Finished,
    Leaving,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
)
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import Maker, Weight


class Entering:
    """x [tokens or our tokens, in] on its way into a tensor-parallel region: under sequence all ranks' tokens are asked
    for, and what is computed before `arrived` runs beside the exchange."""

    def __init__(self, x: torch.Tensor, axis: Axis, sequence: bool):
        self.x = x
        self._whole: torch.Tensor = x
        self._work: Any = Finished()
        if sequence and axis.size > 1:
            self._whole, self._work = start_all_gather(x.detach(), axis)

    def arrived(self) -> torch.Tensor:
        """All tokens [tokens, in]. Call it once: what was gathered is kept no longer than its taker keeps it."""
        self._work.wait()
        whole = self._whole
        del self._whole, self._work  # NCCL's handle holds what it made
        return whole


class _ColumnProduct(torch.autograd.Function):
    """x, which is on its way -> [tokens, out of this rank]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        entering: Entering,
        weight: Weight,
        bias: torch.Tensor | None,
        axis: Axis,
        sequence: bool,
    ) -> torch.Tensor:
        keep(ctx, x)
        ctx.weight, ctx.axis, ctx.sequence = weight, axis, sequence
        return weight.ops.products.output(entering.arrived(), weight.to(x.dtype), bias)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None, None, None]:
        x = kept(ctx)
        weight, axis, sequence = ctx.weight, ctx.axis, ctx.sequence
        # 1 ask for the whole input again while the input's gradient is computed
        whole, gathered = start_all_gather(x, axis) if sequence else (x, None)
        grad = weight.ops.products.prepare(grad)
        grad_x = weight.ops.products.input_gradient(grad, weight.to(x.dtype))
        # 2 sum the input's gradient over ranks while the weight's gradient is computed
        if sequence:
            grad_x, summed = start_reduce_scatter(grad_x, axis)
        else:
            summed = all_reduce(grad_x, axis, wait=False)
        if gathered is not None:
            gathered.wait()
        grad_weight = weight.add_product(grad, whole)
        summed.wait()
        return grad_x, None, grad_weight, None, None, None


class _Product(torch.autograd.Function):
    """x [tokens, in of this rank] -> [tokens, out], this rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        keep(ctx, x)
        ctx.weight = weight
        return weight.ops.products.output(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = kept(ctx)  # first: where it brings a whole block back, there is nothing else yet
        products = ctx.weight.ops.products
        grad = products.prepare(grad)
        grad_x = products.input_gradient(grad, ctx.weight)
        return grad_x, ctx.weight.add_product(grad, x)


def column_product(
    x: torch.Tensor | Entering, weight: Weight, axis: Axis, sequence: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Enter the region and multiply: x [tokens, in] (our tokens under sequence) -> [tokens, rows of weight].

    bias: added in the product's own pass; it gets no gradient from here.
    """
    entering = x if isinstance(x, Entering) else Entering(x, axis, sequence)
    return _ColumnProduct.apply(entering.x, entering, weight, bias, axis, sequence and axis.size > 1)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """Outputs cut over the axis; several logical tensors may be stacked (query, key, value).

    The op behind makes the bias's gradient, in passing over its own. `biased` adds the bias while it multiplies;
    `product` leaves that to the op behind too.
    """

    def __init__(self, make: Maker, weight: list[Tensor], bias: list[Tensor], axis: Axis, sequence: bool):
        super().__init__()
        self.weight = make(*weight)
        self.bias = make(*bias) if bias else None
        self.axis, self.sequence = axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def entering(self, x: torch.Tensor) -> Entering:
        return Entering(x, self.axis, self.sequence)

    def biased(self, x: torch.Tensor | Entering) -> torch.Tensor:
        return column_product(
            x, self.weight, self.axis, self.sequence, None if self.bias is None else self.bias.detach()
        )

    def product(self, x: torch.Tensor | Entering) -> torch.Tensor:
        return column_product(x, self.weight, self.axis, self.sequence)


class RowLinear(nn.Module):
    """Inputs cut over the axis; the bias is to be added once, after the sum: `leaving` leaves it to the op behind."""

    def __init__(self, make: Maker, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool):
        super().__init__()
        self.weight = make(weight)
        self.bias = make(bias) if bias is not None else None
        self.axis, self.sequence = axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.biased(self.leaving(x).arrived())

    def biased(self, product: torch.Tensor) -> torch.Tensor:
        return product if self.bias is None else product + self.bias

    def leaving(self, x: torch.Tensor) -> Leaving:
        """The product, on its way to be summed over ranks."""
        return Leaving(_Product.apply(x, self.weight), self.axis, self.sequence)  # type: ignore[no-untyped-call]
