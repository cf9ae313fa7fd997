"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.architecture.layer import Rope, RopeScaling
from mega.core.ops.rotary import rotary_table, rotate
from tests.support.ranks import random

POSITIONS = torch.tensor([0, 1, 2, 500, 4095])
X = random(5, 3, 16, seed=0)


def by_complex_numbers(x: torch.Tensor, width: int, base: float, interpolation: float) -> torch.Tensor:
    """Components i and i + width/2 are real and imaginary part of one number that turns."""
    half = width // 2
    numbers = torch.complex(x[..., :half], x[..., half:width])
    angle = POSITIONS.double()[:, None] / interpolation * base ** (-torch.arange(half).double() / half)
    turned = numbers * torch.polar(torch.ones_like(angle), angle)[:, None, :]
    return torch.cat([turned.real, turned.imag, x[..., width:]], dim=-1)


@pytest.mark.parametrize(("width", "base", "interpolation"), [(16, 1e4, 1.0), (8, 1e4, 1.0), (16, 5e5, 4.0)])
def test_rotation(width: int, base: float, interpolation: float) -> None:
    table = rotary_table(POSITIONS, Rope(base=base, width=width, interpolation=interpolation), torch.float64)
    expected = by_complex_numbers(X, width, base, interpolation)
    torch.testing.assert_close(rotate(X, *table), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_computed_in_float64(dtype: torch.dtype) -> None:
    """At position 4095 an fp32 angle is off by 1e-4; the table is not."""
    cos, sin = rotary_table(POSITIONS, Rope(base=1e4, width=16), dtype)
    assert cos.dtype == torch.float32
    angle = POSITIONS.double()[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
    torch.testing.assert_close((cos.double(), sin.double()), (angle.cos(), angle.sin()), rtol=1e-6, atol=1e-7)


def test_products_depend_on_the_distance_alone() -> None:
    """q at m times k at n is a function of m - n (Su et al. 2021, equation 16)."""
    q, k = random(1, 1, 16, seed=1), random(1, 1, 16, seed=2)
    near, far = torch.tensor([3, 10]), torch.tensor([1003, 1010])
    products = []
    for positions in (near, far):
        cos, sin = rotary_table(positions, Rope(base=1e4, width=16), torch.float64)
        products.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum())
    torch.testing.assert_close(products[0], products[1], rtol=1e-10, atol=1e-10)


def test_scaled_frequencies_of_llama3() -> None:
    """Against the rule by wavelengths, as Meta and transformers write it: kept, divided, or between the two."""
    factor, low, high, original, base, width = 8.0, 1.0, 4.0, 8192, 5e5, 128
    expected = []
    for component in range(width // 2):
        frequency = base ** (-2 * component / width)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    rope = Rope(base=base, width=width, scaling=RopeScaling(factor, low, high, original))
    cos, sin = rotary_table(torch.tensor([1]), rope, torch.float64)
    torch.testing.assert_close(
        torch.atan2(sin, cos)[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    assert len({round(e * base ** (2 * i / width), 6) for i, e in enumerate(expected)}) > 5
