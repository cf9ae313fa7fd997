"""Where the time of serving goes on a device: steps, how long the device is busy in them, and its kernels by name.

    python -m tests.gpu.serving [--model llama2-7b] [--rows 1 64] [--fp8-weights] [--device cuda]

A model of random weights, prompts of random tokens. For each number of rows, all requests at once:

    whole     requests to the last token of all, and new tokens a second
    decode    a step of one token a row: by the clock over many steps, and the device's work in some more
    mixed     a step of a prompt's tokens with the rows that decode by then, likewise

Steps overlap, so a step is the clock's time of many over their number; what the clock has more than the device's work
is the device waiting.
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mega.core.bench.serving import ServingBench, engine_of_plan
from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.device import Device
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.parallel.mesh import Mesh
from mega.core.processes.connect import connect

PROMPT, NEW, STEPS, PROFILED, SHOWN = 512, 128, 16, 4, 14


SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 512, "positions": 1024}
"""To try this file on a CPU."""

draw = random.Random(1)


def ask(engine: Any, rows: int) -> None:
    """No prompt begins like one before it."""
    for number in range(rows):
        prompt = tuple(draw.randrange(engine.limits.vocab) for _ in range(PROMPT))
        engine.add(Request(prompt=prompt, tokens=NEW, sampling=Sampling(seed=number)))


def drain(engine: Any) -> None:
    for number in range(engine._scheduler._numbers):
        engine.cancel(number)
    while not engine.idle:
        engine.step()


def busy(device: Device, step: Callable[[], Any]) -> tuple[float, Iterator[str]]:
    """Milliseconds of a step's kernels, and a line for each of the longest."""
    device.synchronize()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    with profile(activities=kinds) as found:
        for _ in range(PROFILED):
            step()
        device.synchronize()
    took, count = collections.Counter[str](), collections.Counter[str]()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
    lines = (
        f"    {us / PROFILED / 1e3:8.3f} ms {count[name] / PROFILED:7.1f} x  {name[:90]}"
        for name, us in took.most_common(SHOWN)
    )
    return sum(took.values()) / PROFILED / 1e3, lines


def timed(device: Device, name: str, step: Callable[[], Any], steps: int) -> None:
    """`steps` steps by the clock, then PROFILED ones by the profiler."""
    step()
    device.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    device.synchronize()
    took = 1e3 * (time.perf_counter() - began) / steps
    works, lines = busy(device, step)
    print(f"  {name}: {took:.3f} ms a step, the device busy {works:.3f} ms, waiting {took - works:.3f} ms", flush=True)
    print("\n".join(lines))


def measure(engine: Any, device: Device, rows: int) -> None:
    device.synchronize()
    began = time.perf_counter()
    ask(engine, rows)
    while not engine.idle:
        engine.step()
    whole = time.perf_counter() - began
    print(f"{rows} rows: {whole:.3f} s, {rows * NEW / whole:,.0f} new tokens/s", flush=True)
    ask(engine, rows)
    for _ in range(rows + 2):  # a prompt a step
        engine.step()
    timed(device, "decode", engine.step, STEPS)
    drain(engine)
    if rows > STEPS + PROFILED:
        ask(engine, rows)
        for _ in range((rows - STEPS - PROFILED) // 2):
            engine.step()
        timed(device, f"mixed, around {rows // 2} rows and a prompt of {PROMPT}", engine.step, STEPS)
        drain(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--fp8-weights", action="store_true")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    world, device, groups = connect(given.device, "auto")
    mesh, began = Mesh(world.rank, tp=1, pp=1, groups=groups), time.perf_counter()
    options = EngineOptions(max_requests=max(given.rows), fp8_weights=given.fp8_weights)
    model = model_alone(compose(given.model, flags={} if device.is_cuda else SMALL))
    plan = ServingBench(model=model, engine=options, dtype="bf16")
    engine, what = engine_of_plan(plan, mesh, device)
    assert engine is not None
    print(f"{what}: opened in {time.perf_counter() - began:.1f} s, warmed up in {engine.warm_up():.1f} s", flush=True)
    for rows in given.rows:
        measure(engine, device, rows)
    engine.close()


if __name__ == "__main__":
    main()
