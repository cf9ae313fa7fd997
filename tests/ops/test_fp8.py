"""fp8 products against float64, and what their scales promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega.core.ops.fp8 import BACKWARD, FORWARD, LIMITS, Fp8Matmuls, cast, multiply
from mega.core.ops.matmuls import Matmuls
from mega.core.ops.suite import REFERENCE, choose
from tests.support.ranks import random

X, WEIGHT, BIAS, GRAD = random(32, 48, seed=0), random(64, 48, seed=1), random(64, seed=2), random(32, 64, seed=3)
FP8 = Fp8Matmuls(Matmuls())


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype, step", [(FORWARD, 2**-4), (BACKWARD, 2**-3)])
def test_a_cast_rounds_to_the_nearest_number_of_its_format(dtype: torch.dtype, step: float) -> None:
    """Half a unit in the last of 3 or 2 bits; the largest magnitude is met exactly; the transpose holds the same."""
    x = X.float() * 1e-3
    found = cast(x, dtype, rows=True, columns=True)
    assert found.rows is not None and found.columns is not None
    back = found.rows.float() * found.inverse
    assert float(((back - x).abs() / x.abs().clamp(min=float(x.abs().max()) / LIMITS[dtype])).max()) <= step * 1.001
    assert float(found.rows.float().abs().max()) == LIMITS[dtype]
    assert torch.equal(found.columns.float(), found.rows.float().t())


def test_scale_follows_the_tensor() -> None:
    """A tensor a billion times as large rounds to the same bits."""
    first, second = (cast(x, FORWARD, rows=True) for x in (X.float(), X.float() * 2**30))
    assert torch.equal(first.rows.float(), second.rows.float())  # type: ignore[union-attr]
    assert float(second.inverse / first.inverse) == 2**30


def test_zeros_and_what_is_not_finite() -> None:
    zeros = cast(torch.zeros(4, 4), FORWARD, rows=True)
    assert zeros.rows is not None and not zeros.rows.float().any()
    for wrong in (float("nan"), float("inf")):
        x = torch.ones(4, 4)
        x[1, 2] = wrong
        rows = cast(x, BACKWARD, rows=True).rows
        assert rows is not None and rows.float()[1, 2].isnan()


def test_the_sum_is_that_of_float64() -> None:
    a, b = cast(GRAD.t(), BACKWARD, rows=True), cast(X.t(), FORWARD, rows=True)
    assert a.rows is not None and b.rows is not None
    exact = (a.rows.double() @ b.rows.double().t()) * (a.inverse.double() * b.inverse.double())
    assert error(multiply(a.rows, b.rows, a.inverse, b.inverse, torch.float32), exact) < 1e-6


def test_the_three_products() -> None:
    """As far from float64 as 3 and 2 bits of mantissa are, in every product; a sink gets what is added, in fp32."""
    x, weight, bias, grad = (t.bfloat16() for t in (X, WEIGHT, BIAS, GRAD))
    prepared = FP8.prepare(grad)
    assert error(FP8.forward(x, weight, bias), X @ WEIGHT.t() + BIAS) < 0.05
    assert error(FP8.dgrad(prepared, weight), GRAD @ WEIGHT) < 0.08
    exact = GRAD.t() @ X
    assert error(FP8.wgrad(prepared, x), exact) < 0.08
    main_grad = torch.ones(64, 48)
    FP8.accumulate_wgrad(main_grad, prepared, x)
    assert main_grad.dtype == torch.float32 and error(main_grad - 1, exact) < 0.08


def test_an_input_is_cast_once() -> None:
    """Both products of `operands` are those of x itself; a weight's shared cast takes the place of the weight."""
    x, weight, grad = (t.bfloat16() for t in (X, WEIGHT, GRAD))
    operands = FP8.operands(x)
    assert operands is not None and operands[1].narrow.shape == (48, 32) and operands[1].narrow.is_contiguous()
    prepared, totals = FP8.prepare(grad), [torch.ones(64, 48), torch.ones(64, 48)]
    assert torch.equal(FP8.forward(operands[0], weight), FP8.forward(x, weight))
    assert torch.equal(FP8.wgrad(prepared, operands[1]).bfloat16(), FP8.wgrad(prepared, x))
    for total, given in zip(totals, (operands[1], x), strict=True):
        FP8.accumulate_wgrad(total, prepared, given)
    assert torch.equal(*totals)
    assert replace(FP8, saves_narrow=False).operands(x) is None
    exact = FP8.forward(x, weight), FP8.dgrad(prepared, weight)
    found = FP8.cast_weight(weight, rows=True, columns=True)
    weight.shared_cast = lambda: found  # type: ignore[attr-defined]
    weight.zero_()
    assert torch.equal(FP8.forward(x, weight), exact[0]) and torch.equal(FP8.dgrad(prepared, weight), exact[1])


def test_a_cast_overwrites_an_earlier_one() -> None:
    first, second = (FP8.cast_weight(x, rows=True, columns=True) for x in (WEIGHT, 2 * WEIGHT.flip(0)))
    assert FP8.cast_weight(2 * WEIGHT.flip(0), rows=True, columns=True, into=first) is first
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(first, second, strict=True))


def test_who_multiplies_how() -> None:
    """The head keeps the compute dtype; without --fp8 nothing is cast."""
    ops = choose(torch.device("cpu"), torch.bfloat16, fp8="tensor")
    assert isinstance(ops.matmuls, Fp8Matmuls) and type(ops.matmuls.exact()) is Matmuls
    assert type(choose(torch.device("cpu"), torch.bfloat16).matmuls) is type(REFERENCE.matmuls) is Matmuls
