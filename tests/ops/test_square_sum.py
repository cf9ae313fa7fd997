"""Norms of long tensors: a sum of squares in fp32 must not depend on how many there are."""

from __future__ import annotations

import pytest
import torch

from mega.core.ops.square_sum import square_sums


def exact(flat: torch.Tensor) -> float:
    return sum(float(part.double().square().sum()) for part in flat.split(1 << 18))


@pytest.mark.parametrize("size", [1, 1023, 1024, 100_003, 10_000_019])
def test_a_gradient_norm_is_that_of_float64(size: int) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    found = square_sums([flat, flat[: size // 2]], torch.float32).sum()
    wanted = exact(flat) + exact(flat[: size // 2])
    assert abs((float(found) / wanted) ** 0.5 - 1) < 1e-7
    assert found.dtype == torch.float64


def test_dtypes_and_what_is_not_finite() -> None:
    whole = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    assert square_sums([whole, whole[:5]], torch.float32).tolist() == pytest.approx([9.0 * 4096, 45.0], rel=1e-6)
    whole[4000] = torch.inf
    assert not torch.isfinite(square_sums([whole], torch.float32)).any()
