"""One host with 2, 4 or 8 GPUs beside one of its GPUs alone, in one launch: a JSON line a row, as soon as it is known.

    torchrun --nproc-per-node 4 -m tests.gpu.host --out rows.jsonl [--only dp,w3] [--small]

    dp          8 blocks of Llama-2 7B, 16 sequences a GPU: one GPU alone, then all with ZeRO 1 and with ZeRO 3, which
                exchanges everything with each microbatch
    w3          24 blocks of GPT 22B on all as tensor ranks, without and with dropout, with and without a graph
    pipeline    16 blocks of Llama-2 7B, tp 2 x pp N/2, each schedule with 4 and with 16 microbatches
    context     2 or 4 blocks of Llama-2 7B on 64k and 128k tokens: one GPU alone, then a ring and all-to-all over all
    experts     2 blocks of Mixtral 8x7B, 16 sequences a GPU: one GPU alone with all 8 experts, then every GPU with its
                part of them; `largest_share` of a layer's choices goes to one expert, 0.125 in balance

A row of one GPU is measured on every GPU at once, since neighbours share power; the slowest counts. `rate` is the
share of that row's tokens a second of a GPU. `bubble` is what the schedule costs: T(16) - T(4) is the time of 12
microbatches, the rest of T without the update is waiting; `planned` is the plan's simulation of it. --small: tiny
shapes, to try this file on CPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mega.core.bench.rows import row
from mega.core.bench.training import UPDATE, Speed, measure
from mega.core.config.resolve import resolve
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.plan.kinds import plan
from mega.core.plan.simulate import simulate
from mega.core.processes.connect import connect, disconnect
from tests.gpu.layouts import append

Row = dict[str, Any]
Measured = Callable[..., Speed]

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 512}
"""Of --small, with SMALL_LENGTH tokens at most."""
SMALL_LENGTH = 64

MIXTURE = {"layers": 2, "kv_heads": 8, "ffn": 14336, "experts": 8, "experts_chosen": 2, "recompute": "none"}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
}


def of(speed: Speed) -> Row:
    """What a row keeps of a measurement."""
    kept = ("world", "device", "micro_batch", "global_batch", "seconds", "spread", "tokens_per_second", "mfu")
    fields = speed.fields()
    return {name: fields[name] for name in (*kept, "peak_gib", "loss", "largest_share", "phases")}


def dp(measured: Measured, world: int) -> Iterator[Row]:
    eight = {"layers": 8, "micro_batch": 2, "recompute": "none"}
    alone = measured("w2", {**eight, "global_batch": 16, "zero": 0}, world=1)
    yield {"row": "dp 1", **of(alone)}
    for zero, micro in ((1, 2), (3, 2), (3, 8)):
        speed = measured("w2", {**eight, "micro_batch": micro, "global_batch": 16 * world, "zero": zero})
        yield {"row": f"dp {world} zero {zero}, micro batch {micro}", **of(speed), "rate": share(speed, alone)}


def w3(measured: Measured, world: int) -> Iterator[Row]:
    for name, flags in (("", {}), (" dropout", DROPOUT)):
        for graph in (True, False):
            speed = measured("w3", {"layers": 24, "tp": world, "cuda_graph": graph, **flags})
            yield {"row": f"w3 tp {world}{name}{' graph' if graph else ''}", **of(speed)}


def pipeline(measured: Measured, world: int) -> Iterator[Row]:
    stages = world // 2
    layout = {"layers": 16, "tp": 2, "pp": stages, "zero": 0, "micro_batch": 1, "sequence_parallel": True}
    for name, flags in SCHEDULES.items():
        few, many = (
            measured("w2", {**layout, **flags, "global_batch": count, "recompute": "none"}) for count in (4, 16)
        )
        one = (many.seconds - few.seconds) / 12
        for count, speed in ((4, few), (16, many)):
            whole = speed.seconds - speed.phases.get(UPDATE, 0.0) / 1e3
            planned = simulate(plan(name, stages, flags.get("chunks", 1), count))
            yield {
                "row": f"tp 2 pp {stages} {name} {count} microbatches",
                **of(speed),
                "bubble": 1 - count * one / whole,
                "planned": planned.bubble,
                "length": whole / (count * one / (1 - planned.bubble)),
            }


def context(measured: Measured, world: int) -> Iterator[Row]:
    for tokens, layers in ((65536, 4), (131072, 2)):
        long = {
            "layers": layers,
            "seq_length": tokens,
            "micro_batch": 1,
            "global_batch": 1,
            "zero": 0,
            "recompute": "full",
        }
        alone = measured("w2", long, world=1, repeats=3)
        yield {"row": f"cp 1 {tokens // 1024}k", **of(alone)}
        for kind in ("ring", "all-to-all"):
            speed = measured("w2", {**long, "cp": world, "cp_comm": kind}, repeats=3)
            yield {"row": f"cp {world} {tokens // 1024}k {kind}", **of(speed), "rate": share(speed, alone)}


def experts(measured: Measured, world: int) -> Iterator[Row]:
    """By default tokens are gathered over two ranks and rows exchanged over more; last comes the other way."""
    alone: dict[int, Speed] = {}
    for micro, default in ((4, True), (2, True), (4, False)):
        mixture = {**MIXTURE, "micro_batch": micro}
        if micro not in alone:
            alone[micro] = measured("w2", {**mixture, "global_batch": 16, "zero": 0}, world=1)
            yield {"row": f"ep 1, micro batch {micro}", **of(alone[micro])}
        for ep in sorted({world, 2}, reverse=True):
            dispatch = "all-gather" if (ep == 2) == default else "all-to-all"
            layout = {"zero": 1, "ep": ep, "expert_dispatch": dispatch}
            speed = measured("w2", {**mixture, **layout, "global_batch": 16 * world})
            name = f"ep {ep} of {world} {dispatch}, micro batch {micro}"
            yield {"row": name, **of(speed), "rate": share(speed, alone[micro])}


def share(speed: Speed, alone: Speed) -> float:
    return speed.tokens_per_second / speed.world / alone.tokens_per_second


ROWS = {"dp": dp, "w3": w3, "pipeline": pipeline, "context": context, "experts": experts}


def measurer(rank: int, size: int, device: Device, groups: Groups, *, small: bool = False) -> Measured:
    def measured(name: str, flags: Mapping[str, Any], *, world: int = size, repeats: int = 5) -> Speed:
        if small:
            flags = {**flags, **SMALL, "layers": min(flags["layers"], 4)}
            flags["seq_length"] = SMALL_LENGTH
        run = resolve(row(name, flags, world), world)
        place = rank if world == size else 0
        speed = measure(name, run, place, world, device, groups, repeats=repeats, warmup=3)
        if world == size:
            return speed
        found: list[Any] = [None] * size
        dist.all_gather_object(found, speed)
        return max(found, key=lambda one: one.seconds)

    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args(arguments)
    world, device, groups = connect("auto", timeout_minutes=3)
    measured, failed = measurer(world.rank, world.size, device, groups, small=asked.small), 0
    for name in asked.only.split(","):
        try:
            for found in ROWS[name](measured, world.size):
                if world.rank == 0:
                    append(asked.out, {**found, "commit": asked.commit, "torch": torch.__version__})
        except (RuntimeError, ValueError) as error:
            failed += 1
            append(f"{asked.out}.failed", {"rows": name, "rank": world.rank, "error": str(error)[-800:]})
    disconnect()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
