"""What only several GPUs can show, in one launch: each row is appended to a file as soon as it is known.

    torchrun --nproc-per-node 8 -m tests.gpu.scale --out scale.jsonl          4 or 8 GPUs, from the repository's root
    torchrun --nproc-per-node 4 -m tests.gpu.scale --out /tmp/t.jsonl --tiny  the same rows, small, on CPUs

    layouts         tp N; tp 2 x pp N/2 interleaved and zero-bubble; dp N with ZeRO 1, 2, 3; context over 2 and 4; GPT
                    and Llama in bf16, fp16 and fp32, against one rank (bounds: tests/gpu/layouts.py)
    context         a Llama at 32,768 tokens in bf16, ring and all-to-all over 2 and 4 ranks, against one rank
    deterministic   five runs of the same steps end in the same bytes under --deterministic, and what that costs
    gather          ZeRO 1 with weights gathered under the next forward pass: the same bytes, and what it saves
    llama2-7b       its true shape, 50 steps on a text that can be learned: the loss falls to less than half

`--only` takes beginnings of row names. Rows that the file has for this commit are not run again, whether they were
fine or failed, so a launch that was cut short goes on behind the row where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mega.core.batch import DecoderBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.device import Device
from mega.core.flops import model_flops_per_token
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.proof.layouts import LR
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state
from tests.gpu.layouts import FAMILIES, Reference, append, judge

SP = {"sequence_parallel": True}
MODEL: dict[str, Any] = {
    "layers": 8,
    "hidden": 512,
    "heads": 16,
    "kv_heads": 8,
    "vocab": 50257,
    "seq_length": 256,
    "micro_batch": 1,
    "global_batch": 8,
    "bucket_size": 1_000_000,
    "loss_scale": 4096.0,
}
LONG: dict[str, Any] = {
    **MODEL,
    "layers": 4,
    "hidden": 1024,
    "vocab": 32000,
    "seq_length": 32768,
    "ffn": 2816,
    "loss_scale": None,
}
WIDE: dict[str, Any] = {
    **LONG,
    "layers": 8,
    "hidden": 2048,
    "seq_length": 2048,
    "micro_batch": 2,
    "global_batch": 32,
    "ffn": 5632,
}
DENSE: dict[str, Any] = {
    **WIDE,
    **FAMILIES["llama"],
    "ffn": WIDE["ffn"],
    "dtype": "bf16",
    "lr": 1e-4,
    "hidden_dropout": 0.1,
    "bucket_size": 40_000_000,
}
TINY: dict[str, Any] = {
    "hidden": 32,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 48,
    "vocab": 509,
    "vocab_multiple": 2,
    "seq_length": 32,
    "bucket_size": 3000,
}
RERUNS, RERUN_STEPS, TIMED_STEPS = 5, 5, 20
LEARNING_STEPS, SYMBOLS = 50, 257


@dataclass(frozen=True)
class Stand:
    """Where we stand: our rank among all, the device, and the groups made so far."""

    rank: int
    world: int
    device: Device
    groups: Groups
    tiny: bool

    def run(self, options: Mapping[str, Any]) -> RunConfig:
        return resolve(updated(Options(), self.sized(options)), self.world)

    def sized(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "device": self.device.torch.type, **(TINY if self.tiny else {})}

    def mesh(self, run: RunConfig) -> Mesh:
        return build_mesh(run, self.rank, self.world, self.groups)

    def everywhere(self, fine: bool) -> bool:
        """Whether all ranks say so."""
        said = torch.tensor(float(fine), device=self.device.torch)
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return bool(said)

    def sweep(self) -> None:
        """Let go of everything the rows before have left, communicators too."""
        for group in self.groups.groups.values():
            dist.destroy_process_group(group)
        self.groups.groups.clear()
        gc.collect()
        self.device.release()


Row = tuple[str, Callable[[], dict[str, Any]]]


def rows(stand: Stand) -> Iterator[Row]:
    """Every row by name, in order; what a part has in common is made by its first row that is run."""
    yield from layout_rows(stand)
    yield from context_rows(stand)
    yield "deterministic", partial(reruns, stand)
    yield "gather", partial(gathers, stand)
    yield "llama2-7b", partial(learning, stand)


# -- layouts against one rank


def layout_rows(stand: Stand) -> Iterator[Row]:
    n = stand.world
    grids: dict[str, dict[str, Any]] = {
        f"tp{n}sp": {"tp": n, **SP},
        f"tp2pp{n // 2}-chunks2": {"tp": 2, "pp": n // 2, "chunks": 2, **SP},
        f"tp2pp{n // 2}-zb": {"tp": 2, "pp": n // 2, "schedule": "zb-h1", **SP},
        **{f"dp{n}-zero{zero}": {"zero": zero} for zero in (1, 2, 3)},
        "cp2": {"cp": 2},
        "cp4-ring": {"cp": 4, "cp_comm": "ring", "zero": 1},
    }
    for dtype in ("bf16", "fp16", "fp32"):
        for family in ("gpt", "llama"):
            lr = LR["fp32"] if dtype == "fp32" else 1e-3
            scale = MODEL["loss_scale"] if dtype == "fp16" else None
            options = {**MODEL, **FAMILIES[family], "ffn": 1024, "dtype": dtype, "lr": lr, "loss_scale": scale}
            yield from against_one(stand, f"layouts {dtype} {family}", stand.sized(options), grids)


def context_rows(stand: Stand) -> Iterator[Row]:
    grids = {
        f"cp{size}{way}": {"cp": size, "cp_comm": way.strip("-") or "all-to-all"}
        for size in (2, 4)
        for way in ("", "-ring")
    }
    batch = stand.world // 2  # the same for both sizes
    options = {**LONG, **FAMILIES["llama"], "ffn": LONG["ffn"], "dtype": "bf16", "lr": 1e-4, "global_batch": batch}
    yield from against_one(stand, "context bf16 llama", stand.sized(options), grids)


def against_one(
    stand: Stand, prefix: str, options: Mapping[str, Any], grids: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
    """A row per grid; all share one reference."""
    made: list[Reference] = []

    def row(grid: Mapping[str, Any]) -> dict[str, Any]:
        if not made:
            made.append(Reference(options, stand.device))
        return judge(made[0], {**options, **grid}, stand.rank, stand.world, stand.device, stand.groups)

    for name, grid in grids.items():
        yield f"{prefix} {name}", partial(row, grid)


# -- bitwise reruns


def reruns(stand: Stand) -> dict[str, Any]:
    """Five runs in one process, each from its initial weights; then the time of a step with and without."""
    stand.sweep()
    run = stand.run({**DENSE, "tp": 2, "pp": 2, **SP, "zero": 1})
    mesh = stand.mesh(run)
    usual = _step_seconds(stand, run, mesh)
    stand.device.deterministic()
    try:
        prints = {_fingerprint(stand, run, mesh) for _ in range(RERUNS)}
        same = stand.everywhere(len(prints) == 1)
        seconds = _step_seconds(stand, run, mesh)
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "fine": same,
        "reruns": RERUNS,
        "steps": RERUN_STEPS,
        "step_seconds": round(usual, 5),
        "step_seconds_deterministic": round(seconds, 5),
        "cost": round(seconds / usual, 4),
    }


def gathers(stand: Stand) -> dict[str, Any]:
    """ZeRO 1 over all ranks, with updated weights gathered under the next forward pass and before it."""
    stand.sweep()
    prints, seconds = [], []
    for overlap in (True, False):
        run = stand.run({**DENSE, "zero": 1, "overlap_param_gather": overlap, "global_batch": 2 * stand.world})
        mesh = stand.mesh(run)
        seconds.append(_step_seconds(stand, run, mesh))
        stand.device.deterministic()
        try:
            prints.append(_fingerprint(stand, run, mesh))
        finally:
            torch.use_deterministic_algorithms(False)
    return {
        "fine": stand.everywhere(prints[0] == prints[1]),
        "step_seconds": round(seconds[0], 5),
        "step_seconds_without": round(seconds[1], 5),
    }


def _fingerprint(stand: Stand, run: RunConfig, mesh: Mesh) -> str:
    """Hash of every byte of this rank's weights, masters and moments, and of every loss."""
    state, seen = build_state(run, mesh, stand.device), hashlib.sha256()
    for step in range(RERUN_STEPS):
        report = _synthetic_step(stand, state, step)
        seen.update(str((float(report.loss), float(report.grad_norm))).encode())
    state.grads.wait_param_gather()
    for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)):
        seen.update(piece.key.encode())
        seen.update(piece.tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data)
    return seen.hexdigest()


def _step_seconds(stand: Stand, run: RunConfig, mesh: Mesh) -> float:
    """Median seconds of a step."""
    state, times = build_state(run, mesh, stand.device), []
    for step in range(TIMED_STEPS + 5):
        stand.device.synchronize()
        began = time.perf_counter()
        _synthetic_step(stand, state, step)
        stand.device.synchronize()
        times.append(time.perf_counter() - began)
    state.grads.wait_param_gather()
    return statistics.median(times[5:])


def _synthetic_step(stand: Stand, state: TrainState, step: int) -> Any:
    run = state.run
    rows = own_samples(run, state.mesh, step * (run.batch.global_batch or 0))
    batches = [synthetic_batch(run, numbers.to(stand.device.torch)) for numbers in rows]
    return train_step(state, batches, run.optimizer.lr or 0.0, run.optimizer.weight_decay)


# -- a true shape learns


def learning(stand: Stand) -> dict[str, Any]:
    """50 steps in which each token follows from the one before it."""
    stand.sweep()
    n = stand.world
    flags = {"dtype": "bf16", "tp": 2, "zero": 1, **SP, "micro_batch": 1, "global_batch": 4 * n, "lr": 2e-4}
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": stand.device.torch.type}
    tiny = {**TINY, "layers": 2, "lr": 3e-3} if stand.tiny else {}
    run = resolve(compose("llama2-7b", {**flags, **still, **tiny}), n)
    assert run.optimizer.lr
    mesh = stand.mesh(run)
    stand.device.reset_memory_peak()
    state, losses, times = build_state(run, mesh, stand.device), [], []
    text = _orbits(run).to(stand.device.torch)
    for step in range(LEARNING_STEPS):
        began = time.perf_counter()
        rows = own_samples(run, mesh, step * run.batch.global_batch)
        batches = [_orbit_batch(text, numbers.to(stand.device.torch)) for numbers in rows]
        report = train_step(state, batches, run.optimizer.lr * min(1.0, (step + 1) / 10), run.optimizer.weight_decay)
        losses.append(float(report.loss))
        times.append(time.perf_counter() - began)
    state.grads.wait_param_gather()
    seconds = statistics.median(times[5:])
    tokens = run.batch.seq_length * run.batch.global_batch / seconds
    tflops = tokens * model_flops_per_token(run) / n / 1e12
    peak = stand.device.peak_tflops
    weights = sum(weight.numel() for bucket in state.grads.buckets for weight, _, _ in bucket.offsets)
    return {
        "fine": stand.everywhere(sum(losses[-5:]) / 5 < losses[0] / 2),
        "layout": mesh.sizes,
        "parameters_of_a_rank": weights,
        "losses": [round(loss, 4) for loss in losses],
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(tokens),
        "tflops_per_gpu": round(tflops, 1),
        "mfu": None if peak is None else round(tflops / peak, 4),
        "peak_gib": round((stand.device.memory_peak() or 0) / 2**30, 2),
    }


def _orbits(run: RunConfig) -> torch.Tensor:
    """int64 [SYMBOLS, seq_length + 1]: from each symbol on, x -> 5 x + 3 modulo SYMBOLS, spread over the vocabulary."""
    assert run.batch.seq_length and run.model.vocab
    columns = [torch.arange(SYMBOLS)]
    for _ in range(run.batch.seq_length):
        columns.append((5 * columns[-1] + 3) % SYMBOLS)
    return torch.stack(columns, dim=1) * (run.model.vocab // SYMBOLS)


def _orbit_batch(text: torch.Tensor, samples: torch.Tensor) -> DecoderBatch:
    rows = text[samples * 7919 % SYMBOLS]
    positions = torch.arange(rows.shape[1] - 1, device=rows.device).expand(len(rows), -1)
    weights = torch.ones(positions.shape, device=rows.device)
    return DecoderBatch(rows[:, :-1], rows[:, 1:], weights, positions, samples)


# -- the launch


def commit() -> str | None:
    """The commit of this tree, or None where there is no repository."""
    root = Path(__file__).resolve().parents[2]
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() or None


def done(path: str, head: str | None) -> set[str]:
    """Names of the rows that the file has for this commit."""
    if not os.path.exists(path):
        return set()
    with open(path, encoding="utf-8") as file:
        known = [json.loads(line) for line in file if line.strip()]
    return {row["row"] for row in known if row.get("commit") == head}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="beginnings of row names, with commas between")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on CPUs")
    parser.add_argument("--commit", default=None, help="what the rows are marked with where git is absent")
    asked = parser.parse_args(arguments)
    # cuBLAS reads it when it starts; all rows have it, so it is no part of what --deterministic costs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world, device, groups = connect("cpu" if asked.tiny else "auto")
    torch.backends.cuda.matmul.allow_tf32 = False
    if world.size not in (4, 8):
        raise SystemExit(f"{world.size} ranks: the rows are laid out for 4 or 8")
    stand = Stand(world.rank, world.size, device, groups, asked.tiny)
    head = asked.commit or commit()
    marks = {"world": world.size, "device": device.name, "commit": head, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    known, wanted, bad = done(asked.out, head), tuple(asked.only.split(",")), 0
    stand.everywhere(True)  # everyone has read the file before it grows
    for name, play in rows(stand):
        if name in known or not name.startswith(wanted):
            continue
        try:
            found = play()
        except Exception as error:
            # Which rank it was shows; the launcher ends the others.
            told = f"rank {world.rank}: {type(error).__name__}: {str(error).strip()[:300]}"
            append(asked.out, {"row": name, **marks, "fine": False, "problem": told})
            raise
        bad += not found["fine"]
        if world.rank == 0:
            append(asked.out, {"row": name, **found, **marks})
    all_reduce(torch.zeros(1, device=device.torch), Mesh(world.rank, dp=world.size, groups=groups).everyone)
    disconnect()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
