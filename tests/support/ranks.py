"""What jobs of tests need on their ranks: a mesh, and whole float64 tensors cut as in the inventory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mega.core.parallel.weight import ParameterFactory, Weight

CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> torch.Tensor:
    """The same float64 tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maker(index: int = 0, size: int = 1, dtype: torch.dtype = torch.float64) -> ParameterFactory:
    """Makes the weights of one tensor rank."""
    return ParameterFactory({"tp": (index, size)}, dtype, CPU)


def fill(weight: Weight, wholes: Mapping[str, torch.Tensor]) -> None:
    """Set a rank's weight from the whole tensors by logical name; padding is not a number, so that its use shows."""
    with torch.no_grad():
        weight.fill_(torch.nan)
        for segment in weight.segments:
            segment.real(weight).copy_(_cut(wholes[segment.shard.name], segment.shard.start, segment.shard.size))


def assert_own_part(weight: Weight, local: torch.Tensor | None, wholes: Mapping[str, torch.Tensor | None]) -> None:
    """`local`, shaped like `weight`, is this rank's part of the whole tensors within 1e-12."""
    assert local is not None
    for segment in weight.segments:
        whole = wholes[segment.shard.name]
        assert whole is not None
        expected = _cut(whole, segment.shard.start, segment.shard.size)
        torch.testing.assert_close(segment.real(local), expected, rtol=1e-12, atol=1e-12)


def _cut(whole: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole
