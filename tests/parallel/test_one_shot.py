"""Sums in one exchange: which tensors they take, and that ranks take the same path where they fail on one of them.

torch's operation needs several GPUs (tests/gpu/test_one_shot.py); here stand-ins take its place.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.parallel import one_shot
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.parallel.launch import Pool
from mega.core.parallel.mesh import SINGLE, Axis, Groups, Mesh
from mega.core.parallel.one_shot import ALIGNMENT, LIMIT, Sum, sum_over, takes, tried

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_tensors_of_the_dtype_are_taken(dtype: torch.dtype) -> None:
    def of(size: int) -> torch.Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype)

    assert all(takes(of(size), dtype) for size in (ALIGNMENT, 8192, LIMIT))
    assert takes(of(LIMIT).view(4, -1), dtype)
    for other in (of(LIMIT + ALIGNMENT), of(ALIGNMENT + 4), of(64).view(4, -1).t(), of(64)[8:], of(64).half()):
        assert not takes(other, dtype)


class StandIn:
    """Adds up in the order of ranks, as torch's operation does. wrong: this rank adds that to its result."""

    def __init__(self, axis: Axis, wrong: float = 0.0):
        self.axis, self.wrong, self.sizes = axis, wrong, list[int]()

    def __call__(self, x: torch.Tensor) -> None:
        self.sizes.append(x.nbytes)
        parts = all_gather(x[None], self.axis)
        x.copy_(sum(parts[1:], start=parts[0]) + self.wrong)


def used(groups: Groups, rank: int, size: int, fails: str) -> tuple[bool, list[str]]:
    """Whether this rank's small tensors are added up in one exchange, and what it reports. fails: on the last rank."""
    axis, last, lines = Mesh(rank, tp=size, groups=groups).tp, rank == size - 1, list[str]()
    stand_in = StandIn(axis, 1.0 if fails == "everywhere" or (fails == "wrong" and last) else 0.0)

    def open_small() -> Sum:
        if fails == "memory" and last:
            raise RuntimeError("no peer access\nC++ frames")
        return stand_in

    def note(text: str, *values: Any) -> None:
        lines.append(text % values)

    host = "elsewhere" if fails == "host" and last else "here"
    with mock.patch("socket.gethostname", lambda: host), mock.patch.object(one_shot.log, "warning", note):
        summed = tried(axis, CPU, torch.float32, open_small)
    stand_in.sizes.clear()
    for count in (4, 5, LIMIT // 4, LIMIT):
        x = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        expected = x.clone()
        all_reduce(expected, axis)
        summed(x)
        torch.testing.assert_close(x, expected)
    assert stand_in.sizes in ([], [16, LIMIT])
    return bool(stand_in.sizes), lines


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("", None),
        ("host", "the ranks are on several hosts"),
        ("memory", "no peer access"),
        ("wrong", "ranks find different sums"),
        ("everywhere", "off by "),
    ],
)
def test_ranks_agree_where_one_cannot(pool: Pool, size: int, fails: str, why: str | None) -> None:
    found = pool.run(used, size, fails, world=size)
    assert [taken for taken, _ in found] == [why is None] * size
    (first, *others) = [lines for _, lines in found]
    assert not any(others) and len(first) == (why is not None) and all(f"({why}" in line for line in first)


def by_gloo(groups: Groups, rank: int) -> None:
    axis = Mesh(rank, tp=2, groups=groups).tp
    with mock.patch.object(one_shot, "tried", side_effect=AssertionError):
        summed = sum_over(axis, CPU, torch.float32)
        # Ranks on devices may be on gloo, too.
        sum_over(axis, torch.device("cuda", 0), torch.float32)
    x = torch.full((4,), float(rank))
    summed(x)
    assert x.tolist() == [1.0] * 4


def test_ranks_on_gloo_use_their_group(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.run(by_gloo, world=2)
    with caplog.at_level(logging.WARNING), mock.patch.object(one_shot, "tried", side_effect=AssertionError):
        sum_over(SINGLE, torch.device("cuda", 0), torch.float32)
    assert not caplog.text
