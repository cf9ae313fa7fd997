"""Exchanges beside products: tokens and sums arrive as by the group's own collectives, two exchanges under way."""

from __future__ import annotations

import pytest
import torch

from mega.core.parallel.collectives import all_gather, reduce_scatter
from mega.core.parallel.launch import Pool
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.peers import FULL, Gather, Scatter, peers

CPU = torch.device("cpu")


def exchanges(groups: Groups, rank: int, size: int, rows: int) -> None:
    axis = Mesh(rank, tp=size, groups=groups).tp
    through = peers(axis, CPU)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, full = (torch.randn(count, 3, generator=generator) for count in (rows, rows * size))
        gathered, scattered = all_gather(x, axis), reduce_scatter(full, axis)
        gather, scatter = Gather(x, through), Scatter(rows, 3, x, through)
        parts = dict.fromkeys(range(rows * size), 0)
        for where, part in gather.parts():
            assert torch.equal(part, gathered[where])
            parts.update(dict.fromkeys(range(where.start, where.stop), 1))
        assert all(parts.values())
        for where, out in scatter.parts():
            out.copy_(full[where])
        assert torch.equal(gather.whole(), gathered)
        torch.testing.assert_close(scatter.blocks().sum(0), scattered)
        kept = Gather(x, through).whole(keep=True)
        assert torch.equal(kept, gathered)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [1, FULL // 2, FULL])
def test_exchanges(pool: Pool, size: int, rows: int) -> None:
    pool.run(exchanges, size, rows, world=size)
