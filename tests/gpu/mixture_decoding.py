"""A step of decoding of a mixture of experts on a GPU, played from a graph, against the time to read its weights once.

    python3 -m tests.gpu.mixture_decoding --out rows.jsonl [--only mixtral,qwen3] [--tiles] [--profile]

    mixtral     8 layers of Mixtral 8x7B
    qwen3       16 layers of Qwen3-30B-A3B

Steps of 1 to 64 sequences of 600 tokens, without sampling; random weights. A row has the milliseconds of a step by
grouped GEMMs over sorted rows and by the kernels for few tokens, and `read`: the bytes of the weights that the step
reads (experts without tokens are not read) over the time, as a share of the copy rate measured here, and of the data
sheet's. --tiles: tries other tiles of the kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.device import Device
from mega.core.inference.loading.load import empty_stage
from mega.core.model.decode import DecodeStep
from mega.core.model.experts import ExpertLayer
from mega.core.ops.kernels import few_experts, language
from mega.core.ops.kernels.few_experts import ExpertTile
from mega.core.ops.kernels.few_rows import RowTile
from mega.core.ops.routing import route
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise
from tests.gpu.decoding import DTYPE, WHERE, step_time

MODELS = {"mixtral": ("mixtral-8x7b", 8), "qwen3": ("qwen3-30b-a3b", 16)}
ROWS = (1, 2, 4, 16, 64)
SHEET = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second."""


def copy_rate() -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    source = torch.randn(1 << 29, device=WHERE)
    target = torch.empty_like(source)
    found = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return 2 * source.nbytes / (1e-3 * sorted(found)[4])


@contextmanager
def experts_read(stage: Any) -> Iterator[list[int]]:
    """The number of experts that each layer reads in the steps within; the kernels are called as usual."""
    counts: list[int] = []
    run = few_experts.run

    def counting(x: torch.Tensor, weights: Any, rule: Any, norm: Any, into: Any) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            from mega.core.ops.norm import add_norm

            normed = x if norm is None else add_norm(x, None, None, None, *norm)[1]
            logits = normed.float() @ weights.router.float().t()
            counts.append(len(route(logits, rule.router, rule.chosen).chosen.unique()))
        return run(x, weights, rule, norm, into)

    yield_stage = replace(stage.ops.few_experts, run=counting)
    before, stage.ops = stage.ops, replace(stage.ops, few_experts=yield_stage)
    try:
        yield counts
    finally:
        stage.ops = before


def bytes_read(stage: Any, experts: float) -> float:
    """The bytes of the weights of a step in which each mixture reads `experts` experts, without the embedding."""
    total = 0.0
    for module in stage.layers.modules():
        if isinstance(module, ExpertLayer):
            total -= sum(weight.nbytes for weight in module.experts.parameters()) * (1 - experts / module.value.count)
    layers = sum(weight.nbytes for weight in stage.layers.parameters())
    return total + layers + stage.head.weight.nbytes


def measure(name: str, *, tiles: bool, profile: bool) -> Iterator[dict[str, Any]]:
    preset, layers = MODELS[name]
    device = Device.choose(WHERE)
    stage = empty_stage(
        model_alone(compose(preset, flags={"layers": layers})), Mesh.at(0), device, DTYPE,
        ops=forward_only(choose(device.torch, DTYPE)),
    )  # fmt: skip
    initialise(stage, 1)
    stage.eval()
    rate, sheet = copy_rate(), next((rate for card, rate in SHEET.items() if card in device.name), None)
    ours = stage.ops
    for rows in ROWS:
        stage.ops = replace(ours, few_experts=None)
        plain, busy = step_time(stage, DecodeStep(stage), rows, 600)
        if profile:
            print(f"{name} rows {rows}, grouped: {plain:.3f} ms\n{busy}", flush=True)
        stage.ops = ours
        if profile:
            language.OVERLAP = False
            alone, busy = step_time(stage, DecodeStep(stage), rows, 600)
            print(f"{name} rows {rows}, kernels one after the other: {alone:.3f} ms\n{busy}", flush=True)
            language.OVERLAP = True
        with experts_read(stage) as counts:
            took, busy = step_time(stage, DecodeStep(stage), rows, 600)
        if profile:
            print(f"{name} rows {rows}, kernels: {took:.3f} ms\n{busy}", flush=True)
        experts = sum(counts[-layers:]) / layers
        moved = bytes_read(stage, experts)
        yield {
            "row": f"{name}, {rows} rows", "layers": layers, "device": device.name, "grouped_ms": plain, "ms": took,
            "experts": experts, "gigabytes": moved / 1e9, "copy": rate,
            "read": moved / (1e-3 * took * rate), "sheet": sheet and moved / (1e-3 * took * sheet),
        }  # fmt: skip
        if tiles:
            yield from tried(stage, name, rows, moved, rate)


def tried(stage: Any, name: str, rows: int, moved: float, rate: float) -> Iterator[dict[str, Any]]:
    """Steps by other tiles."""
    before = few_experts.up_tile, few_experts.down_tile, few_experts.expert_tile
    if rows == 1:
        cases: list[tuple[Any, Any, Any]] = [
            *((RowTile(outs, warps), None, None) for outs in (1, 2, 4) for warps in (4, 8)),
            *((None, tile, None) for tile in (
                RowTile(1, 4), RowTile(2, 4), RowTile(2, 8), RowTile(4, 8), RowTile(8, 4, 256, 4),
                RowTile(4, 4, 512, 3), RowTile(8, 8, 1024, 3), RowTile(8, 8, 2048, 3),
            )),
        ]  # fmt: skip
    else:
        base = few_experts.expert_tile(rows, *((2, 8) if name == "mixtral" else (8, 128)))
        cases = [
            (None, None, ExpertTile(base.rows, *each))
            for each in (
                (32, 128, 4, 4), (64, 64, 3, 4), (64, 64, 5, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 3, 8),
                (128, 64, 4, 8), (32, 64, 4, 4), (64, 128, 3, 8), (32, 256, 3, 4),
            )
        ]  # fmt: skip
    for up, down, several in cases:
        few_experts.up_tile = before[0] if up is None else lambda *_, up=up: up
        few_experts.down_tile = before[1] if down is None else lambda *_, down=down: down
        few_experts.expert_tile = before[2] if several is None else lambda *_, several=several: several
        row = {"row": f"{name}, {rows} rows", "up": up, "down": down, "tile": several}
        try:
            took = step_time(stage, DecodeStep(stage), rows, 600)[0]
            yield {**row, "ms": took, "read": moved / (1e-3 * took * rate)}
        except Exception as failed:  # a tile that needs more than the device has
            yield {**row, "error": str(failed).splitlines()[0][:90]}
    few_experts.up_tile, few_experts.down_tile, few_experts.expert_tile = before


def main() -> None:
    torch.set_grad_enabled(False)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    start = time.time()
    for name in given.only.split(","):
        for row in measure(name, tiles=given.tiles, profile=given.profile):
            line = json.dumps(row)
            print(line, flush=True)
            with open(given.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        torch.cuda.empty_cache()
        print(f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
