"""The forms in which GEMMs take the input of a linear layer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Operand(NamedTuple):
    """An operand [r, k] of a GEMM that sums over k, in fp8."""

    narrow: torch.Tensor  # [r, k], contiguous
    inverse: torch.Tensor  # fp32: a scalar, or the scales of blocks


Input = torch.Tensor | Operand
"""The input x of a linear layer: x [n, in], or an operand into which x was converted."""
