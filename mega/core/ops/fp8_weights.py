"""Linear layers whose weights are kept in fp8 by a model that only answers: half the bytes of 16-bit ones to read.

One scale an output brings its largest weight to the limit of e4m3 (3 bits of mantissa), and what is multiplied keeps
its dtype: a weight is off by at most a sixteenth of itself, or by 2^-10 of 1/448 of the largest one. The head, norms
and embeddings stay as they are. In plain torch here; kernels/fp8_weights.py takes few rows fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mega.core.ops.fp8 import FORWARD, LIMITS, TINY
from mega.core.ops.matmuls import Factor, Matmuls


def narrowed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] -> fp8 [out, in] and fp32 scales [out], whose product it is.

    >>> narrow, scale = narrowed(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> (narrow.float() * scale[:, None]).tolist()
    [[1.0, -2.0], [0.0, 0.0]]
    """
    scale = weight.abs().amax(1).float().clamp(min=TINY) / LIMITS[FORWARD]
    return (weight.float() / scale[:, None]).to(FORWARD).contiguous(), scale


def multiply(x: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [n, in] by the weights of `narrowed`: [n, out] in the dtype of x."""
    return (torch.mm(x, narrow.to(x.dtype).t()) * scale).to(x.dtype)


@dataclass(frozen=True)
class Fp8Weights(Matmuls):
    """wide: what multiplies by the head. multiply: the one above or a faster one."""

    wide: Matmuls
    multiply: Callable[..., torch.Tensor] = multiply

    words = "weights in fp8"

    def exact(self) -> Matmuls:
        return self.wide

    def factor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Factor:
        """As of Matmuls; the weight itself is given up."""
        narrow, scale = narrowed(weight.detach())
        weight.data = weight.data.new_empty(0)
        return Factor(narrow, bias, scale)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """As of Matmuls."""

        def run(x: torch.Tensor) -> torch.Tensor:
            y = self.multiply(x, factor.weight, factor.scale)
            return y if factor.bias is None else y.add_(factor.bias)

        return run
