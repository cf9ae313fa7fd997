"""Layouts on real devices: one process group, many rows, each appended to a file as it is known.

    torchrun --nproc-per-node 4 tests/gpu/layouts.py --out rows.jsonl [--only tp2,pp2]

Every rank trains the one-rank reference by itself, then all train the layout together; each rank compares the
gradients it holds with the same rectangles of its reference. Same bounds as on a laptop; bf16's is
4 x epsilon x sqrt(blocks), epsilon = 2^-8.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mega.core.config.resolve import data_parallel, resolve
from mega.core.config.run import RunConfig, updated
from mega.core.device import Device
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.launch import connect, disconnect
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.training.layouts import LR
from mega.core.training.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import backward, mean_loss

MODEL = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 50257,
    "seq_length": 128,
    "micro_batch": 1,
    "global_batch": 8,
    "lr": 1e-3,
    "bucket_size": 300_000,
    "device": "cuda",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "family": "llama",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "bias": False,
        "tied": False,
        "ffn": 512,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero1": {"zero": 1},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "tp4sp": {"tp": 4, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp4gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp2x2": {"pp": 2, "chunks": 2},
    "tp2pp2sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2pp2x2sp": {"tp": 2, "pp": 2, "chunks": 2, "sequence_parallel": True},
    "pp4zb": {"pp": 4, "schedule": "zb-h1"},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp2zero3sp": {"tp": 2, "zero": 3, "sequence_parallel": True},
    "tp2pp2recompute": {
        "tp": 2,
        "pp": 2,
        "sequence_parallel": True,
        "recompute": "full",
        "recompute_method": "uniform",
        "recompute_layers": 1,
    },
    "cp2": {"cp": 2},
    "cp2ring": {"cp": 2, "cp_comm": "ring"},
    "cp4ring": {"cp": 4, "cp_comm": "ring"},
    "cp2tp2sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2zero1": {"cp": 2, "cp_comm": "ring", "zero": 1},
    "tp2zero1sp": {"tp": 2, "zero": 1, "sequence_parallel": True},
}
STEPS = 3


class Trained:
    """Gradients and loss of the first and the last of STEPS steps."""

    def __init__(self, run: RunConfig, mesh: Mesh, device: Device):
        state = TrainState(run, mesh, device)
        self.losses: list[float] = []
        self.gradients: list[list[Any]] = []
        self.norms: list[float] = []
        for step in range(STEPS):
            batches = [
                synthetic_batch(run, rows.to(device.torch))
                for rows in own_samples(run, mesh, step * (run.batch.global_batch or 0))
            ]
            sums = backward(state, batches)
            pieces = [replace(piece, tensor=piece.tensor.detach().clone()) for piece in state.gradient_pieces()]
            outcome = state.optimizer.step(run.optimizer.lr or 0.0, run.optimizer.weight_decay)
            self.losses.append(float(mean_loss(state, sums)))
            self.norms.append(float(outcome.grad_norm))
            if step in (0, STEPS - 1):
                self.gradients.append(pieces)


@dataclass(frozen=True)
class Bounds:
    """Loss at every step; gradients at the first and the last; the share of the global norm below which a tensor's
    own size does not count. In bf16 tensors whose gradient is zero in theory hold noise of 2^-8, not of 2^-24; and
    after the first update of AdamW, which is lr x sign(g), noise in small elements is of the size of the update: the
    last step's gradients are told, not judged."""

    loss: float
    first: float
    last: float
    floor: float


def bounds(run: RunConfig) -> Bounds:
    if run.precision.dtype == "fp32":
        return Bounds(2e-6, 1e-5, 2e-4, 1e-6)
    wide = 4 * 2.0**-8 * math.sqrt(run.model.layers or 1)
    return Bounds(wide, wide, math.inf, 1e-3)


@dataclass(frozen=True)
class Worst:
    """The worst gradient of any rank. error: against the tensor's own size. over: error against what is allowed."""

    error: float
    over: float
    tensor: str


def worst(
    reference: Trained, exact: Trained | None, other: Trained, which: int, mesh: Mesh, bound: float, share: float
) -> Worst:
    """The gradient that is furthest beyond what is allowed.

    Allowed is `bound` of its size from the reference; or, where the reference itself is rounding, an error against
    fp64 of at most twice the reference's (a key bias's gradient is zero in theory, its fp32 value all rounding).
    """
    whole = {piece.key: piece.tensor for piece in reference.gradients[which]}
    true = {piece.key: piece.tensor for piece in exact.gradients[which]} if exact is not None else {}
    floor = share * reference.norms[0 if which == 0 else -1]
    found = Worst(0.0, 0.0, "")
    for piece in other.gradients[which]:
        mine = whole[piece.key]
        scale = max(float(mine.abs().max()), floor)
        sound = true.get(piece.key, mine)
        own = float((mine - sound).abs().max())
        for dim, (start, size) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
            mine, sound = mine.narrow(dim, start, size), sound.narrow(dim, start, size)
        error = float((piece.tensor - mine).abs().max()) / scale
        over = error / bound
        if own:
            over = min(over, float((piece.tensor - sound).abs().max()) / (2 * own))
        if not over <= found.over:
            found = Worst(error, over, piece.key)
    most = torch.tensor([found.error, found.over], device=mesh_device(mesh))
    all_reduce(most, mesh.everyone, "max")
    return Worst(float(most[0]), float(most[1]), found.tensor)


def mesh_device(mesh: Mesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def row(name: str, family: str, dtype: str, rank: int, world: int, device: Device, groups: Groups) -> dict[str, Any]:
    lr = LR["fp32"] if dtype == "fp32" else MODEL["lr"]
    options = {**MODEL, **FAMILIES[family], "dtype": dtype, "lr": lr, "device": device.torch.type}
    alone = resolve(updated(RunConfig(), options), 1)
    run = resolve(updated(RunConfig(), {**options, **LAYOUTS[name]}), world)
    parallel = run.parallel
    mesh = Mesh(rank, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, dp=data_parallel(run, world), groups=groups)
    reference = Trained(alone, Mesh(0), device)
    exact = None
    if dtype == "fp32":
        exact = Trained(resolve(updated(RunConfig(), {**options, "dtype": "fp64"}), 1), Mesh(0), device)
    began = time.perf_counter()
    other = Trained(run, mesh, device)
    loss = max(abs(a - b) / abs(a) for a, b in zip(reference.losses, other.losses, strict=True))
    bound = bounds(run)
    first = worst(reference, exact, other, 0, mesh, bound.first, bound.floor)
    last = worst(reference, exact, other, 1, mesh, bound.last, bound.floor)
    fine = loss <= bound.loss and first.over <= 1 and last.over <= 1
    return {
        "layout": name,
        "family": family,
        "dtype": dtype,
        "world": world,
        "device": device.name,
        "loss": loss,
        "gradient_first": asdict(first),
        "gradient_last": asdict(last),
        "bounds": str(bound),
        "fine": fine,
        "seconds": round(time.perf_counter() - began, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--families", default="gpt,llama")
    parser.add_argument("--dtypes", default="fp32,bf16")
    options = parser.parse_args(arguments)
    world, device, groups = connect("auto")
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = 0
    for dtype in options.dtypes.split(","):
        for family in options.families.split(","):
            for name in options.only.split(",") if options.only else LAYOUTS:
                found = row(name, family, dtype, world.rank, world.size, device, groups)
                bad += not found["fine"]
                if world.rank == 0:
                    print(json.dumps(found), flush=True)
                    os.makedirs(os.path.dirname(os.path.abspath(options.out)), exist_ok=True)
                    with open(options.out, "a", encoding="utf-8") as out:
                        out.write(json.dumps(found) + "\n")
    disconnect()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
