"""Activations of feed-forward layers, for inputs [tokens, f]. Gated activations take [tokens, 2f], with the gate
first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from mega.core.ops.autograd import FunctionContext, Slope, deliver, with_slope

BiasGradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""The type of `bias_gradient`."""

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu2": "relu2"}
"""Kind of gated activation -> activation of its gate (Shazeer 2020)."""


def gated_kind(activation: str) -> str:
    """Return the kind of gated activation whose gate has the given activation.

    >>> gated_kind("silu")
    'swiglu'
    """
    return next(kind for kind, gate in GATED.items() if gate == activation)


def activate(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Compute the activation of x + bias. kind: gelu (erf), gelu_tanh, silu, relu, relu2 (squared), or a kind in
    `GATED`, which computes activation(gate) x up."""
    if bias is not None:
        x = x + bias
    if kind in GATED:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate, None, GATED[kind]) * up
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    assert kind == "silu", kind
    return F.silu(x)


def activate_weighted(x: torch.Tensor, weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute `activate` for x, and multiply each row by its weight in weights [tokens]. The result has the dtype of
    x."""
    active = activate(x, None, kind)
    return (active * weights[:, None]).to(active.dtype)


class _Deferring(torch.autograd.Function):
    """An activation whose backward pass leaves the slope to the GEMM after it."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[torch.Tensor | None, Slope, BiasGradient]],
        before: torch.Tensor,
        bias: torch.Tensor | None,
        output: Callable[[], torch.Tensor],
        slope: Slope,
        bias_gradient: BiasGradient,
    ) -> torch.Tensor:
        ctx.state = bias, slope, bias_gradient
        return output()

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[torch.Tensor | None, Slope, BiasGradient]], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        bias, slope, bias_gradient = ctx.state
        assert slope.before is None, "no GEMM applied the slope of an activation"
        grad_bias = None if bias is None or not bias.requires_grad else bias_gradient(bias, grad)
        return grad, grad_bias, None, None, None


def bias_gradient(bias: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Compute `deliver` for a bias that was added to every row of [n, f]. grad: [n, f]."""
    return deliver(bias, grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)))


def defer_slope(
    before: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, kind: str, bias_gradient: BiasGradient
) -> torch.Tensor:
    """Return the activation of `before`, with a `Slope` that the next GEMM must apply.

    output: the activation of `before`, without a gradient. bias: a bias that was already added to `before`; only its
    gradient is computed here, by the function `bias_gradient`.
    """
    slope = Slope(before.detach(), kind)
    # `output` is not an input of the autograd function, because a function must not return its input.
    active = _Deferring.apply(before, bias, lambda: output, slope, bias_gradient)  # type: ignore[no-untyped-call]
    return with_slope(active, slope)
