"""The attention kernels against the plain form in float64, under masks drawn at random, and their dropout bit by bit.

On a CUDA device; without one, a few small cases where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from mega.core.ops.partial_attention import PartialAttention
from tests.support.attention_cases import check_kept, check_values
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [
    pytest.mark.gpu,
    needs_kernels,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # the interpreter's, of a row without a key
]
LONGEST, WIDTHS = (500, [32, 64, 80, 96, 128, 256]) if CUDA else (100, [16, 20, 32])
CASES = int(os.environ.get("MEGA_CASES", "60" if CUDA else "2"))
# The interpreter truncates to bf16; in fp32 it shows what rounding to 16 bits would hide.
DTYPES = (torch.bfloat16, torch.float16) if CUDA else (torch.float16, torch.float32)


def kernels() -> PartialAttention:
    from mega.core.ops.kernels import attention

    return PartialAttention(attention.forward, attention.backward)


@pytest.mark.parametrize("seed", range(CASES))
def test_every_mask(seed: int) -> None:
    check_values(kernels(), seed, LONGEST, WIDTHS, DTYPES[seed % 2], DEVICE)


@pytest.mark.parametrize("seed", range(CASES))
def test_dropout_is_that_of_a_cpu_bit_by_bit(seed: int) -> None:
    check_kept(kernels(), seed, 256 if CUDA else 80, DTYPES[seed % 2], DEVICE)


def test_dropout_over_two_runs_of_columns() -> None:
    check_kept(kernels(), 0, 256 if CUDA else 140, DTYPES[0], DEVICE, runs=True)
