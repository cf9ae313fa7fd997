"""The three products of a linear layer y = x W^T + b, with x [n, in] and W [out, in]:

    output            y [n, out]
    input_gradient    dx = dy W [n, in]
    weight_gradient   dW = dy^T x [out, in], in a tensor of its own or added to a sink

`prepare` brings dy once into the form that both gradients take. `out`: where the result goes. In the dtype of what is
multiplied here; fp8.py does it in fp8. Knows no ranks and no layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


class Products:
    """In plain torch."""

    def exact(self) -> Products:
        """What multiplies where rounding to fewer bits would cost too much: the head."""
        return self

    def output(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def prepare(self, grad: torch.Tensor) -> Any:
        return grad

    def input_gradient(self, grad: Any, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(grad, weight, out=out)

    def weight_gradient(self, grad: Any, x: torch.Tensor) -> torch.Tensor:
        return grad.t() @ x  # type: ignore[no-any-return]

    def add_weight_gradient(self, sink: torch.Tensor, grad: Any, x: torch.Tensor) -> None:
        if sink.dtype == x.dtype:
            sink.addmm_(grad.t(), x)
        else:
            sink.add_(self.weight_gradient(grad, x))


class WideProducts(Products):
    """On CUDA: a 16-bit gradient is accumulated straight into an fp32 sink."""

    def add_weight_gradient(self, sink: torch.Tensor, grad: Any, x: torch.Tensor) -> None:
        if sink.dtype != torch.float32 or x.element_size() != 2:
            return super().add_weight_gradient(sink, grad, x)
        torch.ops.aten.addmm.dtype_out(sink, grad.t(), x, torch.float32, out=sink)
