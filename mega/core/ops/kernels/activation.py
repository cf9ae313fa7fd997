"""Activations in Triton, fused with the addition of the bias. The backward pass also sums the gradient of the bias."""

from __future__ import annotations

import torch

from mega.core.ops.activation import GATED
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.fused_casts import FusedCasts, gradient_casts, stand_in, with_largest
from mega.core.ops.kernels.fp8 import MAXIMA, new_largest, update_largest
from mega.core.ops.kernels.language import cdiv, jit, launch, tl
from mega.core.ops.kernels.sums import deliver_sums

ROWS = 256
"""Number of rows that are summed in one partial sum of the bias gradient."""
TALL, WIDE = 16, 128
"""Number of rows and columns of a tile in the backward pass. A tile of the forward pass, which computes no sums, has
half as many rows and twice as many columns. Measured on an H200."""
STAGES = 3
"""Number of tiles whose loads are in flight in the backward pass while one tile is computed."""
KINDS = {"gelu_tanh": 0, "gelu": 1, "relu2": 2, "silu": 3, "relu": 4}


@jit
def value(x, KIND: tl.constexpr):
    if KIND == 0:
        # (1 + tanh u) / 2 is sigmoid(2u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:
        return x * tl.sigmoid(x)
    elif KIND == 4:
        return tl.where(x > 0, x, 0.0)
    else:
        tl.static_assert(KIND == 2, "relu2")
        return tl.where(x > 0, x * x, 0.0)


@jit
def _slope(x, KIND: tl.constexpr):
    if KIND == 0:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == 1:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 3:
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == 4:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(KIND == 2, "relu2")
        return tl.where(x > 0, 2.0 * x, 0.0)


@jit
def _activation_forward(
    x_at, bias_at, y_at, rows, width,
    KIND: tl.constexpr, BIAS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_at + column, column < width, 0.0).to(tl.float32)[None, :]
    tl.store(y_at + offset, value(x, KIND).to(y_at.dtype.element_ty), mask)


@jit
def _activation_backward(
    x_at, bias_at, grad_at, out_at, sums_at, rows, width,
    KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = column < width
    total = tl.zeros([TALL, WIDE], tl.float32)  # summed over rows only once, at the end, because this sum crosses warps
    if BIAS:
        bias = tl.load(bias_at + column, inside, 0.0).to(tl.float32)
    for step in tl.range(0, ROWS, TALL, num_stages=STAGES):
        row = tl.program_id(1) * ROWS + step + tl.arange(0, TALL)
        mask = (row < rows)[:, None] & inside[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
        if BIAS:
            x += bias[None, :]
        grad = tl.load(grad_at + offset, mask, 0.0).to(tl.float32) * _slope(x, KIND)
        tl.store(out_at + offset, grad.to(out_at.dtype.element_ty), mask)
        total += grad
    if BIAS:
        tl.store(sums_at + tl.program_id(1) * width + column, tl.sum(total, 0), inside)


def _activated(x: torch.Tensor, bias: torch.Tensor | None, kind: int) -> torch.Tensor:
    rows, width = x.shape
    y = torch.empty_like(x)
    grid = (cdiv(width, 2 * WIDE), cdiv(rows, TALL // 2))
    launch(
        _activation_forward, grid, x, bias, y, rows, width,
        KIND=kind, BIAS=bias is not None, TALL=TALL // 2, WIDE=2 * WIDE,
    )  # fmt: skip
    return y


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[torch.Tensor | None, int]], x: torch.Tensor, bias: torch.Tensor | None, kind: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.state = bias, kind
        return _activated(x, bias, kind)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[torch.Tensor | None, int]], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        bias, kind = ctx.state
        rows, width = x.shape
        parts = cdiv(rows, ROWS)
        out = torch.empty_like(x)
        sums = torch.empty(1, parts, width, dtype=torch.float32, device=x.device) if bias is not None else None
        launch(
            _activation_backward, (cdiv(width, WIDE), parts),
            x, bias, grad.contiguous(), out, sums, rows, width,
            KIND=kind, BIAS=bias is not None, ROWS=ROWS, TALL=TALL, WIDE=WIDE, STAGES=STAGES,
        )  # fmt: skip
        return out, None if sums is None else deliver_sums((bias,), sums)[0], None


@jit
def _row_and_columns(width, BLOCK: tl.constexpr):
    """Return the row and columns of this program. The grid has only one dimension, because the second dimension is
    limited to 65,535."""
    blocks = tl.cdiv(width, BLOCK)
    number = tl.program_id(0)
    return (number // blocks).to(tl.int64), number % blocks * BLOCK + tl.arange(0, BLOCK)


@jit
def _gate_forward(
    x_at, y_at, largest_at, width, KIND: tl.constexpr, BLOCK: tl.constexpr, MEASURES: tl.constexpr, MAXIMA: tl.constexpr
):
    row, column = _row_and_columns(width, BLOCK)
    mask = column < width
    gate = tl.load(x_at + row * 2 * width + column, mask, 0.0).to(tl.float32)
    up = tl.load(x_at + row * 2 * width + width + column, mask, 0.0).to(tl.float32)
    y = (value(gate, KIND) * up).to(y_at.dtype.element_ty)
    tl.store(y_at + row * width + column, y, mask)
    if MEASURES:
        update_largest(largest_at, tl.abs(y.to(tl.float32)), tl.program_id(0), MAXIMA)


@jit
def gate_gradients(gate, up, grad, KIND: tl.constexpr):
    """Return the gradients of gate and up, for the gradient of the gated activation."""
    if KIND == 3:  # this order of operations keeps results bitwise identical to those of earlier versions
        s = tl.sigmoid(gate)
        grad_gate = grad * up * s * (1.0 + gate * (1.0 - s))
        grad_up = grad * gate * s
    else:
        grad_gate = grad * up * _slope(gate, KIND)
        grad_up = grad * value(gate, KIND)
    return grad_gate, grad_up


@jit
def _gate_backward(x_at, grad_at, out_at, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, column = _row_and_columns(width, BLOCK)
    mask = column < width
    offset = row * 2 * width + column
    gate = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
    up = tl.load(x_at + offset + width, mask, 0.0).to(tl.float32)
    grad = tl.load(grad_at + row * width + column, mask, 0.0).to(tl.float32)
    grad_gate, grad_up = gate_gradients(gate, up, grad, KIND)
    tl.store(out_at + offset, grad_gate.to(out_at.dtype.element_ty), mask)
    tl.store(out_at + offset + width, grad_up.to(out_at.dtype.element_ty), mask)


BLOCK = 1024


def _gated(x: torch.Tensor, kind: int, measures: bool) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    largest = new_largest(x.device) if measures else None
    launch(
        _gate_forward, (cdiv(width, BLOCK) * rows,), x, y, largest, width,
        KIND=kind, BLOCK=BLOCK, MEASURES=measures, MAXIMA=MAXIMA,
    )  # fmt: skip
    return y if largest is None else with_largest(y, largest)


class _Gate(torch.autograd.Function):
    """The gated activation. With --fp8, the linear layer before it may take its gradient in fp8."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[int, FusedCasts | None]], x: torch.Tensor, kind: int, measures: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.state = kind, gradient_casts(x)
        return _gated(x, kind, measures)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[int, FusedCasts | None]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (x,), (kind, casts) = ctx.saved_tensors, ctx.state
        if casts is not None and casts.gate_gradient is not None:
            return stand_in(tuple(x.shape), x, casts.gate_gradient(x, grad.contiguous(), kind)), None, None
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty_like(x)
        grid = (cdiv(width, BLOCK) * rows,)
        launch(_gate_backward, grid, x, grad.contiguous(), out, width, KIND=kind, BLOCK=BLOCK)
        return out, None, None


@jit
def _weighted_forward(x_at, weights_at, y_at, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, column = _row_and_columns(width, BLOCK)
    mask = column < width
    gate = tl.load(x_at + row * 2 * width + column, mask, 0.0).to(tl.float32)
    up = tl.load(x_at + row * 2 * width + width + column, mask, 0.0).to(tl.float32)
    y = value(gate, KIND) * up * tl.load(weights_at + row).to(tl.float32)
    tl.store(y_at + row * width + column, y.to(y_at.dtype.element_ty), mask)


@jit
def _weighted_backward(
    x_at, weights_at, grad_at, out_at, sums_at, width, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the backward pass of one row. A program handles a whole row, because the gradient of the row's weight is
    a sum over the row."""
    row = tl.program_id(0).to(tl.int64)
    weight, total = tl.load(weights_at + row).to(tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask, offset = column < width, row * 2 * width + column
        gate = tl.load(x_at + offset, mask, 0.0).to(tl.float32)
        up = tl.load(x_at + offset + width, mask, 0.0).to(tl.float32)
        grad = tl.load(grad_at + row * width + column, mask, 0.0).to(tl.float32)
        active = value(gate, KIND)
        total += grad * active * up
        tl.store(out_at + offset, (grad * weight * up * _slope(gate, KIND)).to(out_at.dtype.element_ty), mask)
        tl.store(out_at + offset + width, (grad * weight * active).to(out_at.dtype.element_ty), mask)
    tl.store(sums_at + row, tl.sum(total, 0).to(sums_at.dtype.element_ty))


def _weighted(x: torch.Tensor, weights: torch.Tensor, kind: int) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    if rows:
        launch(_weighted_forward, (cdiv(width, BLOCK) * rows,), x, weights, y, width, KIND=kind, BLOCK=BLOCK)
    return y


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext[int], x: torch.Tensor, weights: torch.Tensor, kind: int) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        ctx.state = kind
        return _weighted(x, weights, kind)

    @staticmethod
    def backward(ctx: FunctionContext[int], grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weights = ctx.saved_tensors
        rows, width = x.shape[0], x.shape[1] // 2
        out, sums = torch.empty_like(x), torch.empty_like(weights)
        if rows:
            grad = grad.contiguous()
            launch(_weighted_backward, (rows,), x, weights, grad, out, sums, width, KIND=ctx.state, BLOCK=BLOCK)
        return out, sums, None


def activate_weighted(x: torch.Tensor, weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Implement `ops.activation.activate_weighted`."""
    if kind not in GATED:
        return (activate(x, None, kind) * weights[:, None]).to(x.dtype)
    x, weights, gate = x.contiguous(), weights.contiguous(), KINDS[GATED[kind]]
    if not torch.is_grad_enabled():
        return _weighted(x, weights, gate)
    return _Weighted.apply(x, weights, gate)  # type: ignore[no-any-return]


def activate(x: torch.Tensor, bias: torch.Tensor | None, kind: str, *, measures: bool = False) -> torch.Tensor:
    """Implement `ops.activation.activate`. measures: whether to attach the largest magnitude to the result of a gated
    activation."""
    # Without gradients, skip autograd, whose overhead exceeds that of a launch.
    x, grad = x.contiguous(), torch.is_grad_enabled()
    if kind in GATED:
        x, gate = x if bias is None else x + bias, KINDS[GATED[kind]]
        return _Gate.apply(x, gate, measures) if grad else _gated(x, gate, measures)  # type: ignore[no-any-return]
    return _Activate.apply(x, bias, KINDS[kind]) if grad else _activated(x, bias, KINDS[kind])  # type: ignore[no-any-return]
