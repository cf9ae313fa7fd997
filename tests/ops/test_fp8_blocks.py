"""fp8 products with scales of blocks against float64, and that no cut changes what is rounded."""

from __future__ import annotations

import pytest
import torch

from mega.core.ops.fp8 import Fp8Matmuls
from mega.core.ops.fp8_blocks import BlockCast, BlockMatmuls, cast_blocks, cast_rows, multiply
from mega.core.ops.matmuls import Matmuls
from mega.core.ops.operand import Operand
from mega.core.ops.suite import choose
from tests.support.ranks import random

X, WEIGHT, BIAS, GRAD = (
    random(256, 384, seed=0),
    random(512, 384, seed=1),
    random(512, seed=2),
    random(256, 512, seed=3),
)
BLOCKS = BlockMatmuls(Matmuls())


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def of(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def wide(operand: Operand | None, height: int) -> torch.Tensor:
    """What an operand stands for, by plain arithmetic. height: rows of a block."""
    narrow, inverse = of(operand)
    whole = inverse.double().repeat_interleave(height, 0).repeat_interleave(128, 1)
    return narrow.double() * whole[: narrow.shape[0], : narrow.shape[1]]


def test_casts_keep_what_they_are_given() -> None:
    """Within half a step of the largest number of each block, and the transpose of a weight holds the same numbers."""
    x, weight = X.bfloat16(), WEIGHT.bfloat16()
    rows, blocks = cast_rows(x, rows=True, columns=True), cast_blocks(weight, rows=True, columns=True)
    for found, exact in (
        (wide(rows.rows, 1), x),
        (wide(rows.columns, 1).t(), x),
        (wide(blocks.rows, 128), weight),
        (wide(blocks.columns, 128).t(), weight),
    ):
        assert (
            float((found - exact.double()).abs().max()) <= float(exact.abs().max()) / 27 and error(found, exact) < 0.03
        )
    assert torch.equal(wide(blocks.rows, 128), wide(blocks.columns, 128).t())
    assert of(rows.rows).inverse.shape == (256, 3) and of(rows.columns).inverse.shape == (384, 2)
    assert of(blocks.rows).inverse.shape == (4, 3) and of(blocks.columns).inverse.shape == (3, 4)


@pytest.mark.parametrize(("start", "size"), [((0, 128), (128, 256)), ((128, 0), (128, 384)), ((128, 256), (128, 128))])
def test_a_part_is_cast_as_in_the_whole(start: tuple[int, int], size: tuple[int, int]) -> None:
    """Of tokens, as microbatches and context ranks cut them, and of features, as tensor ranks do."""
    rows, columns = (slice(a, a + n) for a, n in zip(start, size, strict=True))
    for cast, height in ((cast_rows, 1), (cast_blocks, 128)):
        whole, part = (cast(each, rows=True, columns=True) for each in (X.bfloat16(), X.bfloat16()[rows, columns]))
        assert isinstance(part, BlockCast)
        assert torch.equal(wide(part.rows, height), wide(whole.rows, height)[rows, columns])
        assert torch.equal(wide(part.columns, height), wide(whole.columns, height)[columns, rows])


def test_the_sum_is_that_of_float64() -> None:
    a = of(cast_rows(X, rows=True).rows)
    for b, height in ((of(cast_blocks(WEIGHT, rows=True).rows), 128), (of(cast_rows(WEIGHT, rows=True).rows), 1)):
        exact = wide(a, 1) @ wide(b, height).t()
        assert error(multiply(a, b, torch.float32, blocks=height == 128), exact) < 1e-6
        with_bias = multiply(a, b, torch.float32, BIAS.float(), blocks=height == 128)
        assert error(with_bias, exact + BIAS.float().double()) < 1e-6


def test_the_three_products() -> None:
    """As far from float64 as 3 bits of mantissa are, in every product; a sink gets what is added, in fp32."""
    x, weight, bias, grad = (t.bfloat16() for t in (X, WEIGHT, BIAS, GRAD))
    prepared = BLOCKS.prepare(grad)
    assert error(BLOCKS.forward(x, weight, bias), X @ WEIGHT.t() + BIAS) < 0.04
    assert error(BLOCKS.dgrad(prepared, weight), GRAD @ WEIGHT) < 0.04
    exact = GRAD.t() @ X
    assert error(BLOCKS.wgrad(prepared, x), exact) < 0.04
    main_grad = torch.ones(512, 384)
    BLOCKS.accumulate_wgrad(main_grad, prepared, x)
    assert main_grad.dtype == torch.float32 and error(main_grad - 1, exact) < 0.04


def test_outliers_take_nothing_from_other_blocks() -> None:
    """A number 3,000,000 times as large as the others, in one token and one feature of the input and the gradient."""
    x, grad = X.clone(), GRAD.clone()
    x[7, 5], grad[9, 3] = 3e6, 3e6
    others, features = torch.arange(256) != 7, torch.arange(512) >= 128
    for matmuls, bounds in ((BLOCKS, (0.0, 0.05)), (Fp8Matmuls(Matmuls()), (0.055, 9.0))):
        y = matmuls.forward(x.bfloat16(), WEIGHT.bfloat16())
        gradient = matmuls.wgrad(matmuls.prepare(grad.bfloat16()), X.bfloat16())
        for found, exact in ((y[others], (X @ WEIGHT.t())[others]), (gradient[features], (GRAD.t() @ X)[features])):
            assert bounds[0] <= error(found, exact) < bounds[1]


def test_an_input_is_cast_once() -> None:
    """Both products of `operands` are those of x itself, and a cast may overwrite an earlier one."""
    x, weight, prepared = X.bfloat16(), WEIGHT.bfloat16(), BLOCKS.prepare(GRAD.bfloat16())
    operands = BLOCKS.operands(x)
    assert operands is not None and torch.equal(BLOCKS.forward(operands[0], weight), BLOCKS.forward(x, weight))
    assert torch.equal(BLOCKS.wgrad(prepared, operands[1]).bfloat16(), BLOCKS.wgrad(prepared, x))
    first, second = (cast_blocks(each, rows=True, columns=True) for each in (weight, -2 * weight.flip(0)))
    assert cast_blocks(-2 * weight.flip(0), rows=True, columns=True, into=first) is first
    for one, other in zip(first, second, strict=True):
        assert torch.equal(of(one).narrow.float(), of(other).narrow.float())
        assert torch.equal(of(one).inverse, of(other).inverse)


def test_who_multiplies_how() -> None:
    """The head keeps the compute dtype."""
    ops = choose(torch.device("cpu"), torch.bfloat16, fp8="block")
    assert isinstance(ops.matmuls, BlockMatmuls) and type(ops.matmuls.exact()) is Matmuls
    assert ops.matmuls.words == "fp8 in blocks, emulated"
