"""Sums in one exchange: which tensors they take, and that ranks take the same path where they fail on one of them.

torch's operation needs several GPUs (tests/gpu/test_one_shot.py); here stand-ins take its place.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.parallel import one_shot
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.parallel.mesh import SINGLE, Axis, Groups, Mesh
from mega.core.parallel.one_shot import ALIGNMENT, HostSum, Sum, by_size, exchange_over, takes, verified
from mega.core.parallel.shared_memory import SharedMemory
from mega.core.processes.pool import Pool
from tests.support.triton import needs_kernels

CPU = torch.device("cpu")
LIMIT = 1 << 18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_tensors_of_the_dtype_are_taken(dtype: torch.dtype) -> None:
    def of(size: int) -> torch.Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype)

    assert all(takes(of(size), dtype, LIMIT) for size in (ALIGNMENT, 8192, LIMIT))
    assert takes(of(LIMIT).view(4, -1), dtype, LIMIT)
    for other in (of(LIMIT + ALIGNMENT), of(ALIGNMENT + 4), of(64).view(4, -1).t(), of(64)[8:], of(64).half()):
        assert not takes(other, dtype, LIMIT)


class StandIn:
    """Adds up in the order of ranks, as torch's operation does. wrong: this rank adds that to its result."""

    def __init__(self, axis: Axis, wrong: float = 0.0):
        self.axis, self.wrong, self.sizes = axis, wrong, list[int]()

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self.sizes.append(x.nbytes)
        parts = all_gather(x[None], self.axis)
        total = sum(parts[1:], start=parts[0]) + self.wrong
        (x if into is None else into).copy_(total if into is None else into + total)


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
        summed = by_size(axis, verified(axis, CPU, torch.float32, open_small, LIMIT), torch.float32, LIMIT)
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


def on_this_host(groups: Groups, rank: int, size: int, dtype: torch.dtype) -> None:
    """Sums of many sizes one after the other, ranks late at random, are those in the order of ranks, to the bit."""
    axis, late = Mesh(rank, tp=size, groups=groups).tp, random.Random(rank)
    summed = HostSum(axis, dtype, LIMIT)
    drawn = [torch.Generator().manual_seed(each) for each in range(size)]
    for turn in range(200):
        count = (5, 64, 4096, LIMIT + 3)[turn % 4]  # the last one takes several pieces
        parts = [torch.randn(count, generator=each).to(dtype) for each in drawn]
        if late.random() < 0.05:
            time.sleep(late.random() * 0.01)
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        x, into = parts[rank].clone(), torch.ones(count, dtype=dtype)
        if turn % 3:
            summed(x)
            assert torch.equal(x, expected)
        else:
            summed(x, into)
            assert torch.equal(into, 1 + expected)
        assert torch.equal(summed.gather(parts[rank].view(1, -1)), torch.stack(parts)[:, None])


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_ranks_of_one_host_add_up_through_its_memory(pool: Pool, size: int, dtype: torch.dtype) -> None:
    pool.run(on_this_host, size, dtype, world=size)


def waits_for_one_that_ends(groups: Groups, rank: int) -> str:
    memory = SharedMemory(Mesh(rank, tp=2, groups=groups).tp, 64, CPU)
    if rank == 1:
        memory.processes[0] = 0  # no process has this number
        with (
            pytest.raises(RuntimeError, match="Timed out waiting 0 s for rank 0"),
            mock.patch("mega.core.parallel.shared_memory.is_dead", lambda _: False),
        ):
            memory.wait(0, 1, 0.3)
    try:
        memory.wait(0, 1) if rank else None
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_ends_is_named(pool: Pool) -> None:
    assert pool.run(waits_for_one_that_ends, world=2)[1] == "Connection closed by peer: rank 0 has ended"


@needs_kernels
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_kernel_adds_up_what_others_have_written(ranks: int) -> None:
    """In the place of the other devices their parts and marks are written before."""
    from mega.core.ops.kernels.mapped_sum import LANES, mapped_sum, memory_bytes

    limit, rank = 1 << 19, 1
    places, whole = memory_bytes(ranks, limit)
    memories = [torch.zeros(whole, dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    counts, lane = torch.zeros(LANES, dtype=torch.int64), limit // LANES // 4
    for number, size in enumerate((4, 1024, 3000, 131072), start=1):
        parts = torch.randn(ranks, size)
        share = 1024 if size % 1024 == 0 else -(-size // 16) * 16 if size < 1024 else 1008
        place = memories[rank][:places].view(torch.float32).view(2, ranks, LANES, lane)[number % 2]
        marks = [memory[places:].view(torch.int64).view(ranks, LANES) for memory in memories]
        expected = torch.zeros(size)
        for other in range(ranks):
            expected = expected + parts[other]
            if other != rank:
                for at, piece in enumerate(parts[other].split(share)):
                    place[other, at, : len(piece)] = piece
                marks[rank][other, : -(-size // share)] = 10
        counts[:] = number - 1
        x, into = parts[rank].clone(), torch.ones(size) if number % 2 else None
        mapped_sum(x, into, addresses, counts, rank, limit)
        torch.testing.assert_close(x if into is None else into - 1, expected)
        for other in range(ranks):
            if other != rank:
                there = memories[other][:places].view(torch.float32).view(2, ranks, LANES, lane)[number % 2, rank]
                assert torch.equal(there[:, :share].flatten()[:size], parts[rank])
                assert marks[other][rank, : -(-size // share)].eq(number).all()


def by_gloo(groups: Groups, rank: int) -> None:
    axis = Mesh(rank, tp=2, groups=groups).tp
    with mock.patch.object(one_shot, "verified", side_effect=AssertionError):
        # Ranks on devices may be on gloo, too.
        exchange = exchange_over(axis, torch.device("cuda", 0), torch.float32)
    x = torch.full((4,), float(rank))
    assert exchange.gather(x).tolist() == [[0.0] * 4, [1.0] * 4]
    exchange.sum(x)
    assert x.tolist() == [1.0] * 4


def test_ranks_on_gloo_use_their_group(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.run(by_gloo, world=2)
    with caplog.at_level(logging.WARNING), mock.patch.object(one_shot, "verified", side_effect=AssertionError):
        exchange_over(SINGLE, torch.device("cuda", 0), torch.float32)
    assert not caplog.text
