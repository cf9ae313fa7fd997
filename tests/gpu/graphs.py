"""--cuda-graph on devices: the same bits as without, and how long a step takes both ways.

    torchrun --nproc-per-node 1|2 -m tests.gpu.graphs --out rows.jsonl [--only NAME;NAME]

Some steps of real shapes each way on random tokens. With algorithms that give the same bits on every run (most of the
fastest do not), losses and norms of every step must be equal bit for bit, and in the end every rank's weights, masters
and moments, byte for byte; times are those of the fastest. A row is appended for each. Rows of two ranks
need two devices.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mega.core.bench.training import random_batch
from mega.core.config.compose import compose
from mega.core.config.resolve import microbatches, resolve
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state

QUIET: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SMALL: Mapping[str, Any] = {"preset": "gpt2-345m", "micro_batch": 1, "global_batch": 16, **QUIET}
LLAMA: Mapping[str, Any] = {"preset": "llama2-7b", "layers": 4, "micro_batch": 1, "global_batch": 8}
ACROSS: Mapping[str, Any] = {"tp": 2, "sequence_parallel": True}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "gpt": SMALL,
    "gpt, four": {**SMALL, "micro_batch": 4, "global_batch": 64},
    "gpt, dropout": {**SMALL, "hidden_dropout": 0.1},
    "gpt, again": {**SMALL, "recompute": "full", "recompute_method": "uniform", "recompute_layers": 1},
    "retro": {**SMALL, "seq_length": 512, "micro_batch": 4, "global_batch": 16, "retriever": True},
    "retro, dropout": {**SMALL, "seq_length": 512, "retriever": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt, fp16": {**SMALL, "dtype": "fp16", "initial_loss_scale": 1024.0},
    "llama": LLAMA,
    "llama, selective": {**LLAMA, "recompute": "selective"},
    "llama, fp8": {**LLAMA, "fp8": True},
    "window": {**LLAMA, "preset": "mistral-7b", "seq_length": 8192},
    "gpt tp2": {**SMALL, **ACROSS, "micro_batch": 4, "global_batch": 32},
    "gpt tp2 beside": {**SMALL, **ACROSS, "micro_batch": 4, "global_batch": 32, "tp_overlap": True},
    "llama tp2 beside": {**LLAMA, **ACROSS, "tp_overlap": True},
    "llama tp2 fp8": {**LLAMA, **ACROSS, "fp8": True},
    "gpt dp2 zero 1": {**SMALL, "zero": 1, "global_batch": 32},
    "gpt cp2": {**SMALL, "cp": 2},
    "llama cp2": {**LLAMA, "cp": 2},
}


def steps(
    run: RunConfig, device: Device, groups: Groups, rank: int, world: int, count: int, *, keep: bool
) -> dict[str, Any]:
    """What `count` steps find, their times, and, if asked, the bytes of this rank's state in the end."""
    mesh = build_mesh(run, rank, world, groups)
    device.reset_memory_peak()
    state, told, times = build_state(run, mesh, device), [], []
    for step in range(count):
        first = step * microbatches(run, world)
        batches = [
            random_batch(run, (first + number) * mesh.dp.size + mesh.dp.index, device.torch)
            for number in range(microbatches(run, world))
        ]
        device.synchronize()
        began = time.perf_counter()
        report = train_step(state, batches, 1e-4, 0.1)
        device.synchronize()
        times.append(time.perf_counter() - began)
        told.append((float(report.loss), float(report.grad_norm)))
    state.grads.wait_param_gather()
    pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)) if keep else ()
    kept = {piece.key: piece.tensor.detach().clone(memory_format=torch.contiguous_format) for piece in pieces}
    state.pipeline.close()
    # The first step is as ever, the second records.
    return {"told": told, "kept": kept, "seconds": statistics.median(times[2:]), "peak": device.memory_peak()}


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs found the same numbers and left the same bytes."""
    a, b = one["kept"], other["kept"]
    return (
        one["told"] == other["told"]
        and list(a) == list(b)
        and all(torch.equal(a[key].view(-1).view(torch.uint8), b[key].view(-1).view(torch.uint8)) for key in a)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="how names of rows begin, with ; between")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--commit", default=None, help="what the rows are marked with")
    asked = parser.parse_args(arguments)
    world, device, groups = connect("cuda")
    wrong = 0
    for name, flags in ROWS.items():
        two = any(flags.get(axis, 1) > 1 for axis in ("tp", "cp")) or flags.get("zero", 0) > 0
        if not name.startswith(tuple(asked.only.split(";"))) or two != (world.size == 2):
            continue
        fast: dict[bool, dict[str, Any]] = {}
        same: dict[bool, dict[str, Any]] = {}
        for deterministic, into in ((False, fast), (True, same)):  # peaks first, while nothing is kept
            device.deterministic(deterministic)
            for graph in (False, True):
                typed = {"lr": 1e-4, "dtype": "bf16", "device": "cuda", "cuda_graph": graph, **flags}
                run = resolve(compose(typed.pop("preset"), flags=typed), world.size)
                count = 3 if deterministic else asked.steps
                into[graph] = steps(run, device, groups, world.rank, world.size, count, keep=deterministic)
                gc.collect()
                device.release()
        unlike = torch.tensor(float(not alike(same[False], same[True])), device=device.torch)
        all_reduce(unlike, Mesh(world.rank, dp=world.size, groups=groups).everyone, "max")
        equal = not bool(unlike)
        wrong += not equal
        if world.rank == 0:
            row = {"name": name, "flags": dict(flags), "ranks": world.size, "equal": equal, "commit": asked.commit}
            row |= {key: [fast[graph][key] for graph in (False, True)] for key in ("seconds", "peak")}
            times = " to ".join(f"{1e3 * one:.1f}" for one in row["seconds"])
            peaks = " to ".join(f"{one / 2**30:.2f}" for one in row["peak"])
            print(f"{name:<18} {'equal' if equal else 'NOT EQUAL'}  {times} ms  {peaks} GiB", flush=True)
            if not equal:
                print(f"  {same[False]['told']}\n  {same[True]['told']}", flush=True)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    disconnect()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
