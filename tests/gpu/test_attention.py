"""The attention kernels against the plain form in float64, under masks drawn at random, and their dropout bit by bit.

On a CUDA device; without one, a few small cases where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from mega.core.model.forward import padding_documents
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PartialAttention
from tests.support.attention_cases import check_kept, check_values, on_device, share_of_bound
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_some_columns_in_any_order(dtype: torch.dtype) -> None:
    """As in the last layer of BERT: the documents and dropout keys of queries are those of their columns."""
    b, t, s, heads, width = (4, 500, 140, 3, 64) if CUDA else (2, 90, 70, 2, 16)
    torch.manual_seed(0)
    columns = torch.stack([torch.randperm(t)[:s] for _ in range(b)])
    documents = padding_documents(torch.tensor([t, t - 20, t // 2, 7][:b]), t)
    keys = token_keys(3, torch.arange(b), torch.arange(t)).gather(1, columns)
    drop = AttentionDropout(keys, site_key(1, "attention"), 0, (range(t),), 0.1)
    mask = AttentionMask("full", None, documents.gather(1, columns), documents, dropout=drop, covered=True)
    shapes = (s, heads), (t, heads), (t, heads), (s, heads)
    q, k, v, grad = (torch.randn(b, length, n, width, device=DEVICE).to(dtype) for length, n in shapes)
    share_of_bound(kernels(), dtype, (q, k, v, grad), on_device(mask, DEVICE))


def test_dropout_over_two_runs_of_columns() -> None:
    check_kept(kernels(), 0, 256 if CUDA else 140, DTYPES[0], DEVICE, runs=True)
