"""Products of rows by the matrices of their experts on a device, against float64: forward, both gradients, experts that
no row chose among them."""

from __future__ import annotations

import pytest
import torch

from mega.core.ops.grouped import GroupedMatmuls, GroupedRows, fast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNTS = {"even": [64] * 8, "uneven": [0, 500, 3, 1, 0, 129, 16, 0], "one": [0, 0, 7, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(256, 512), (512, 1000), (64, 1004)], ids=str)
def test_grouped_products(counts: list[int], shape: tuple[int, int]) -> None:
    """Within four roundings of bf16 of the largest value."""
    columns, out = shape
    experts, rows, generator = len(counts), sum(counts), torch.Generator("cuda").manual_seed(1)
    x, weight, grad = (
        torch.randn(*size, device="cuda", generator=generator).bfloat16()
        for size in ((rows, columns), (experts * out, columns), (rows, out))
    )
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    matmuls, given = GroupedMatmuls(), GroupedRows(grad, ends)
    assert fast(x, weight.unflatten(0, (experts, -1))) == (out % 8 == 0)
    main = torch.zeros(experts * out, columns, device="cuda")
    matmuls.accumulate_wgrad(main, given, x)
    y, dx = matmuls.grouped(x, weight, ends), matmuls.grouped_dgrad(given, weight)

    begin = 0
    for expert, count in enumerate(counts):
        here, own = slice(begin, begin + count), slice(expert * out, (expert + 1) * out)
        matrix, part, back = weight[own].double(), x[here].double(), grad[here].double()
        close(y[here], part @ matrix.t())
        close(dx[here], back @ matrix)
        close(main[own], back.t() @ part)
        begin += count


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.numel():
        bound = 4 * 2.0**-8 * max(float(expected.abs().max()), 1e-9)
        assert float((found.double() - expected).abs().max()) <= bound
