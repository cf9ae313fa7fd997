"""The GEMMs of a linear layer y = x W^T + b, with the interface that the parallel linear layers (linear.py) use.

    forward   y [n, out], and the state for the backward pass
    dgrad     dx [n, in]
    wgrad     dW [out, in], added to the weight's main_grad if it has one

`WeightGemms` computes these GEMMs with one weight. A wrapper with the same interface may replace `WeightGemms`; for
example, an adapter adds a low-rank GEMM to each of the three GEMMs (adapter.py). GEMMs do not depend on ranks. x and dy
are complete on this rank, whereas y and dx may be partial sums that the layer reduces afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mega.core.ops.dropout import Dropout
from mega.core.ops.matmuls import Factor
from mega.core.ops.operand import Input, Operand
from mega.core.parallel.weight import Weight

Grads = tuple[torch.Tensor | None, ...]
"""One gradient per weight; None if the gradient was added to a main_grad, or if the weight is not trained."""


class LinearGemms(Protocol):
    """The GEMMs of one linear layer."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights whose gradients `wgrad` returns, in the same order; the layer's own weight is first."""

    @property
    def plain(self) -> bool:
        """Whether y is exactly x W^T + b, so that a different kernel may compute y."""

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W in the dtype of the input, for use as the `factor` of the GEMMs."""

    def operands(self, x: torch.Tensor) -> tuple[Operand, Operand] | None:
        """Convert x [n, in] to the operands that `forward` and `wgrad` need, as in `Matmuls.operands`."""

    def forward(
        self,
        x: Input,
        factor: torch.Tensor,
        bias: torch.Tensor | None = None,
        drop: Dropout | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return y [n, out] for x [n, in], and the state that `prepare` needs. x may be the first result of `operands`.
        drop: dropout for the input of an adapter."""

    def prepare(self, grad: torch.Tensor, saved: Any) -> Any:
        """Return dy [n, out] in the format that `dgrad` and `wgrad` need. Call `dgrad` before `wgrad`."""

    def dgrad(self, grad: Any, factor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return dx [n, in] for a prepared dy."""

    def wgrad(self, grad: Any, x: Input | None) -> Grads:
        """Return the gradients of `weights` for a prepared dy and x. x may be the second result of `operands`, and None
        if no weight is trained."""

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that computes `forward` for inference, without a gradient and with a constant weight, in as
        few operations as possible."""


class WeightGemms:
    """The GEMMs of one weight, computed by the implementation that the weight's `ops` select (ops/matmuls.py)."""

    plain = True

    def __init__(self, weight: Weight, *, saves_input: bool = True):
        """saves_input: whether the input is saved for this layer alone, so that saving it in fp8 needs less memory."""
        self.weight, self._saves_input = weight, saves_input

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.weight,)

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype)

    def operands(self, x: torch.Tensor) -> tuple[Operand, Operand] | None:
        return self.weight.ops.matmuls.operands(x) if self._saves_input else None

    def forward(
        self,
        x: Input,
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

    def wgrad(self, grad: Any, x: Input | None) -> Grads:
        return (None if x is None else self.weight.add_wgrad(grad, x),)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.weight.ops.matmuls.by(factor)


def trained(gemms: LinearGemms) -> bool:
    """Whether the backward pass computes the gradient of any weight, for which it needs the input."""
    return any(weight.requires_grad for weight in gemms.weights)


def defers_wgrad(gemms: LinearGemms) -> bool:
    """Whether `wgrad` defers its GEMMs, so that its operands must be kept."""
    return any(weight.on_wgrad is not None for weight in gemms.weights)
