"""What a step of decoding costs on a GPU: each product of Llama-2 7B in tiles of many sizes, and whole steps.

python3 -m tests.gpu.decoding [--products] [--steps] [--first 8] [--only fp8]

Each product is recorded as a graph of many, by weights that take turns, so that no cache holds them. Of every product
the fastest variants come first, one a line, with what cuBLAS takes; `<-` marks what the code chooses. They are compiled
before, by processes next to each other. With neither flag, both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.device import Device, Recording
from mega.core.inference.loading.load import empty_stage
from mega.core.inference.paged_cache import PagedCache
from mega.core.model.decode import DecodeStep
from mega.core.model.forward import rotary_tables
from mega.core.ops.few_rows import PLAIN, NormOf
from mega.core.ops.fp8_weights import narrowed
from mega.core.ops.kernels import few_rows, fp8_weights, language
from mega.core.ops.matmuls import Factor
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise

SHAPES = {"qkv": (12288, 4096), "out": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
WHERE, DTYPE = "cuda", torch.bfloat16
ROTATED, LAUNCHES = 400 << 20, 48
"""Bytes of the weights that take turns; products of one graph."""
PROCESSES = 12
GEMMS = {
    16: [(16, 64, 128, 4, 4), (16, 64, 256, 4, 3), (16, 128, 128, 4, 4), (16, 128, 128, 8, 4)],
    64: [(64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 128, 128, 8, 3), (64, 64, 64, 4, 5)],
    512: [(128, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (256, 128, 64, 8, 3)],
}
"""Tiles that are tried of so many rows."""


@dataclass
class Product:
    """One to measure: `run(factor)` by a weight of `name`, which is fp8 or not."""

    name: str
    narrow: bool
    rows: int
    label: str
    run: Callable[[Factor], Any]
    overlap: bool = False
    chosen: bool = False


def inputs(name: str, rows: int) -> dict[str, Any]:
    """What a block gives the product beside the weight."""
    outs, ins = SHAPES[name]
    torch.manual_seed(0)
    x = torch.randn(rows, ins, device=WHERE).to(DTYPE)
    norm = NormOf(torch.rand(ins, device=WHERE).to(DTYPE), None, 1e-5) if name in ("qkv", "gate_up") else None
    into = torch.zeros(rows, outs, device=WHERE, dtype=DTYPE) if name in ("out", "down") else None
    return {"x": x, "norm": norm, "activation": "swiglu" if name == "gate_up" else None, "into": into}


def tiles(name: str, narrow: bool) -> Iterator[few_rows.RowTile]:
    """outs, warps, chunk, stages. Those of fp8 by what sm_90 needs for them: fewer than 5 instructions a weight."""
    ins, gate = SHAPES[name][1], name == "gate_up"
    if not narrow:
        for tall in [1, 2, 4] if gate or ins > 8192 else [2, 4, 8]:
            yield from (few_rows.RowTile(tall, warps) for warps in ((4, 8) if ins <= 8192 else (8, 16)))
        return
    for tall, warps in [(8, 4), (4, 4), (8, 8), (16, 8)] if ins > 8192 else [(4, 2), (8, 2), (8, 4), (16, 4), (16, 8)]:
        yield few_rows.RowTile(tall // (1 + gate), warps)
    for tall, warps, chunk, stages in (
        (8, 4, 512, 3),  # the fastest until threads added up by eights
        (8, 1, 512, 4),
        (16, 1, 512, 4),
        (4, 2, 1024, 4),
        (8, 2, 1024, 3),
        (8, 2, 1024, 4),
        (16, 2, 1024, 3),
        (16, 2, 1024, 4),
        (8, 4, 2048, 3),
        (16, 4, 2048, 3),
        (32, 4, 1024, 4),
    ):
        yield few_rows.RowTile(tall // (1 + gate), warps, chunk, stages)


def products(only: str | None) -> Iterator[Product]:
    """only: "fp8" for one row by weights in fp8, with overlap."""
    for name, (outs, ins) in SHAPES.items():
        for narrow in (False, True) if only is None else (True,):
            given, gate = inputs(name, 1), name == "gate_up"
            chosen = few_rows.tile_of(outs // (1 + gate), ins, 1 if narrow else 2, gate)
            for tile in dict.fromkeys([chosen, *tiles(name, narrow)]):
                run = partial(by_few_rows, given, tile)
                for overlap in (False, True) if only is None else (True,):
                    ours = tile == chosen and overlap == language.OVERLAP
                    yield Product(name, narrow, 1, str(tuple(tile)), run, overlap, ours)
        if only is not None:
            continue
        yield from by_tiles(name)
        for rows in (1, 4, 16, 64, 512):
            x = inputs(name, rows)["x"]
            yield Product(name, False, rows, "cuBLAS, the product alone", partial(by_cublas, x))


def by_cublas(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    return x @ factor.weight.t()


def by_few_rows(given: dict[str, Any], tile: few_rows.RowTile, factor: Factor) -> torch.Tensor:
    return few_rows.linear(given["x"], factor, given["norm"], given["activation"], given["into"], tile)


def by_tiles(name: str) -> Iterator[Product]:
    """The tensor cores' kernel: tiles and shares."""
    outs, ins = SHAPES[name]
    for rows, several in GEMMS.items():
        x = inputs(name, rows)["x"]
        for narrow in (True, False) if rows == 16 else (True,):
            for tile in [fp8_weights.GemmTile(*each) for each in several]:
                count = -(-outs // tile.outs) * -(-rows // tile.rows)
                chosen = fp8_weights.shares_of(count, ins, tile)
                for shares in sorted({1, chosen, *((2, 4) if rows < 512 and count < 264 else ())}):
                    ours = narrow and tile == fp8_weights.tile_of(rows) and shares == chosen
                    run = partial(by_tile, x, tile, shares)
                    yield Product(name, narrow, rows, f"tiled {tuple(tile)} shares {shares}", run, False, ours)


def by_tile(x: torch.Tensor, tile: fp8_weights.GemmTile, shares: int, factor: Factor) -> torch.Tensor:
    scale = factor.scale
    if scale is None:
        scale = torch.ones(len(factor.weight), device=WHERE)
    return fp8_weights.tiled(x, factor.weight, scale, tile, shares)


def factors(name: str, narrow: bool, copies: int | None = None) -> list[Factor]:
    outs, ins = SHAPES[name]
    size = outs * ins * (1 if narrow else 2)
    torch.manual_seed(1)
    made = []
    for _ in range(copies or max(3, -(-ROTATED // size))):
        weight = (torch.randn(outs, ins, device=WHERE) / ins**0.5).to(DTYPE)
        low, scale = narrowed(weight) if narrow else (weight, None)
        made.append(Factor(low, None, scale))
    return made


def played(graph: Recording, times: int) -> list[float]:
    """Milliseconds of each play."""
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.play()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def microseconds(one: Product, several: list[Factor]) -> float:
    """Of one product, the best of some plays."""

    def work() -> None:
        for number in range(LAUNCHES):
            one.run(several[number % len(several)])

    work()
    torch.cuda.synchronize()
    graph = Recording(work)
    return 1e3 * min(played(graph, 4)) / LAUNCHES


def error(one: Product, factor: Factor) -> float:
    """Relative, against fp32; of cuBLAS and the tensor cores' kernel, against the product alone."""
    given = inputs(one.name, one.rows)
    for name in ("x", "into"):
        given[name] = None if given[name] is None else given[name].float()
    whole = one.label.startswith("(")
    if whole and given["norm"] is not None:
        given["norm"] = NormOf(given["norm"].weight.float(), None, 1e-5)
    wide = Factor(factor.weight.float(), None, factor.scale)
    norm, activation = (given["norm"], given["activation"]) if whole else (None, None)
    exact = PLAIN.linear(given["x"], wide, norm, activation, None)
    return float((one.run(factor).float() - exact).norm() / exact.norm())


def measure_products(first: int, only: str | None) -> None:
    several: list[Factor] = []
    held: tuple[Any, ...] = ()
    rows: dict[tuple[str, bool, int], list[tuple[float, str]]] = {}
    for one in sorted(products(only), key=lambda each: (each.name, each.narrow)):
        if held != (one.name, one.narrow):
            several.clear()
            several, held = factors(one.name, one.narrow), (one.name, one.narrow)
        bytes_ = several[0].weight.numel() * several[0].weight.element_size()
        language.OVERLAP = one.overlap
        try:
            took = microseconds(one, several)
            clear(one)
            off = error(one, several[0])
            said = f"{took:8.2f} us {bytes_ / took / 1e6:5.2f} TB/s  error {off:.1e}"
        except Exception as failed:  # a tile that needs more than the device has
            took, said = float("inf"), f"{type(failed).__name__}: {str(failed).splitlines()[0][:70]}"
        said += f"  {one.label}{' overlap' if one.overlap else ''}{'  <-' if one.chosen else ''}"
        rows.setdefault((one.name, one.narrow, one.rows), []).append((took, said))
    for (name, narrow, count), lines in rows.items():
        print(f"\n{name} {SHAPES[name]} {'fp8' if narrow else 'bf16'}, rows {count}")
        for place, (_, said) in enumerate(sorted(lines)):
            if place < first or "<-" in said or "cuBLAS" in said:
                print(said)
    sys.stdout.flush()


def clear(one: Product) -> None:
    """The stream that it adds to begins at 0 again."""
    given = getattr(one.run, "args", (None,))[0]
    if isinstance(given, dict) and given["into"] is not None:
        given["into"].zero_()


def compile_share(index: int, count: int, only: str | None) -> None:
    """Run every n-th variant once, so that its binary lies in Triton's cache."""
    held: dict[tuple[str, bool], Factor] = {}
    for number, one in enumerate(products(only)):
        if number % count == index and "cuBLAS" not in one.label:
            if (one.name, one.narrow) not in held:
                (held[one.name, one.narrow],) = factors(one.name, one.narrow, 1)
            language.OVERLAP = one.overlap
            try:
                one.run(held[one.name, one.narrow])
            except Exception as failed:
                print(f"{one.name} {one.label}: {str(failed).splitlines()[0][:90]}", file=sys.stderr)
    torch.cuda.synchronize()


def measure_steps(lengths: int = 600, layers: int | None = None) -> None:
    """Whole steps, without sampling, of a 7B of random weights, played from a graph; then kernels by time."""
    device = Device.choose(WHERE)
    model = model_alone(compose("llama2-7b", flags={} if layers is None else {"layers": layers}))
    for narrow in (False, True):
        ops = forward_only(choose(device.torch, DTYPE), fp8_weights=narrow)
        stage = empty_stage(model, Mesh.at(0), device, DTYPE, ops=ops)
        initialise(stage, 1)
        decode = DecodeStep(stage.eval())
        for rows, overlap in ((1, False), (1, True), (4, False), (16, False), (64, False)):
            language.OVERLAP = overlap
            took, busy = step_time(stage, decode, rows, lengths)
            print(f"step {'fp8' if narrow else 'bf16'} rows {rows:3}{' overlap' if overlap else ''}: {took:.3f} ms")
            print(busy, flush=True)
        del stage, decode
        torch.cuda.empty_cache()


@torch.inference_mode()
def step_time(stage: Any, decode: DecodeStep, rows: int, length: int) -> tuple[float, str]:
    model, block = stage.model, 16
    width = -(-length // block)
    shape = (model.layers, 1 + rows * width, block, 2, model.kv_heads, model.head_dim)
    pool = torch.randn(shape, device=WHERE, dtype=DTYPE)
    angles = rotary_tables(stage.architecture.ropes, torch.arange(model.positions, device=WHERE), DTYPE)
    none = [None] * model.layers
    cache = PagedCache(pool, 0, stage.ops.paged_attention, model.heads // model.kv_heads, none, angles)
    tables = 1 + np.arange(rows * width).reshape(rows, width)
    ones = np.ones(rows, dtype=np.int64)
    pages = cache.pages(ones, ones * length, tables)
    slots = torch.from_numpy(tables[:, -1] * block + (length - 1) % block).to(WHERE)
    ids = torch.arange(rows, device=WHERE)
    positions, wanted = torch.full_like(ids, length - 1), torch.arange(rows, device=WHERE)

    def work() -> None:
        cache.begin(slots, pages)
        decode(ids, positions, wanted, cache)

    work()
    torch.cuda.synchronize()
    graph = Recording(work)
    found = played(graph, 12)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.play()
        torch.cuda.synchronize()
    by = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in by)
    lines = [f"    {each.self_device_time_total:8.0f} us {each.count:4} x {each.key[:70]}" for each in by[:8]]
    return sorted(found)[len(found) // 2], "\n".join([f"    busy {busy / 1e3:.3f} ms", *lines])


def main() -> None:
    torch.set_grad_enabled(False)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--first", type=int, default=8, help="variants shown of each product")
    parser.add_argument("--only", choices=["fp8"], help="products of one row by weights in fp8")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share:
        index, count = (int(number) for number in given.share.split("/"))
        compile_share(index, count, given.only)
        return
    start = time.time()
    if given.steps or not given.products:
        measure_steps()
        print(f"{time.time() - start:.0f} s", flush=True)
    if given.products or not given.steps:
        line = [sys.executable, "-m", "tests.gpu.decoding", *(["--only", given.only] if given.only else []), "--share"]
        for child in [subprocess.Popen([*line, f"{n}/{PROCESSES}"], env=os.environ) for n in range(PROCESSES)]:
            child.wait()
        print(f"compiled after {time.time() - start:.0f} s", flush=True)
        measure_products(given.first, given.only)
        print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
