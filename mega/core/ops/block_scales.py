"""Matrices in e4m3 with one fp32 scale per block (DeepSeek-AI 2024, section 3.3.2).

    x [r, c]           narrow [r, c] in e4m3            inverse [r / height, c / width] in fp32, rounded up
    . . . . . .        each block is scaled so that     the factor of each block:
    . . . . . .        its largest magnitude            x = narrow * inverse, up to rounding
                       becomes 448

The largest magnitude of a block is first rounded to bf16. A dequantised block, in bf16 or in a wider dtype, therefore
has the same largest magnitude, and quantising it again gives the same bytes and the same scale. The rounding does not
change the error bounds, because e4m3 rounds magnitudes between 448 and 464 down to 448. This module does not depend on
files or layers.
"""

from __future__ import annotations

import torch

from mega.core.config.sections import FP8_BLOCK
from mega.core.ops.fp8 import FORWARD, LIMITS, TINY

LIMIT = LIMITS[FORWARD]
WEIGHT_BLOCK = (FP8_BLOCK, FP8_BLOCK)
"""Rows and columns of a block of a weight [out, in]."""
_STEPS = 3
"""Number of mantissa bits in e4m3."""
_LOWEST = 2.0**-6
"""Smallest normal number of e4m3. Subnormal numbers have the same spacing as the numbers just above this one."""


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales for a matrix or a stack of matrices.

    >>> grid((200, 256), (128, 128)), grid((4, 8, 300), (1, 128))
    ((2, 2), (4, 8, 3))
    """
    return (*shape[:-2], *(-(-size // each) for size, each in zip(shape[-2:], block, strict=True)))


def expanded(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Expand block scales to one scale per element. scale: the block scales of a tensor with this `shape`."""
    for dim, size in ((-2, block[0]), (-1, block[1])):
        scale = scale.repeat_interleave(size, dim) if size > 1 else scale
    return scale[..., : shape[-2], : shape[-1]]


def quantise(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `narrow`, e4m3 with the shape of x, and `inverse`, the fp32 scales. x: [..., r, c], a matrix or a stack of
    matrices. Blocks in the last rows and columns may be smaller. Non-finite numbers become NaN.

    >>> narrow, inverse = quantise(torch.tensor([[1.0, -2.0, 7.0]]), (1, 2))
    >>> narrow.tolist(), (inverse * 448).round(decimals=4).tolist()
    ([[224.0, -448.0, 448.0]], [[2.0, 7.0]])
    """
    *stack, height, width = x.shape
    rows, columns = grid(tuple(x.shape), block)[-2:]
    padding = (0, columns * block[1] - width, 0, rows * block[0] - height)
    padded = torch.nn.functional.pad(x, padding) if any(padding) else x
    largest = padded.reshape(*stack, rows, block[0], columns, block[1]).abs().amax((-3, -1))
    largest = largest.bfloat16().float().clamp(min=TINY)
    limit = torch.full_like(largest, LIMIT)  # with a Python number torch multiplies by a reciprocal, rounding twice
    factor = expanded(limit / largest, tuple(x.shape), block)
    return (x.float() * factor).to(FORWARD), largest / limit


def dequantise(narrow: torch.Tensor, inverse: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return narrow * inverse, computed in fp32 and rounded once to `dtype`."""
    return (narrow.float() * expanded(inverse.float(), tuple(narrow.shape), block)).to(dtype)


def half_steps(narrow: torch.Tensor) -> torch.Tensor:
    """Return the maximum rounding error of each e4m3 element, in fp32, which is half the distance between neighbouring
    numbers.

    >>> half_steps(torch.tensor([448.0, 1.0, 0.0]).to(torch.float8_e4m3fn)).tolist()
    [16.0, 0.0625, 0.0009765625]
    """
    _, exponent = narrow.float().abs().clamp(min=_LOWEST).frexp()
    return torch.ldexp(torch.ones_like(narrow, dtype=torch.float32), exponent - _STEPS - 2)
