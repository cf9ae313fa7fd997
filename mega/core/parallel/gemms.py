"""The GEMMs of a linear layer y = x W^T + b, as its exchanges (linear.py) call them.

    forward   y [n, out]        what the backward pass needs of it is returned with it
    dgrad     dx [n, in]
    wgrad     dW [out, in], into the weight's main_grad where it has one

`WeightGemms` are those of one weight. Something else may stand in their place and wrap them: an adapter adds a
low-rank GEMM to each of the three (adapter.py). They know no ranks: x and dy are whole on this rank, y and dx may be
sums that the layer still has to exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mega.core.ops.dropout import Dropout
from mega.core.ops.matmuls import Factor
from mega.core.parallel.weight import Weight

Grads = tuple[torch.Tensor | None, ...]
"""Gradients of some weights; None where they have gone into a main_grad, or where a weight is not trained."""


class LinearGemms(Protocol):
    """The GEMMs of one linear layer."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Whose gradients `wgrad` computes, in this order: the layer's own weight first."""

    @property
    def plain(self) -> bool:
        """Whether y is x W^T + b and nothing else, so that another kernel may compute it."""

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """W in the dtype of the input: the `factor` of the GEMMs."""

    def forward(
        self,
        x: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor | None = None,
        drop: Dropout | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """x [n, in] -> y [n, out], and what `prepare` takes back. drop: of the input of what wraps the GEMM."""

    def prepare(self, grad: torch.Tensor, saved: Any) -> Any:
        """dy [n, out] in the form that `dgrad` and `wgrad` take. Call `dgrad` first."""

    def dgrad(self, grad: Any, factor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """dx [n, in] of a prepared dy."""

    def wgrad(self, grad: Any, x: torch.Tensor | None) -> Grads:
        """The gradients of `weights` from a prepared dy and x, which may be None where no weight is trained."""

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """`forward` without a gradient, by a weight that stays as it is, in as few operations as possible."""


class WeightGemms:
    """The GEMMs of one weight, computed as its ops choose (ops/matmuls.py)."""

    plain = True

    def __init__(self, weight: Weight):
        self.weight = weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.weight,)

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype)

    def forward(
        self,
        x: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor | None = None,
        drop: Dropout | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        return self.weight.ops.matmuls.forward(x, factor, bias, out=out), None

    def prepare(self, grad: torch.Tensor, saved: None) -> Any:
        return self.weight.ops.matmuls.prepare(grad)

    def dgrad(self, grad: Any, factor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight.ops.matmuls.dgrad(grad, factor, out=out)

    def wgrad(self, grad: Any, x: torch.Tensor | None) -> Grads:
        return (None if x is None else self.weight.add_wgrad(grad, x),)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.weight.ops.matmuls.by(factor)


def trained(gemms: LinearGemms) -> bool:
    """Whether the backward pass computes the gradient of any weight, so that it needs the input."""
    return any(weight.requires_grad for weight in gemms.weights)


def defers_wgrad(gemms: LinearGemms) -> bool:
    """Whether weight gradients are computed later than `wgrad` is called, so that its operands are kept."""
    return any(weight.on_wgrad is not None for weight in gemms.weights)
