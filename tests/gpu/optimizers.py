"""Optimizers and precisions on real devices: one process group, many rows, each appended to a file as it is known.

    torchrun --nproc-per-node 2 -m tests.gpu.optimizers --out rows.jsonl [--only lamb,offload]

Every rule, state on the host, no masters, 16-bit buckets, fp32 stream and tables; each against one rank with the same
options but for the host (bounds: tests/gpu/layouts.py), with what one rank holds, and how long a step takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, updated
from mega.core.device import Device
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.proof.layouts import LR
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_state
from tests.gpu.layouts import FAMILIES, LAYOUTS, MODEL, Reference, append, judge

FEATURES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "lamb": {"optimizer": "lamb"},
    "adafactor": {"optimizer": "adafactor"},
    "adafactor relative": {"optimizer": "adafactor", "adafactor_relative": True},
    "offload": {"optimizer_offload": True},
    "lamb offload": {"optimizer": "lamb", "optimizer_offload": True},
    "no masters": {"masters": False},
    "16-bit buckets": {"grad_dtype": "bf16"},
    "fp32 stream and tables": {"residual_fp32": True, "embedding_fp32": True},
}
HALVED = ("no masters", "16-bit buckets", "fp32 stream and tables")
"""Features of 16-bit weights only."""

GRIDS = ("zero1", "zero2", "zero3", "tp2sp", "pp2")
SPEED = {"hidden": 2048, "heads": 16, "kv_heads": 16, "seq_length": 1024, "zero": 1}


def speed(options: Mapping[str, Any], rank: int, world: int, device: Device, groups: Groups) -> dict[str, Any]:
    """Median seconds of a step of a model of 0.3 billion weights, and bytes allocated between steps and at the peak."""
    run = resolve(updated(Options(), {**options, **SPEED}), world)
    mesh = Mesh(rank, dp=world, groups=groups)
    device.reset_memory_peak()
    state, times = build_state(run, mesh, device), []
    for number in range(8):
        batches = [
            synthetic_batch(run, rows.to(device.torch))
            for rows in own_samples(run, mesh, number * (run.batch.global_batch or 0))
        ]
        device.synchronize()
        began = time.perf_counter()
        train_step(state, batches, 1e-4, 0.1)
        device.synchronize()
        times.append(time.perf_counter() - began)
    state.grads.wait_param_gather()
    return {
        "step_seconds": round(statistics.median(times[3:]), 4),
        "held_bytes": device.resident(),
        "peak_bytes": device.memory_peak(),
        "parameters": sum(weight.numel() for bucket in state.grads.buckets for weight, _, _ in bucket.offsets),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    asked = parser.parse_args(arguments)
    world, device, groups = connect("auto")
    names, bad = asked.only.split(",") if asked.only else list(FEATURES), 0

    def tell(row: Mapping[str, Any]) -> None:
        if world.rank == 0:
            append(asked.out, row)

    for name in names:
        for dtype in ("bf16",) if name in HALVED else ("fp32", "bf16"):
            for family in FAMILIES:
                lr = LR["fp32"] if dtype == "fp32" else MODEL["lr"]
                options = {**MODEL, **FAMILIES[family], "dtype": dtype, "lr": lr, "device": device.torch.type}
                options |= FEATURES[name]
                reference = Reference({**options, "optimizer_offload": False}, device)
                for grid in GRIDS:
                    found = judge(reference, {**options, **LAYOUTS[grid]}, world.rank, world.size, device, groups)
                    bad += not found["fine"]
                    tell({"feature": name, "layout": grid, "family": family, "dtype": dtype, **found})
        options = {**MODEL, **FAMILIES["gpt"], "dtype": "bf16", "device": device.torch.type, **FEATURES[name]}
        tell({"feature": name, "speed": speed(options, world.rank, world.size, device, groups)})
        device.release()
    disconnect()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
