"""How fast a layout of more tensor ranks than there are devices would be: two devices play two of its ranks.

    torchrun --nproc-per-node 2 -m tests.gpu.imitate --out rows.jsonl [--row w3] [--world 8] [--full 256 512 1024]

Each device holds one rank's weights of all `--world` and makes that rank's products. Blocks for the other ranks all go
to the one peer, which takes them for blocks of the ranks whose turn it is: as many bytes leave and come by the same
link, in the same order, and are waited for at the same places. (A switch gives each pair of devices the whole link of
both, so that one peer is as fast as seven.) The few collectives beside the blocks' exchanges, of the embedding and the
loss, run among two. So the time is that of the layout; the loss is nobody's.

Where the layout has two ranks nothing is imitated, and the row is `mega bench`'s. --full: other sizes of a product's
pieces (parallel/peers.py), a row each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mega.core.bench.rows import row
from mega.core.bench.training import format_speed, measure
from mega.core.config.resolve import resolve
from mega.core.parallel import collectives, pieces
from mega.core.parallel import peers as exchanges
from mega.core.parallel.mesh import Axis, Groups
from mega.core.processes.connect import connect, disconnect


class Two(Groups):
    """Every group is the two ranks that exist."""

    def create(self, parts: Sequence[tuple[int, ...]], purpose: str = "", backend: str | None = None) -> None:
        for ranks in parts:
            if len(ranks) > 1 and (ranks, purpose) not in self.groups:
                self.groups[ranks, purpose] = dist.new_group([0, 1], backend=backend or self.backend)


def gather_two(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    """The two real blocks, over and over."""
    both = x.new_empty((2 * len(x), *x.shape[1:]))
    work = REAL_GATHER(both, x, group=group)
    out.view(-1, *both.shape).copy_(both)
    return work or collectives.Finished()


def scatter_two(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    return REAL_SCATTER(out, x[: 2 * len(out)], group=group, async_op=async_op)


REAL_GATHER, REAL_SCATTER = collectives._gather_into, collectives._scatter_sum


class Imitated(exchanges.MappedPeers):
    """Blocks for all others go to the one other, in the places of the ranks whose blocks are due there."""

    rows = 0
    """Tokens of a rank."""

    def _make(self, size: int, device: torch.device) -> None:
        before = self._bytes
        super()._make(size, device)
        if self._bytes != before:
            real, ours = self._begins, self.axis.index
            self._begins = [real[ours] if rank == ours else real[1 - ours] for rank in range(self.axis.size)]

    def _writer(self, rank: int) -> int:
        """Who it is there whose block is due when we send to `rank`."""
        peer = Axis(self.axis.name, self.axis.ranks, 1 - self.axis.index)
        sent = _others(self.axis, exchanges._order(self.axis, self.rows, ours_first=True))
        due = _others(peer, exchanges._order(peer, self.rows, ours_first=True, coming=True))
        return due[sent.index(rank)]


def _others(axis: Axis, turns: Sequence[range]) -> list[int]:
    return [rank for ranks in turns for rank in ranks if rank != axis.index]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--row", default="w3", help="of mega bench")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--layers", type=int, help="fewer blocks")
    parser.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--full", type=int, nargs="*", default=[pieces.FULL])
    parser.add_argument("--trace", help="a Chrome trace of the last row")
    parser.add_argument("--commit", default=None, help="what the rows are marked with")
    asked = parser.parse_args(arguments)
    world, device, groups = connect("auto")
    assert world.size == 2, world.size
    if asked.world > 2:
        groups = Two(groups.backend)
        collectives._gather_into, collectives._scatter_sum = gather_two, scatter_two
        exchanges.MappedPeers = Imitated  # type: ignore[misc]
    flags = {"tp": asked.world, "cuda_graph": asked.cuda_graph}
    flags |= {} if asked.layers is None else {"layers": asked.layers}
    run = resolve(row(asked.row, flags, asked.world), asked.world)
    assert run.batch.micro_batch and run.batch.seq_length
    Imitated.rows = run.batch.micro_batch * run.batch.seq_length // asked.world
    for full in asked.full:
        pieces.FULL = full
        name = f"{asked.row}, tp {asked.world}" + (" imitated" if asked.world > 2 else "")
        speed = measure(name, run, world.rank, asked.world, device, groups, trace=asked.trace)
        if world.rank == 0:
            print(format_speed(speed), flush=True)
            found = {
                **speed.fields(),
                "layers": run.model.layers,
                "full": full,
                "cuda_graph": asked.cuda_graph,
                "commit": asked.commit,
            }
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    disconnect()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
