"""Sinusoidal positions against their formula, written out."""

from __future__ import annotations

import math

import torch

from mega.core.ops.sinusoid import sinusoid


def test_halves_of_sines_and_cosines() -> None:
    """Source: the fairseq table of width 8: frequencies 1, 10000^(-1/3), 10000^(-2/3), 1/10000."""
    found = sinusoid(torch.tensor([2, 1025]), 8, torch.float64)
    for row, position in zip(found, (2, 1025), strict=True):
        angles = [position * 10000 ** (-component / 3) for component in range(4)]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
