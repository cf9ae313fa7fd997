"""Linear layers cut over the tensor axis. They own their collectives; their GEMMs are called (gemms.py).

    ColumnLinear  every rank computes its own outputs      y_r = x W_r^T            x enters the region
    RowLinear     every rank sums over its own inputs      y = sum_r x_r W_r^T + b  y leaves the region

Under sequence parallelism tokens are shared out between regions: entering gathers them, leaving scatters the sum.
The gathered input is not kept; backward gathers it again while it multiplies (Korthikanti et al. 2022, section 4.2).
Where the region has a transport, these exchanges overlap the GEMMs they feed, a rank's tokens at a time.
A weight that is not trained costs no gradient of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.ops.autograd import FunctionContext, keep, kept
from mega.core.ops.dropout import Dropout, of_columns
from mega.core.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    wait_for,
)
from mega.core.parallel.gemms import LinearGemms, WeightGemms, defers_wgrad, trained
from mega.core.parallel.peers import Gather, Scatter
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, Weight

_MatmulState = tuple[LinearGemms, Region, torch.dtype, Any]
"""The GEMMs, where they run, the input's dtype, and what `LinearGemms.forward` saved."""


class _ColumnMatmul(torch.autograd.Function):
    """x [tokens, in] -> [tokens, out of this rank]; under sequence x are our tokens.

    weights: those of the GEMMs, which autograd must see.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[_MatmulState],
        x: torch.Tensor,
        gemms: LinearGemms,
        bias: torch.Tensor | None,
        region: Region,
        drop: Dropout | None,
        *weights: Weight,
    ) -> torch.Tensor:
        axis, sequence = region.axis, region.sequence
        ctx.state = gemms, region, x.dtype, None
        if trained(gemms):
            keep(ctx, x)
        factor = gemms.cast(x.dtype)
        if sequence and region.transport is not None:
            y = x.new_empty((x.shape[0] * axis.size, factor.shape[0]))
            for rows, part in Gather(x, region.transport).parts():
                gemms.forward(part, factor, bias, out=y[rows])
            return y
        whole = all_gather(x, axis) if sequence else x
        y, saved = gemms.forward(whole, factor, bias, drop)
        ctx.state = gemms, region, x.dtype, saved
        return y

    @staticmethod
    def backward(ctx: FunctionContext[_MatmulState], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gemms, region, dtype, saved = ctx.state
        axis, sequence, transport, factor = region.axis, region.sequence, region.transport, gemms.cast(dtype)
        x = kept(ctx) if trained(gemms) else None
        if x is not None and sequence and transport is not None:
            gathered, summed = Gather(x, transport), Scatter(*x.shape, x, transport)  # type: ignore[call-arg]
            for rows, out in summed.parts():
                gemms.dgrad(grad[rows], factor, out=out)
            grads = gemms.wgrad(grad, gathered.whole(keep=defers_wgrad(gemms)))
            return gemms.weights[0].ops.total(summed.blocks()), None, None, None, None, *grads
        # 1 ask for the whole input again, where a weight's gradient needs it, while the input's gradient is computed
        whole, gathering = start_all_gather(x, axis) if sequence and x is not None else (x, None)
        prepared = gemms.prepare(grad, saved)
        grad_x = gemms.dgrad(prepared, factor)
        # 2 sum the input's gradient over ranks while the gradients of weights are computed
        if sequence:
            grad_x, summing = start_reduce_scatter(grad_x, axis)
        else:
            summing = all_reduce(grad_x, axis, wait=False)
        if gathering is not None:
            wait_for(gathering)
        grads = gemms.wgrad(prepared, whole)
        wait_for(summing)
        return grad_x, None, None, None, None, *grads


class _RowMatmul(torch.autograd.Function):
    """x [tokens, in of this rank] -> [tokens, out], summed over ranks; under sequence our tokens of it.

    weights: those of the GEMMs, which autograd must see.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[_MatmulState],
        x: torch.Tensor,
        gemms: LinearGemms,
        region: Region,
        drop: Dropout | None,
        *weights: Weight,
    ) -> torch.Tensor:
        axis, sequence = region.axis, region.sequence
        ctx.state = gemms, region, x.dtype, None
        if trained(gemms):
            keep(ctx, x)
        factor = gemms.cast(x.dtype)
        if sequence and region.transport is not None:
            summed = Scatter(x.shape[0] // axis.size, factor.shape[0], x, region.transport)
            for rows, out in summed.parts():
                gemms.forward(x[rows], factor, out=out)
            return gemms.weights[0].ops.total(summed.blocks())
        y, saved = gemms.forward(x, factor, None, drop)
        ctx.state = gemms, region, x.dtype, saved
        if sequence:
            return reduce_scatter(y, axis)
        all_reduce(y, axis)
        return y

    @staticmethod
    def backward(ctx: FunctionContext[_MatmulState], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gemms, region, dtype, saved = ctx.state
        axis, sequence, transport, factor = region.axis, region.sequence, region.transport, gemms.cast(dtype)
        # First: where it brings a whole block back, there is nothing else yet.
        x = kept(ctx) if trained(gemms) else None
        if x is not None and sequence and transport is not None:
            gathered, grad_x = Gather(grad, transport), torch.empty_like(x)
            for rows, part in gathered.parts():
                gemms.dgrad(part, factor, out=grad_x[rows])
            grads = gemms.wgrad(gathered.whole(keep=defers_wgrad(gemms)), x)
            return grad_x, None, None, None, *grads
        # The gradient that was gathered is not held here: in fp8 the prepared one is another tensor.
        prepared = gemms.prepare(all_gather(grad, axis) if sequence else grad, saved)
        del grad
        grad_x = gemms.dgrad(prepared, factor)
        return grad_x, None, None, None, *gemms.wgrad(prepared, x)


def column_matmul(
    x: torch.Tensor,
    gemms: LinearGemms,
    region: Region,
    bias: torch.Tensor | None = None,
    drop: Dropout | None = None,
) -> torch.Tensor:
    """Enter the region and multiply: x [tokens, in] (our tokens under sequence) -> [tokens, rows of weight].

    bias: added in the GEMM's own pass; it gets no gradient from here. drop: of the GEMMs, for all tokens.
    """
    if not region.sequence and not torch.is_grad_enabled():  # nothing to keep
        return gemms.forward(x, gemms.cast(x.dtype), bias, drop)[0]
    return _ColumnMatmul.apply(x, gemms, bias, region, drop, *gemms.weights)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """Outputs cut over the axis; several logical tensors may be stacked (query, key, value).

    The next op computes the bias's gradient, in the pass over its own. `biased` adds the bias while it multiplies;
    `matmul` leaves that to the next op too. gemms: may be wrapped. drop: for them, for all tokens of the region.
    """

    gemms: LinearGemms

    def __init__(self, factory: ParameterFactory, weight: list[Tensor], bias: list[Tensor], region: Region):
        super().__init__()
        self.weight = factory(*weight)
        self.bias = factory(*bias) if bias else None
        self.gemms = WeightGemms(self.weight)
        self.region = region

    def forward(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        y = self.matmul(x, drop)
        return y if self.bias is None else y + self.bias

    def biased(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        return column_matmul(x, self.gemms, self.region, None if self.bias is None else self.bias.detach(), drop)

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        return column_matmul(x, self.gemms, self.region, None, drop)


class RowLinear(nn.Module):
    """Inputs cut over the axis; the bias is to be added once, after the sum: `matmul` leaves it to the next op.

    gemms: may be wrapped. drop: for them, for all tokens of the region.
    """

    gemms: LinearGemms

    def __init__(self, factory: ParameterFactory, weight: Tensor, bias: Tensor | None, region: Region):
        super().__init__()
        self.weight = factory(weight)
        self.bias = factory(bias) if bias is not None else None
        self.gemms = WeightGemms(self.weight)
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.biased(self.matmul(x))

    def biased(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y + self.bias

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        drop = of_columns(drop, self.region.axis.index, x.shape[1])
        if not self.region.sequence and not torch.is_grad_enabled():  # nothing to keep
            y, _ = self.gemms.forward(x, self.gemms.cast(x.dtype), None, drop)
            all_reduce(y, self.region.axis)
            return y
        return _RowMatmul.apply(x, self.gemms, self.region, drop, *self.gemms.weights)  # type: ignore[no-any-return, no-untyped-call]
