"""Linear layers with fp8 weights for inference. They read half as many bytes as layers with 16-bit weights.

Each output has a scale that maps its largest weight to the limit of e4m3 (3 bits of mantissa). Activations keep their
dtype. The error of a weight is at most 1/16 of its value, or 2^-10 / 448 of the output's largest weight if that is
more. The head, norms and embeddings are not converted. This module uses plain torch; kernels/fp8_weights.py contains a
fast implementation for few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from mega.core.ops.fp8 import FORWARD, LIMITS, TINY
from mega.core.ops.matmuls import Factor, Matmuls
from mega.core.ops.trial import error_of, passes


def narrowed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor weight [out, in] into fp8 [out, in] times fp32 scales [out].

    >>> narrow, scale = narrowed(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> (narrow.float() * scale[:, None]).tolist()
    [[1.0, -2.0], [0.0, 0.0]]
    """
    scale = weight.abs().amax(1).float().clamp(min=TINY) / LIMITS[FORWARD]
    return (weight.float() / scale[:, None]).to(FORWARD).contiguous(), scale


def multiply(x: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply x [n, in] by the weights from `narrowed`. The result is [n, out] in the dtype of x."""
    return (torch.mm(x, narrow.to(x.dtype).t()) * scale).to(x.dtype)


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def trusted(fast: Multiply, dtype: torch.dtype, device: torch.device) -> Multiply:
    """Return `fast` if it agrees with `multiply` for few and for many rows of this dtype; otherwise log a warning and
    return `multiply`."""
    if fast is multiply:
        return fast
    values = (torch.arange(200 * 300, device=device, dtype=torch.float32) * 0.618).frac().view(200, 300)
    narrow, scale = narrowed(values[:100])

    def error() -> float:
        arguments = [(values[:rows].to(dtype), narrow, scale / 300) for rows in (1, 20, 200)]
        return error_of(*([each(*one) for one in arguments] for each in (fast, multiply)))

    return fast if passes(error, dtype, "weights in fp8 are multiplied by torch's kernels: ours") else multiply


@dataclass(frozen=True)
class Fp8Weights(Matmuls):
    """The GEMMs of a linear layer with fp8 weights."""

    wide: Matmuls
    """The GEMMs of the head, whose weights are not in fp8."""
    multiply: Multiply = multiply
    """The function `multiply`, or a faster implementation."""

    words = "weights in fp8"

    def exact(self) -> Matmuls:
        return self.wide

    def factor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Factor:
        """Convert the weight to fp8. The original weight is freed."""
        trusted(self.multiply, weight.dtype, weight.device)  # test the kernel now, so that no request has to wait
        narrow, scale = narrowed(weight.detach())
        weight.data = weight.data.new_empty(0)
        return Factor(narrow, bias, scale)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that multiplies its argument by the weight in `factor`, which the method `factor`
        returned."""
        scale = factor.scale
        assert scale is not None

        def run(x: torch.Tensor) -> torch.Tensor:
            y = trusted(self.multiply, x.dtype, x.device)(x, factor.weight, scale)
            return y if factor.bias is None else y.add_(factor.bias)

        return run
