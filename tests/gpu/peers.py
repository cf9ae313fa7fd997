"""Exchanges beside products on real devices: the same numbers as plain collectives, and how long both take.

torchrun --nproc-per-node 4 -m tests.gpu.peers --out rows.jsonl

race    600 exchanges of random shapes, two under way at times, products between them: every sum and every gathered
        tensor equals the group's own collectives'; whole numbers, so that the order of a sum cannot matter
speed   milliseconds of gather + product and product + scatter at the shapes of GPT 22B, by either way
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mega.core.ops.kernels.total import total
from mega.core.parallel.collectives import all_gather, all_reduce, reduce_scatter
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.peers import Gather, Peers, Scatter, peers
from mega.core.processes.connect import connect, disconnect


def race(through: Peers, device: torch.device, exchanges: int) -> int:
    """How many elements of all exchanges were wrong on this rank."""
    axis, draw = through.axis, random.Random(1)
    generator = torch.Generator(device).manual_seed(axis.index)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(exchanges // 2):
        rows, columns = draw.choice((64, 256, 1024, 2048, 4096)), draw.choice((128, 1000, 4096))
        x, full = (
            torch.randint(-4, 5, (count, columns), generator=generator, device=device).bfloat16()
            for count in (rows, rows * axis.size)
        )
        gather, scatter = Gather(x, through), Scatter(rows, columns, x, through)
        if draw.random() < 0.5:
            for where, part in gather.parts():
                wrong += (part != all_gather(x, axis)[where]).sum()
        for where, out in scatter.parts():
            out.copy_(full[where])
            if draw.random() < 0.2:
                torch.cuda._sleep(draw.randrange(10**6))
        wrong += (gather.whole() != all_gather(x, axis)).sum()
        wrong += (total(scatter.blocks()) != reduce_scatter(full, axis)).sum()
    return int(wrong)


def milliseconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[4:])


def speed(through: Peers, device: torch.device, tokens: int, hidden: int, outs: int) -> dict[str, float]:
    axis = through.axis
    rows = tokens // axis.size
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    wide = torch.randn(tokens, outs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outs, hidden, device=device, dtype=torch.bfloat16)
    y = x.new_empty((tokens, outs))

    def gather_beside() -> None:
        for where, part in Gather(x, through).parts():
            torch.mm(part, weight.t(), out=y[where])

    def scatter_beside() -> None:
        scatter = Scatter(rows, hidden, x, through)
        for where, out in scatter.parts():
            torch.mm(wide[where], weight, out=out)
        total(scatter.blocks())

    whole = all_gather(x, axis)
    return {
        "gather": milliseconds(lambda: all_gather(x, axis)),
        "product": milliseconds(lambda: torch.mm(whole, weight.t(), out=y)),
        "gather, product": milliseconds(lambda: torch.mm(all_gather(x, axis), weight.t(), out=y)),
        "gather beside product": milliseconds(gather_beside),
        "gather beside": milliseconds(lambda: Gather(x, through).whole()),
        "product, scatter": milliseconds(lambda: reduce_scatter(wide @ weight, axis)),
        "product beside scatter": milliseconds(scatter_beside),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args(arguments)
    world, device, groups = connect("auto")
    axis = Mesh(world.rank, tp=world.size, groups=groups).tp
    through = peers(axis, device.torch)

    def tell(row: dict[str, Any]) -> None:
        if world.rank == 0:
            line = json.dumps({"world": world.size, "device": device.name, **row})
            print(line, flush=True)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    wrong = torch.tensor(race(through, device.torch, 600), device=device.torch)
    all_reduce(wrong, axis)
    tell({"row": "race", "exchanges": 600, "wrong": int(wrong), "fine": int(wrong) == 0})
    for outs in (18432 // world.size, 24576 // world.size, 6144 // world.size):
        found = speed(through, device.torch, 8192, 6144, outs)
        tell({"row": "speed", "outs": outs, **{name: round(value, 3) for name, value in found.items()}})
    disconnect()
    return 1 if int(wrong) else 0


if __name__ == "__main__":
    raise SystemExit(main())
