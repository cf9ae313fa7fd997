"""fp8 products that are written or added to an fp32 tensor, against torch's product and a sum of its own."""

from __future__ import annotations

import logging

import pytest
import torch

from mega.core.device import block_scaled_matmuls
from mega.core.ops import cublaslt_fp8
from mega.core.ops.fp8 import BACKWARD, FORWARD
from mega.core.ops.operand import Operand
from tests.support.triton import CUDA, DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="cuBLASLt needs a CUDA device")]
SHAPES = (64, 96, 128), (4096, 4096, 8192), (1024, 11008, 2048), (400, 208, 384)


def factors(m: int, n: int, k: int, blocks: bool) -> tuple[Operand, Operand]:
    from mega.core.ops.kernels import fp8, fp8_blocks

    torch.manual_seed(m)
    grad, x = (torch.randn(k, rows, device=DEVICE).bfloat16() for rows in (m, n))
    if blocks:
        a, b = (fp8_blocks.cast_rows(each, columns=True).columns for each in (grad, x))
        assert a is not None and b is not None
        return a, b
    return fp8.cast(grad, BACKWARD, columns=True).by_columns, fp8.cast(x, FORWARD, columns=True).by_columns


def product(a: Operand, b: Operand, blocks: bool) -> torch.Tensor:
    from mega.core.ops.kernels import fp8, fp8_blocks

    if blocks:
        return fp8_blocks.multiply(a, b, torch.float32, blocks=False)
    return fp8.multiply(a.narrow, b.narrow, a.inverse, b.inverse, torch.float32)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_a_product_and_a_sum(shape: tuple[int, int, int], blocks: bool) -> None:
    if blocks and not block_scaled_matmuls(torch.device(DEVICE)):
        pytest.skip("cuBLAS on Hopper only")
    a, b = factors(*shape, blocks)
    plain, total = product(a, b, blocks), torch.full(shape[:2], torch.nan, device=DEVICE)
    assert cublaslt_fp8.accumulate(total, a, b, overwrite=True) and torch.equal(total, plain)
    start = torch.randn_like(total)
    total.copy_(start)
    assert cublaslt_fp8.accumulate(total, a, b, overwrite=False)
    torch.testing.assert_close(total, start + plain, rtol=1e-6, atol=1e-4)
    graph, again = torch.cuda.CUDAGraph(), start.clone()
    with torch.cuda.graph(graph):
        cublaslt_fp8.accumulate(again, a, b, overwrite=False)
    graph.replay()
    assert torch.equal(again, total)


@pytest.mark.parametrize("n, k", [(4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008)])
@pytest.mark.parametrize("m", [8192, 20000])
def test_the_bits_of_torch(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large forward GEMM has a tile that needs less power, and torch's bits."""
    from mega.core.ops.kernels import fp8

    torch.manual_seed(n)
    x, weight = (
        fp8.cast(torch.randn(rows, k, device=DEVICE).bfloat16(), FORWARD, rows=True).by_rows for rows in (m, n)
    )
    found = cublaslt_fp8.multiply(x, weight, torch.bfloat16)
    assert found is not None
    monkeypatch.setattr(cublaslt_fp8, "LARGE", m * n * k + 1)
    plain = fp8.multiply(x.narrow, weight.narrow, x.inverse, weight.inverse, torch.bfloat16, fast=True)
    assert torch.equal(found, plain)


def test_what_is_refused() -> None:
    """A tensor that does not begin where the heuristics suppose, or that is not dense, or not in fp32, is untouched."""
    a, b = factors(64, 96, 128, blocks=False)
    odd = torch.zeros(64 * 96 + 1, device=DEVICE)[1:].view(64, 96)
    for total in (odd, torch.zeros(96, 64, device=DEVICE).t(), torch.zeros(64, 96, device=DEVICE).double()):
        assert not cublaslt_fp8.accumulate(total, a, b, overwrite=True) and not total.any()


def test_without_trust(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cublaslt_fp8, "_trial_error", lambda *_: 1.0)
    with caplog.at_level(logging.WARNING):
        assert not cublaslt_fp8._trusted.__wrapped__(torch.device(DEVICE), FORWARD, False)
    assert "cuBLASLt's GEMMs" in caplog.text
