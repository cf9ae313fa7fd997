"""Linear layers sharded over the tensor axis. This module does the communication; gemms.py computes the GEMMs.

    ColumnLinear  every rank computes its own outputs      y_r = x W_r^T            x enters the region
    RowLinear     every rank sums over its own inputs      y = sum_r x_r W_r^T + b  y leaves the region

With two ranks, x [tokens, h], and W stored as [out, in]:

    ColumnLinear                   W_0  [out/2, h]            y_0 [tokens, out/2]
                   x [tokens, h]   ---------------      ->    -------------------
                                   W_1  [out/2, h]            y_1 [tokens, out/2]

    RowLinear      x_0 | x_1  [tokens, in/2] each, W_0 | W_1  [h, in/2] each   ->   x_0 W_0^T + x_1 W_1^T  [tokens, h]

Under sequence parallelism, each rank holds only some of the tokens between regions. Entering a region gathers the
tokens, and leaving a region reduce-scatters the sum. The gathered input is not saved. The backward pass gathers the
input again while it computes the input gradient (Korthikanti et al. 2022, section 4.2). If the region has a transport,
these exchanges overlap with the GEMMs that use their tokens, block by block. No wgrad is computed for a weight that is
not trained. If the GEMMs are in fp8, an input that is neither gathered nor recomputed is saved in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.ops.autograd import Activation, FunctionContext, Slope, keep, kept
from mega.core.ops.dropout import Dropout, of_columns
from mega.core.ops.fused_casts import accepting
from mega.core.ops.operand import Input
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
"""The state for the backward pass: the GEMMs, their region, the input's dtype, and the state from
`LinearGemms.forward`."""


def _operands(x: torch.Tensor, gemms: LinearGemms, *, gathered: bool = False) -> tuple[Input, Input | None]:
    """Return x in the formats that `gemms.forward` and `gemms.wgrad` need, with None for the latter if no weight is
    trained. gathered: whether the GEMMs need the x of all ranks."""
    if not trained(gemms):
        return x, None
    # A recipe costs no memory, and blocks of a gathered x have scales of their own.
    operands = None if gathered or hasattr(x, "recipe") else gemms.operands(x)
    return (x, x) if operands is None else operands


def _forward(
    gemms: LinearGemms,
    x: Input,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    drop: Dropout | None,
    activation: Activation | None,
) -> tuple[torch.Tensor, object]:
    """Compute `gemms.forward`, and the activation of the result if one GEMM computes both faster."""
    if activation is not None:
        assert isinstance(x, torch.Tensor) and bias is not None
        outputs = gemms.weights[0].ops.matmuls.activated(x, factor, bias, activation.kind)
        if outputs is not None:
            y, activation.output = outputs
            return y, None
    return gemms.forward(x, factor, bias, drop)


class _ColumnMatmul(torch.autograd.Function):
    """Column-parallel GEMM: x [tokens, in] -> [tokens, this rank's outputs]. Under sequence parallelism x holds only
    the tokens of this rank.

    weights: the weights of the GEMMs, which must be inputs so that autograd tracks them.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[_MatmulState],
        x: torch.Tensor,
        gemms: LinearGemms,
        bias: torch.Tensor | None,
        region: Region,
        drop: Dropout | None,
        activation: Activation | None,
        *weights: Weight,
    ) -> torch.Tensor:
        axis, sequence = region.axis, region.sequence
        ctx.state = gemms, region, x.dtype, None
        operand, saved_input = _operands(x, gemms, gathered=sequence)
        keep(ctx, saved_input)
        factor = gemms.cast(x.dtype)
        if sequence and region.transport is not None:
            y = x.new_empty((x.shape[0] * axis.size, factor.shape[0]))
            for rows, part in Gather(x, region.transport).parts():
                gemms.forward(part, factor, bias, out=y[rows])
            return y
        whole = all_gather(x, axis) if sequence else operand
        y, saved = _forward(gemms, whole, factor, bias, drop, activation)
        ctx.state = gemms, region, x.dtype, saved
        return y

    @staticmethod
    def backward(ctx: FunctionContext[_MatmulState], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gemms, region, dtype, saved = ctx.state
        axis, sequence, transport, factor = region.axis, region.sequence, region.transport, gemms.cast(dtype)
        x, _ = kept(ctx)
        if isinstance(x, torch.Tensor) and sequence and transport is not None:
            gathered, summed = Gather(x, transport), Scatter(*x.shape, x, transport)  # type: ignore[call-arg]
            for rows, out in summed.parts():
                gemms.dgrad(grad[rows], factor, out=out)
            grads = gemms.wgrad(grad, gathered.whole(keep=defers_wgrad(gemms)))
            return gemms.weights[0].ops.total(summed.blocks()), None, None, None, None, None, *grads
        # 1 gather the whole input again, if wgrad needs it, while dgrad runs
        whole, gathering = start_all_gather(x, axis) if sequence and isinstance(x, torch.Tensor) else (x, None)
        prepared = gemms.prepare(grad, saved)
        grad_x = gemms.dgrad(prepared, factor)
        # 2 sum the input's gradient over ranks while wgrad runs
        if sequence:
            grad_x, summing = start_reduce_scatter(grad_x, axis)
        else:
            summing = all_reduce(grad_x, axis, wait=False)
        if gathering is not None:
            wait_for(gathering)
        grads = gemms.wgrad(prepared, whole)
        wait_for(summing)
        return grad_x, None, None, None, None, None, *grads


class _RowMatmul(torch.autograd.Function):
    """Row-parallel GEMM: x [tokens, this rank's inputs] -> [tokens, out], summed over ranks; under sequence parallelism
    the result holds only the tokens of this rank.

    slope: the activation before the GEMM, if dgrad must multiply its result by the activation's slope. weights: the
    weights of the GEMMs, which must be inputs so that autograd tracks them.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[_MatmulState, Slope | None]],
        x: torch.Tensor,
        gemms: LinearGemms,
        region: Region,
        drop: Dropout | None,
        slope: Slope | None,
        *weights: Weight,
    ) -> torch.Tensor:
        axis, sequence = region.axis, region.sequence
        ctx.state = (gemms, region, x.dtype, None), slope
        before = () if slope is None else (slope.take(),)
        operand, saved_input = _operands(x, gemms)
        keep(ctx, saved_input, *before)
        factor = gemms.cast(x.dtype)
        if sequence and region.transport is not None:
            summed = Scatter(x.shape[0] // axis.size, factor.shape[0], x, region.transport)
            for rows, out in summed.parts():
                gemms.forward(x[rows], factor, out=out)
            return gemms.weights[0].ops.total(summed.blocks())
        y, saved = gemms.forward(operand, factor, None, drop)
        ctx.state = (gemms, region, x.dtype, saved), slope
        if sequence:
            return reduce_scatter(y, axis)
        all_reduce(y, axis)
        return y

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[_MatmulState, Slope | None]], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (gemms, region, dtype, saved), slope = ctx.state
        axis, sequence, transport, factor = region.axis, region.sequence, region.transport, gemms.cast(dtype)
        # `kept` may recompute a whole block, so call it first, while no other tensor of this function is alive.
        x, before = kept(ctx)
        if isinstance(x, torch.Tensor) and sequence and transport is not None:
            gathered, grad_x = Gather(grad, transport), torch.empty_like(x)
            for rows, part in gathered.parts():
                gemms.dgrad(part, factor, out=grad_x[rows])
            grads = gemms.wgrad(gathered.whole(keep=defers_wgrad(gemms)), x)
            return grad_x, None, None, None, None, *grads
        # Keep no reference to the gathered gradient, because `prepared` is a separate tensor in fp8.
        prepared = gemms.prepare(all_gather(grad, axis) if sequence else grad, saved)
        del grad
        if slope is None:
            grad_x = gemms.dgrad(prepared, factor)
        else:
            grad_x = gemms.weights[0].ops.matmuls.slope_dgrad(prepared, factor, before[0], slope.kind)
        return grad_x, None, None, None, None, *gemms.wgrad(prepared, x)


def column_matmul(
    x: torch.Tensor,
    gemms: LinearGemms,
    region: Region,
    bias: torch.Tensor | None = None,
    drop: Dropout | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Enter the region and multiply: x [tokens, in] -> [tokens, rows of the weight].

    Under sequence parallelism x holds only the tokens of this rank. bias: added by the GEMM; this function computes no
    gradient for the bias. drop: dropout for adapters, for all tokens. activation: the activation of the result, which
    the GEMM may compute; needs a bias and plain GEMMs.
    """
    if not region.sequence and not torch.is_grad_enabled():  # skip autograd, which costs host time
        return _forward(gemms, x, gemms.cast(x.dtype), bias, drop, activation)[0]
    y = _ColumnMatmul.apply(x, gemms, bias, region, drop, activation, *gemms.weights)  # type: ignore[no-untyped-call]
    return accepting(y, gemms.weights[0].ops.matmuls.fused if gemms.plain and activation is None else None)


class ColumnLinear(nn.Module):
    """A linear layer with outputs sharded over the tensor axis. Its weight may stack several logical tensors (query,
    key, value).

    The next op computes the gradient of the bias together with its own gradient. `biased` adds the bias in the GEMM;
    `matmul` leaves the addition to the next op. gemms: the GEMMs of the layer, which an adapter may wrap. drop: dropout
    for adapters, for all tokens of the tensor-parallel region.
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

    def activated(self, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `biased` and its activation, without a gradient, or None if the GEMM does not compute the activation.
        kind: as in `Matmuls.activated`, whose conditions apply."""
        exchanges = self.region.sequence and self.region.transport is not None
        if self.bias is None or exchanges:
            return self.biased(x), None
        activation = Activation(kind)
        return column_matmul(x, self.gemms, self.region, self.bias.detach(), None, activation), activation.output

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None) -> torch.Tensor:
        return column_matmul(x, self.gemms, self.region, None, drop)


class RowLinear(nn.Module):
    """A linear layer with inputs sharded over the tensor axis. The bias must be added once, after the sum over ranks,
    so `matmul` does not add it.

    gemms: GEMMs of the layer, which an adapter may wrap. drop: dropout for adapters, for all tokens of the
    tensor-parallel region.
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

    def applies_slope(self, x: torch.Tensor, kind: str) -> bool:
        """Whether `matmul` should apply the slope of the activation before this layer. x: a tensor with the dtype and
        width of the layer's output."""
        exchanges = self.region.sequence and self.region.transport is not None
        matmuls = self.weight.ops.matmuls
        return self.gemms.plain and not exchanges and matmuls.applies_slope(kind, x, self.weight.shape[1])

    def matmul(self, x: torch.Tensor, drop: Dropout | None = None, slope: Slope | None = None) -> torch.Tensor:
        """Multiply x [tokens, in]. slope: the activation that computed x, only if `applies_slope` returns True."""
        drop = of_columns(drop, self.region.axis.index, x.shape[1])
        if not self.region.sequence and not torch.is_grad_enabled():  # there is no backward pass to save tensors for
            y, _ = self.gemms.forward(x, self.gemms.cast(x.dtype), None, drop)
            all_reduce(y, self.region.axis)
            return y
        return _RowMatmul.apply(x, self.gemms, self.region, drop, slope, *self.gemms.weights)  # type: ignore[no-any-return, no-untyped-call]
