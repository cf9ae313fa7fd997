"""Linear layers whose weights are kept in fp8 by a model that only answers: half the bytes of 16-bit ones to read.

One scale an output brings its largest weight to the limit of e4m3 (3 bits of mantissa), and what is multiplied keeps
its dtype: a weight is off by at most a sixteenth of itself, or by 2^-10 of 1/448 of the largest one. The head, norms
and embeddings stay as they are. In plain torch here; kernels/fp8_weights.py takes few rows fast.
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


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def trusted(fast: Multiply, dtype: torch.dtype, device: torch.device) -> Multiply:
    """It, where it agrees with `multiply` about few and many rows in dtype; else that, and a line says why."""
    if fast is multiply:
        return fast
    some = (torch.arange(200 * 300, device=device, dtype=torch.float32) * 0.618).frac().view(200, 300)
    narrow, scale = narrowed(some[:100])

    def off() -> float:
        given = [(some[:rows].to(dtype), narrow, scale / 300) for rows in (1, 20, 200)]
        return error_of(*([each(*one) for one in given] for each in (fast, multiply)))

    return fast if passes(off, dtype, "weights in fp8 are multiplied by torch's kernels: ours") else multiply


@dataclass(frozen=True)
class Fp8Weights(Matmuls):
    """wide: what multiplies by the head. multiply: the one above or a faster one."""

    wide: Matmuls
    multiply: Multiply = multiply

    words = "weights in fp8"

    def exact(self) -> Matmuls:
        return self.wide

    def factor(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Factor:
        """As of Matmuls; the weight itself is given up."""
        trusted(self.multiply, weight.dtype, weight.device)  # now, not while somebody waits for a first token
        narrow, scale = narrowed(weight.detach())
        weight.data = weight.data.new_empty(0)
        return Factor(narrow, bias, scale)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        """As of Matmuls."""
        scale = factor.scale
        assert scale is not None

        def run(x: torch.Tensor) -> torch.Tensor:
            y = trusted(self.multiply, x.dtype, x.device)(x, factor.weight, scale)
            return y if factor.bias is None else y.add_(factor.bias)

        return run
