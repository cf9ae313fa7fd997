"""The products whose epilogues apply GELU and its slope, against float64, in a recorded graph, and when refused."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional as F

from mega.core.ops import cublaslt_gelu
from mega.core.ops.matmuls import Matmuls, WideMatmuls
from tests.support.triton import CUDA, DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="cuBLASLt needs a CUDA device")]
DTYPES = torch.bfloat16, torch.float16
# The row with 32,768 is one for which the heuristics may propose a single algorithm, so it is computed in halves.
SHAPES = (16, 8, 24), (300, 64, 136), (1000, 96, 384), (513, 768, 3072), (4096, 1024, 4096), (32768, 1024, 4096)


def operands(rows: int, width: int, wide: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    grad, before = (torch.randn(rows, n, device=DEVICE).to(dtype) for n in (width, wide))
    return grad, (torch.randn(width, wide, device=DEVICE) / width**0.5).to(dtype), before


def exact(grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    leaf = before.double().requires_grad_()
    (found,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad.double() @ weight.double())
    return found


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Less off than the plain product and slope, which round twice."""
    given = operands(*shape, dtype)
    found, true = cublaslt_gelu.slope_dgrad(*given), exact(*given)
    plain = Matmuls().slope_dgrad(*given, cublaslt_gelu.KIND)
    assert found is not None
    assert error(found, true) <= 1.05 * error(plain, true)
    assert torch.equal(found, cublaslt_gelu.slope_dgrad(*given))  # type: ignore[arg-type]  # bitwise the same again


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The sum is as near as the plain product's; GELU is nearer than that of a rounded sum."""
    x, weight, _ = operands(*shape, dtype)
    weight, bias = weight.t().contiguous(), torch.randn(shape[2], device=DEVICE).to(dtype)
    true = F.linear(x.double(), weight.double(), bias.double())
    found, plain = cublaslt_gelu.forward(x, weight, bias), F.linear(x, weight, bias)
    assert found is not None
    before, active = found
    assert error(before, true) <= 1.05 * error(plain, true)
    gelu = F.gelu(true, approximate="tanh")
    assert error(active, gelu) <= 1.05 * error(F.gelu(plain, approximate="tanh"), gelu)
    for output, again in zip(found, cublaslt_gelu.forward(x, weight, bias) or (), strict=True):
        assert torch.equal(output, again)


def test_operands_that_are_views() -> None:
    grad, weight, before = operands(64, 32, 48, torch.bfloat16)
    wide = torch.cat([before, before], 1)
    found = cublaslt_gelu.slope_dgrad(grad.t().contiguous().t(), weight, wide[:, 48:])
    assert torch.equal(found, cublaslt_gelu.slope_dgrad(grad, weight, before))  # type: ignore[arg-type]


def test_in_a_recorded_graph_of_other_values() -> None:
    given = operands(512, 256, 1024, torch.bfloat16)
    bias = torch.randn(256, device=DEVICE).to(torch.bfloat16)
    cublaslt_gelu.slope_dgrad(*given)  # plans
    cublaslt_gelu.forward(given[2], given[1], bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cublaslt_gelu.slope_dgrad(*given)
        outputs = cublaslt_gelu.forward(given[2], given[1], bias)
    other = operands(512, 256, 1024, torch.bfloat16)
    for mine, theirs in zip(given, other, strict=True):
        mine.copy_(theirs * 2)
    graph.replay()
    expected = cublaslt_gelu.slope_dgrad(*(x * 2 for x in other))
    assert found is not None and torch.equal(found, expected)  # type: ignore[arg-type]
    again = cublaslt_gelu.forward(given[2], given[1], bias)
    assert outputs is not None and again is not None and all(map(torch.equal, outputs, again))


def test_the_trial_is_passed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for dtype in DTYPES:
            assert cublaslt_gelu.trusted(torch.device("cuda", 0), dtype)
    assert not caplog.records


def test_a_shape_without_a_plan_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt_gelu, "_gemm_of", lambda *_: None)
    given = operands(64, 32, 48, torch.bfloat16)
    assert cublaslt_gelu.slope_dgrad(*given) is None
    assert cublaslt_gelu.forward(given[2], given[1], given[0][0]) is None
    assert error(WideMatmuls().slope_dgrad(*given, cublaslt_gelu.KIND), exact(*given)) < 0.01
