"""Layouts on real devices: one process group, many rows, each appended to a file as it is known.

    torchrun --nproc-per-node 4 tests/gpu/layouts.py --out rows.jsonl [--only tp2,pp2]
    torchrun --nproc-per-node 4 tests/gpu/layouts.py --out rows.jsonl --drawn 200 [--seed 1 --seconds 300]

Every rank trains the one-rank reference by itself, then all train the layout together; each rank compares the
gradients it holds with the same rectangles of its reference. Same bounds as on a laptop; in 16 bits they are
4 x epsilon x sqrt(blocks), epsilon = 2^-8 (bf16) or 2^-11 (fp16).

--drawn: so many layouts drawn at random instead, EACH of them for a model and a precision drawn at random; what is
refused is drawn again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mega.core.checkpoint.own.pieces import Piece
from mega.core.config.check import check
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.device import Device
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.proof.layouts import LR
from mega.core.proof.parity import GRADIENT_BOUND, GRADIENT_FLOOR, LOSS_BOUND, Measure, own_samples, synthetic_batch
from mega.core.training.step import backward, means
from mega.core.training.wire import build_mesh, build_state

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
    "initial_loss_scale": 65536.0,
    "mock_data": True,
    "steps": 3,
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
    "tp2sp overlap": {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    "tp4sp overlap": {"tp": 4, "sequence_parallel": True, "tp_overlap": True},
    "tp2zbsp overlap": {"tp": 2, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True, "tp_overlap": True},
    "tp2zero1sp": {"tp": 2, "zero": 1, "sequence_parallel": True},
}
MODELS: dict[str, Sequence[Any]] = {
    "family": ("gpt", "llama"),
    "kv_heads": (8, 4, 2, 1),
    "head_dim": (32, 32, 64),
    "ffn": (512, 1000),
    "vocab": (50257, 32000),
    "position": ("learned", "rope", "sinusoidal"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu_tanh", "gelu", "swiglu", "relu2"),
    "bias": (True, False),
    "qkv_bias": (None, True),
    "qk_norm": (False, False, True),
    "tied": (True, False),
    "rope_fraction": (1.0, 0.5),
    "hidden_dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.0, 0.1),
    "post_norm_residual": (False, False, True),
    "dtype": ("fp32", "fp32", "bf16", "fp16"),
    "residual_fp32": (False, False, True),
    "clip_grad": (0.0, 1.0),
}
DRAWN: dict[str, Sequence[Any]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 1, 2, 4),
    "cp_comm": ("auto", "ring", "all-to-all"),
    "sequence_parallel": (True, False),
    "tp_overlap": (True, False),
    "schedule": (None, None, "gpipe", "zb-h1"),
    "chunks": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "bucket_size": (300_000, 5_000_000),
    "overlap_grad_reduce": (True, False),
    "overlap_param_gather": (True, False),
    "micro_batch": (1, 2),
    "recompute": ("none", "none", "selective", "full"),
    "distribute_saved": (False, True),
    "cuda_graph": (False, True),
    "ops": ("auto", "auto", "reference"),
    "optimizer_offload": (False, False, True),
}
EACH = 8
STEPS = 3
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}


class Trained:
    """Losses of STEPS steps; whole gradients, without the loss scale, and their norm of the first and the last."""

    def __init__(self, run: RunConfig, mesh: Mesh, device: Device):
        state = build_state(run, mesh, device)
        self.losses: list[float] = []
        self.gradients: list[list[Piece]] = []
        self.norms: list[float] = []
        for step in range(STEPS):
            batches = [
                synthetic_batch(run, rows.to(device.torch))
                for rows in own_samples(run, mesh, step * (run.batch.global_batch or 0))
            ]
            sums = backward(state, batches)
            scale = None if state.scaler is None else state.scaler.scale
            kept = step in (0, STEPS - 1)
            if kept:
                self.gradients.append([_unscaled(piece, scale) for piece in state.gradient_pieces()])
            outcome = state.optimizer.step(run.optimizer.lr or 0.0, run.optimizer.weight_decay, scale)
            self.losses.append(float(means(state, sums)[0]))
            if kept:
                self.norms.append(float(outcome.grad_norm))
        state.grads.wait_param_gather()


def _unscaled(piece: Piece, scale: torch.Tensor | None) -> Piece:
    grad = piece.tensor.detach()
    return replace(piece, tensor=grad.clone() if scale is None else grad.float() / scale.float())


@dataclass(frozen=True)
class Bounds:
    """Loss at every step; gradients at the first and the last; the share of the global norm below which a tensor's
    own size does not count. In 16 bits tensors whose gradient is zero in theory hold noise of epsilon, not of 2^-24;
    and after the first update of AdamW, lr x sign(g), noise in small elements is of the size of the update: the
    last step's gradients are told, not judged."""

    loss: float
    gradients: tuple[float, float]
    floor: float


def bounds(run: RunConfig) -> Bounds:
    dtype = run.precision.dtype
    if dtype not in EPSILON:
        return Bounds(LOSS_BOUND[dtype], (GRADIENT_BOUND[dtype][1], GRADIENT_BOUND[dtype][10]), GRADIENT_FLOOR)
    wide = 4 * EPSILON[dtype] * math.sqrt(run.model.layers or 1)
    return Bounds(wide, (wide, math.inf), 1e-3)


@dataclass(frozen=True)
class Worst:
    """The worst gradient of any rank. error: against the tensor's own size. over: share of what is allowed."""

    error: float
    over: float
    tensor: str


class Reference:
    """One rank alone, as every rank trains it by itself; in fp32 also in fp64, which judges where fp32 is rounding."""

    def __init__(self, options: Mapping[str, Any], device: Device):
        run = resolve(updated(Options(), dict(options)), 1)
        self.bounds = bounds(run)
        trained, exact = Trained(run, Mesh(0), device), None
        if run.precision.dtype == "fp32":
            exact = Trained(resolve(updated(Options(), {**options, "dtype": "fp64"}), 1), Mesh(0), device)
        self.losses = trained.losses
        self.measures = []
        for which, bound in enumerate(self.bounds.gradients):
            true = {} if exact is None else {piece.key: piece.tensor for piece in exact.gradients[which]}
            floor = self.bounds.floor * trained.norms[which]
            self.measures.append(
                {
                    piece.key: Measure(piece.tensor, true.get(piece.key), bound, floor)
                    for piece in trained.gradients[which]
                }
            )

    def worst(self, other: Trained, which: int, mesh: Mesh, device: Device) -> Worst:
        """The gradient of the first (0) or last (1) step that is furthest beyond what is allowed, of any rank."""
        found = Worst(0.0, 0.0, "")
        for piece in other.gradients[which]:
            error, share = self.measures[which][piece.key](piece.tensor, piece.start)
            if not (share, error) <= (found.over, found.error):
                found = Worst(error, share, piece.key)
        most = torch.tensor([found.error, found.over], device=device.torch)
        all_reduce(most, mesh.everyone, "max")
        return Worst(float(most[0]), float(most[1]), found.tensor)


def judge(
    reference: Reference,
    options: Mapping[str, Any],
    rank: int,
    world: int,
    device: Device,
    groups: Groups,
) -> dict[str, Any]:
    """Train `options` on all ranks and compare with the reference: what a row says."""
    run = resolve(updated(Options(), dict(options)), world)
    mesh = build_mesh(run, rank, world, groups)
    device.reset_memory_peak()
    began = time.perf_counter()
    other = Trained(run, mesh, device)
    seconds = time.perf_counter() - began
    allowed = reference.bounds
    loss = max(abs(a - b) / abs(a) for a, b in zip(reference.losses, other.losses, strict=True))
    first, last = (reference.worst(other, which, mesh, device) for which in (0, 1))
    return {
        "world": world,
        "device": device.name,
        "loss": loss,
        "gradient_first": asdict(first),
        "gradient_last": asdict(last),
        "bounds": str(allowed),
        "fine": loss <= allowed.loss and first.over <= 1 and last.over <= 1,
        "peak_gib": round((device.memory_peak() or 0) / 2**30, 2),
        "seconds": round(seconds, 2),
    }


def drawn(
    draw: random.Random, among: Mapping[str, Sequence[Any]], base: Mapping[str, Any], world: int
) -> dict[str, Any]:
    """What of `among` a run of `world` ranks may have."""
    while True:
        found = {name: draw.choice(values) for name, values in among.items()}
        try:
            check(updated(Options(), {**base, **found}), world)
        except ValueError:
            continue
        return found


def random_layouts(asked: argparse.Namespace, rank: int, world: int, device: Device, groups: Groups) -> int:
    """How many of the drawn layouts are wrong. A rank that fails alone is found by its silence."""
    draw, bad, until = random.Random(asked.seed), 0, time.monotonic() + asked.seconds
    for _ in range(-(-asked.drawn // EACH)):
        late = torch.tensor([time.monotonic() - until], device=device.torch)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late > 0:
            break
        model = drawn(draw, MODELS, {**MODEL, "device": device.torch.type}, 1) | asked.fixed
        model["lr"] = LR["fp32"] if model["dtype"] == "fp32" else MODEL["lr"]
        options = {**MODEL, **model, "device": device.torch.type}
        reference = Reference(options, device)
        for _ in range(EACH):
            layout = drawn(draw, DRAWN, options, world)
            try:
                found = judge(reference, {**options, **layout}, rank, world, device, groups)
            except Exception as error:
                found = {"fine": False, "error": f"{type(error).__name__}: {error}"[:500]}
            bad += not found["fine"]
            if rank == 0:
                append(asked.out, {"seed": asked.seed, "model": model, "layout": layout, **found})
    return bad


def append(path: str, found: Mapping[str, Any]) -> None:
    """One row to the screen and to the file, safe on disk before we go on."""
    line = json.dumps(found)
    print(line, flush=True)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.write(line + "\n")
        out.flush()
        os.fsync(out.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--families", default="gpt,llama")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--drawn", type=int, default=0, help="layouts drawn at random")
    parser.add_argument("--fixed", type=json.loads, default={}, help="options of every model drawn, as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="draw no model after so long")
    asked = parser.parse_args(arguments)
    world, device, groups = connect("auto", timeout_minutes=2)
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = random_layouts(asked, world.rank, world.size, device, groups) if asked.drawn else 0
    for dtype in asked.dtypes.split(",") if not asked.drawn else ():
        for family in asked.families.split(","):
            lr = LR["fp32"] if dtype == "fp32" else MODEL["lr"]
            options = {**MODEL, **FAMILIES[family], "dtype": dtype, "lr": lr, "device": device.torch.type}
            reference = Reference(options, device)
            for name in asked.only.split(",") if asked.only else LAYOUTS:
                found = judge(reference, {**options, **LAYOUTS[name]}, world.rank, world.size, device, groups)
                bad += not found["fine"]
                if world.rank == 0:
                    append(asked.out, {"layout": name, "family": family, "dtype": dtype, **found})
    disconnect()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
