"""Sums in one exchange on real devices: the bits of a sum in the order of ranks, and how long they take.

    torchrun --nproc-per-node 2 -m tests.gpu.one_shot --out rows.jsonl

race    sums of several sizes, one after the other, ranks late at random: asked for one by one, and played from a graph
speed   microseconds of a sum, 64 of them played from a graph as a step of Llama-2 7B has them: in one exchange, by NCCL
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mega.core.device import Device, Recording, Timestamp
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import start_engine
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.one_shot import ALIGNMENT, OneShot, Sum, by_group, exchange_over, limit_of
from mega.core.processes.connect import connect, disconnect

DTYPES = torch.bfloat16, torch.float32
LIMIT = 1 << 20
SIZES = ALIGNMENT, 8192, 40960 + ALIGNMENT, LIMIT
GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


def race(axis: Axis, device: torch.device, dtype: torch.dtype, turns: int, *, recorded: bool) -> int:
    """How many elements of a sum of each size a turn were not those of the sum in the order of ranks."""
    one_shot, late = OneShot(axis, device, LIMIT), random.Random(axis.index)
    given = [torch.zeros(size // dtype.itemsize, dtype=dtype, device=device) for size in SIZES]

    def work() -> None:
        for x in given:
            one_shot(x)

    work()
    play = Recording(work).play if recorded else work
    drawn = [torch.Generator(device).manual_seed(rank) for rank in range(axis.size)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(turns):
        parts = [[torch.randn(len(x), generator=one, device=device).to(dtype) for x in given] for one in drawn]
        for x, ours in zip(given, parts[axis.index], strict=True):
            x.copy_(ours)
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(10**6))
        play()
        for x, (first, *others) in zip(given, zip(*parts, strict=True), strict=True):
            total = first.float()
            for other in others:
                total = total + other.float()
            wrong += (x != total.to(dtype)).sum()
    return int(wrong)


def check(shared: bool, turns: int) -> int:
    """The exit code of one rank. shared: all ranks take turns on one device, on gloo."""
    if shared:
        os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    world, own, groups = connect("cpu" if shared else "cuda")
    device = torch.device("cuda", 0) if shared else own.torch
    axis = Mesh(world.rank, tp=world.size, groups=groups).tp
    for dtype in DTYPES:
        assert shared or getattr(exchange_over(axis, device, dtype).sum, "__name__", "") == "summed_by_size", (
            "NCCL adds up small tensors"
        )
        for recorded in (False, True):
            wrong = race(axis, device, dtype, turns, recorded=recorded)
            assert not wrong, f"{dtype}, {'in a graph' if recorded else 'asked for'}: {wrong} elements are wrong"
    return 0


def answer(graphs: bool, out: str) -> int:
    """Write what an engine on all ranks answers."""
    world, device, groups = connect("cuda")
    said = answers_of(Mesh(world.rank, tp=world.size, groups=groups), device, graphs)
    if said is not None:
        Path(out).write_text(json.dumps(said))
    return 0


def answers_of(mesh: Mesh, device: Device, graphs: bool | None = None) -> list[list[int]] | None:
    # Not before a rank is a process of its own: these ask for devices when they are imported.
    from tests.inference.test_engine import GREEDY, Request, answers, prompts, tokens

    opened = open_model(GOLDEN)
    engine = start_engine(opened, mesh, device, EngineOptions(max_requests=4, cuda_graph=graphs), dtype=torch.float32)
    if engine is None:
        return None
    asked = [Request(prompt=prompt[:4], tokens=8, sampling=GREEDY) for prompt in prompts(6, 56)]
    said = [tokens(events) for events in answers(engine, asked)]
    engine.close()
    return said


def speed(summed: Sum, x: torch.Tensor, count: int = 64) -> float:
    """Microseconds of one of `count` sums."""

    def work() -> None:
        for _ in range(count):
            summed(x)

    work()
    played, times = Recording(work), list[float]()
    for _ in range(12):
        began = Timestamp(x.device)
        played.play()
        times.append(began.seconds_to(Timestamp(x.device)))
    return 1e6 * statistics.median(times[4:]) / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args(arguments)
    world, device, groups = connect("cuda")
    axis = Mesh(world.rank, tp=world.size, groups=groups).tp

    def report(row: dict[str, Any]) -> None:
        if world.rank == 0:
            line = json.dumps({"world": world.size, "device": device.name, **row})
            print(line, flush=True)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    wrong = 0
    for dtype in DTYPES:
        for recorded in (False, True):
            found = torch.tensor(race(axis, device.torch, dtype, 1000, recorded=recorded), device=device.torch)
            all_reduce(found, axis)
            report({"row": "race", "dtype": str(dtype), "recorded": recorded, "wrong": int(found)})
            wrong += int(found)
    ways: dict[str, Sum] = {
        "one exchange": OneShot(axis, device.torch, limit_of(axis.size)),
        "nccl": by_group(axis),
    }
    for size in (8192, 32768, 524288, 4 << 20, limit_of(axis.size)):
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device.torch)
        report({"row": "speed", "bytes": size, **{name: round(speed(way, x), 2) for name, way in ways.items()}})
    disconnect()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
