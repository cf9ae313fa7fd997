"""A pool's groups share one gloo device, and compute what groups of their own devices compute."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist

from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool


def io_threads() -> int:
    """The threads of this process that wait for gloo's sockets."""
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo_tcp") for name in names)


def many_groups(groups: Groups, rank: int) -> tuple[int, int, bool]:
    """Job: threads before and after groups of all subsets of ranks, and whether sums in both kinds are equal."""
    before, same = io_threads(), True
    for size in (2, 3, 4):
        parts = list(itertools.combinations(range(4), size))
        groups.create(parts, "shared", "gloo")
        for ranks in parts:
            group = groups.get(ranks, "shared")
            if rank not in ranks or group is None:
                continue
            x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
            shared, world = x.clone(), [torch.empty_like(x) for _ in ranks]
            dist.all_reduce(shared, group=group)
            dist.all_gather(world, x, group=group)
            scattered = torch.empty(500)
            if size == 2:
                dist.reduce_scatter_tensor(scattered, x, group=group)
                half = slice(500 * ranks.index(rank), 500 * ranks.index(rank) + 500)
                same &= torch.equal(scattered, shared[half])
            same &= torch.allclose(shared, torch.stack(world).sum(0), rtol=1e-6, atol=1e-6)
    return before, io_threads(), same


def test_groups_of_a_pool_share_one_device() -> None:
    """Eleven groups add one thread to that of the world's group; when they exist, a job adds none."""
    with Pool(4) as pool:
        first = pool.run(many_groups)
        again = pool.run(many_groups)
    assert all(same for _, _, same in (*first, *again))
    if os.path.exists("/proc/self/task"):
        assert {after - before for before, after, _ in first} == {1}, first
        assert {after - before for before, after, _ in again} == {0}, again
