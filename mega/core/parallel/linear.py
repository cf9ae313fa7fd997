"""Linear layers cut over the tensor axis. They own their collectives and the way of their weight's gradient.

    ColumnLinear  every rank computes its own outputs      y_r = x W_r^T            x enters the region
    RowLinear     every rank sums over its own inputs      y = sum_r x_r W_r^T + b  y leaves the region

Under sequence parallelism tokens are shared out between regions: entering gathers them, leaving scatters the sum.
The gathered input is not kept; backward gathers it again while it multiplies (Korthikanti et al. 2022, section 4.2).
Where the region has a transport, these exchanges overlap the GEMMs they feed, a rank's tokens at a time.
A weight that is not trained costs no gradient of its own; an adapter's GEMMs run between the layer's (adapter.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mega.core.inventory import Tensor
from mega.core.ops.autograd import keep, kept
from mega.core.ops.dropout import Dropout
from mega.core.parallel.adapter import Adapter, Grads, adapter_of, of_columns
from mega.core.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from mega.core.parallel.peers import Gather, Scatter
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, Weight


class _ColumnMatmul(torch.autograd.Function):
    """x [tokens, in] -> [tokens, out of this rank]; under sequence x are our tokens.

    held: the adapter's weights, which autograd must see.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        region: Region,
        adapter: Adapter | None = None,
        drop: Dropout | None = None,
        *held: Weight,
    ) -> torch.Tensor:
        ctx.weight, ctx.region, axis, sequence = weight, region, region.axis, region.sequence
        ctx.adapter, ctx.drop, ctx.dtype = adapter, drop, x.dtype
        if weight.requires_grad or adapter is not None:
            keep(ctx, x)
        matmuls, factor = weight.ops.matmuls, weight.to(x.dtype)
        if sequence and region.transport is not None:
            y = x.new_empty((x.shape[0] * axis.size, weight.shape[0]))
            for rows, part in Gather(x, region.transport).parts():
                matmuls.forward(part, factor, bias, out=y[rows])
            return y
        whole = all_gather(x, axis) if sequence else x
        y = matmuls.forward(whole, factor, bias)
        if adapter is not None:
            ctx.h = adapter.add(whole, y, drop)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, axis, sequence, adapter, drop = ctx.weight, ctx.region.axis, ctx.region.sequence, ctx.adapter, ctx.drop
        matmuls, factor, trained = weight.ops.matmuls, weight.to(ctx.dtype), weight.requires_grad
        x: Any = kept(ctx) if trained or adapter is not None else None
        if trained and sequence and ctx.region.transport is not None:
            gathered, summed = Gather(x, ctx.region.transport), Scatter(*x.shape, x, ctx.region.transport)  # type: ignore[call-arg]
            for rows, out in summed.parts():
                matmuls.dgrad(grad[rows], factor, out=out)
            grad_weight = weight.add_wgrad(grad, gathered.whole(keep=weight.on_wgrad is not None))
            return weight.ops.total(summed.blocks()), grad_weight, None, None, None, None
        # 1 ask for the whole input again, where a weight's gradient needs it, while the input's gradient is computed
        whole, gathering = start_all_gather(x, axis) if sequence and x is not None else (x, None)
        prepared = matmuls.prepare(grad)
        grad_x = matmuls.dgrad(prepared, factor)
        grad_h = None if adapter is None else adapter.dgrad(grad, grad_x, drop)
        # 2 sum the input's gradient over ranks while the gradients of weights are computed
        if sequence:
            grad_x, summing = start_reduce_scatter(grad_x, axis)
        else:
            summing = all_reduce(grad_x, axis, wait=False)
        if gathering is not None:
            gathering.wait()
        grad_weight = weight.add_wgrad(prepared, whole)
        grads: Grads = () if adapter is None else adapter.wgrad(whole, ctx.h, grad, grad_h, drop)
        summing.wait()
        return grad_x, grad_weight, None, None, None, None, *grads


class _RowMatmul(torch.autograd.Function):
    """x [tokens, in of this rank] -> [tokens, out], summed over ranks; under sequence our tokens of it.

    held: the adapter's weights, which autograd must see.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Weight,
        region: Region,
        adapter: Adapter | None = None,
        drop: Dropout | None = None,
        *held: Weight,
    ) -> torch.Tensor:
        ctx.weight, ctx.region, axis, sequence = weight, region, region.axis, region.sequence
        ctx.adapter, ctx.drop = adapter, drop
        if weight.requires_grad or adapter is not None:
            keep(ctx, x)
        matmuls = weight.ops.matmuls
        if sequence and region.transport is not None:
            summed = Scatter(x.shape[0] // axis.size, weight.shape[0], x, region.transport)
            for rows, out in summed.parts():
                matmuls.forward(x[rows], weight, out=out)
            return weight.ops.total(summed.blocks())  # type: ignore[no-any-return]
        y = matmuls.forward(x, weight)
        if adapter is not None:
            ctx.h = adapter.add(x, y, drop)
        if sequence:
            return reduce_scatter(y, axis)
        all_reduce(y, axis)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, axis, sequence, adapter, drop = ctx.weight, ctx.region.axis, ctx.region.sequence, ctx.adapter, ctx.drop
        matmuls, trained = weight.ops.matmuls, weight.requires_grad
        # First: where it brings a whole block back, there is nothing else yet.
        x: Any = kept(ctx) if trained or adapter is not None else None
        if trained and sequence and ctx.region.transport is not None:
            gathered, grad_x = Gather(grad, ctx.region.transport), torch.empty_like(x)
            for rows, part in gathered.parts():
                matmuls.dgrad(part, weight, out=grad_x[rows])
            grad = gathered.whole(keep=weight.on_wgrad is not None)
            return grad_x, weight.add_wgrad(grad, x), None, None, None
        grad = all_gather(grad, axis) if sequence else grad
        prepared = matmuls.prepare(grad)
        if adapter is None:
            del grad  # in fp8 a tensor of its own, which only an adapter needs from here on
        grad_x = matmuls.dgrad(prepared, weight)
        grad_weight = weight.add_wgrad(prepared, x)
        if adapter is None:
            return grad_x, grad_weight, None, None, None
        grad_h = adapter.dgrad(grad, grad_x, drop)
        return grad_x, grad_weight, None, None, None, *adapter.wgrad(x, ctx.h, grad, grad_h, drop)


def column_matmul(
    x: torch.Tensor,
    weight: Weight,
    region: Region,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    drop: Dropout | None = None,
) -> torch.Tensor:
    """Enter the region and multiply: x [tokens, in] (our tokens under sequence) -> [tokens, rows of weight].

    bias: added in the GEMM's own pass; it gets no gradient from here. drop: of the adapter's input, all tokens.
    """
    if not region.sequence and not torch.is_grad_enabled():  # nothing to keep
        y = weight.ops.matmuls.forward(x, weight.to(x.dtype), bias)
        if adapter is not None:
            adapter.add(x, y, drop)
        return y
    held = () if adapter is None else adapter.weights
    return _ColumnMatmul.apply(x, weight, bias, region, adapter, drop, *held)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """Outputs cut over the axis; several logical tensors may be stacked (query, key, value).

    The next op computes the bias's gradient, in the pass over its own. `biased` adds the bias while it multiplies;
    `matmul` leaves that to the next op too. drop: of the adapter's input, for all tokens of the region.
    """

    def __init__(self, factory: ParameterFactory, weight: list[Tensor], bias: list[Tensor], region: Region):
        super().__init__()
        self.weight = factory(*weight)
        self.bias = factory(*bias) if bias else None
        self.adapter = adapter_of(factory, weight, self.weight)
        self.region = region

    def forward(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        y = self.matmul(x, drop)
        return y if self.bias is None else y + self.bias

    def biased(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.detach()
        return column_matmul(x, self.weight, self.region, bias, self.adapter, drop)

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        return column_matmul(x, self.weight, self.region, None, self.adapter, drop)


class RowLinear(nn.Module):
    """Inputs cut over the axis; the bias is to be added once, after the sum: `matmul` leaves it to the next op.

    drop: of the adapter's input, for all tokens of the region.
    """

    def __init__(self, factory: ParameterFactory, weight: Tensor, bias: Tensor | None, region: Region):
        super().__init__()
        self.weight = factory(weight)
        self.bias = factory(bias) if bias is not None else None
        self.adapter = adapter_of(factory, [weight], self.weight)
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.biased(self.matmul(x))

    def biased(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y + self.bias

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        drop = of_columns(drop, self.region.axis.index, x.shape[1])
        if not self.region.sequence and not torch.is_grad_enabled():  # nothing to keep
            y = self.weight.ops.matmuls.forward(x, self.weight)
            if self.adapter is not None:
                self.adapter.add(x, y, drop)
            all_reduce(y, self.region.axis)
            return y
        held = () if self.adapter is None else self.adapter.weights
        return _RowMatmul.apply(x, self.weight, self.region, self.adapter, drop, *held)  # type: ignore[no-any-return, no-untyped-call]
