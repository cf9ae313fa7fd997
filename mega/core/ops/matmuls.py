"""The three GEMMs of a linear layer y = x W^T + b, with x [n, in] and W [out, in]:

    forward   y [n, out]
    dgrad     dx = dy W [n, in], or the gradient of `before` if x = activation(before)
    wgrad     dW = dy^T x [out, in], in a separate tensor, or written or added to main_grad

`prepare` converts dy once into the format that dgrad and wgrad need. `operands` converts x into the formats that
forward and wgrad need. If an argument `out` is given, the result is written to this tensor. The GEMMs in this module
compute in the dtype of their operands; the GEMMs in fp8.py compute in fp8. This module does not depend on ranks or
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from mega.core.ops import cublaslt_gelu, observe
from mega.core.ops.activation import activate
from mega.core.ops.fused_casts import FusedCasts
from mega.core.ops.operand import Input, Operand


@dataclass(frozen=True, eq=False)
class Factor:
    """A weight for inference and its bias. The address of the weight never changes."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out]
    scale: torch.Tensor | None = None  # fp32 [out], for weights in fp8


class Matmuls:
    """The GEMMs of a linear layer in plain torch. words: description of the implementation for messages."""

    words = "plain torch"
    fused: FusedCasts | None = None
    """Kernels that compute gradients and cast them for these GEMMs, or None."""

    def exact(self) -> Matmuls:
        """Return the GEMMs for layers in which fp8 would cost too much accuracy, such as the head."""
        return self

    def operands(self, x: torch.Tensor) -> tuple[Operand, Operand] | None:
        """Convert x [n, in] to the operands that `forward` and `wgrad` need, x and x^T. Return None if both need x
        itself."""
        return None

    def forward(
        self,
        x: Input,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def factor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Factor:
        """Convert the weight to the format that `by` needs. The original weight may be freed."""
        return Factor(weight.detach(), bias)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that computes `forward` for inference with a constant weight, in as few operations as
        possible."""
        bias, weight = factor.bias, factor.weight.t()
        return (lambda x: torch.mm(x, weight)) if bias is None else (lambda x: torch.addmm(bias, x, weight))

    def prepare(self, grad: torch.Tensor) -> Any:
        return grad

    def dgrad(self, grad: Any, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(grad, weight, out=out)

    def applies_slope(self, kind: str, x: torch.Tensor, wide: int) -> bool:
        """Whether `slope_dgrad` is faster than `dgrad` and a separate pass, for an activation of `wide` features before
        a layer whose outputs resemble x [n, width]."""
        return False

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `forward`, [n, out], and its activation, or None if a separate pass is faster. Call this function only
        if `applies_slope` returns True."""
        return None

    def slope_dgrad(self, grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the gradient of `before` [n, in], if the layer's input is x = activation(before): dx times the slope
        of the activation. kind: as in `ops.activation.activate`."""
        leaf = before.detach().requires_grad_()
        with torch.enable_grad():
            (grad_before,) = torch.autograd.grad(activate(leaf, None, kind), leaf, self.dgrad(grad, weight))
        return grad_before

    def wgrad(self, grad: Any, x: Input) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return grad.t() @ x  # type: ignore[no-any-return]

    @property
    def overwrites(self) -> bool:
        """Whether `write_wgrad` is faster than zeroing main_grad and `accumulate_wgrad`, with the same result."""
        return False

    def write_wgrad(self, main_grad: torch.Tensor, grad: Any, x: Input) -> None:
        """Write the gradient to main_grad, whose elements may be undefined."""
        self.accumulate_wgrad(main_grad.zero_(), grad, x)

    def accumulate_wgrad(self, main_grad: torch.Tensor, grad: Any, x: Input) -> None:
        assert isinstance(x, torch.Tensor)
        if main_grad.dtype == x.dtype:
            main_grad.addmm_(grad.t(), x)
        else:
            main_grad.add_(self.wgrad(grad, x))


class WideMatmuls(Matmuls):
    """The GEMMs on CUDA, where 16-bit gradients are accumulated directly into an fp32 main_grad."""

    words = "cuBLAS, gradients in fp32"

    def applies_slope(self, kind: str, x: torch.Tensor, wide: int) -> bool:
        return cublaslt_gelu.applies(kind, x.dtype, x.shape[1], wide) and (
            x.is_meta or cublaslt_gelu.trusted(x.device, x.dtype)
        )

    def activated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not x.is_meta:
            return cublaslt_gelu.forward(x, weight, bias)
        before = self.forward(x, weight, bias)
        active = torch.empty_like(before)  # on an H100, the epilogue costs as much as a pass that writes `active`
        observe.kernel("activation in a GEMM", (active,))
        return before, active

    def slope_dgrad(self, grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, kind: str) -> torch.Tensor:
        if grad.is_meta:  # an estimate: on an H100, the epilogue costs as much as a pass that reads `before`
            observe.kernel("slope of an activation", (before,))
            return self.dgrad(grad, weight)
        grad_before = cublaslt_gelu.slope_dgrad(grad, weight, before)
        return super().slope_dgrad(grad, weight, before, kind) if grad_before is None else grad_before

    def accumulate_wgrad(self, main_grad: torch.Tensor, grad: Any, x: Input) -> None:
        assert isinstance(x, torch.Tensor)
        if main_grad.dtype != torch.float32 or x.element_size() != 2:
            return super().accumulate_wgrad(main_grad, grad, x)
        torch.ops.aten.addmm.dtype_out(main_grad, grad.t(), x, torch.float32, out=main_grad)
