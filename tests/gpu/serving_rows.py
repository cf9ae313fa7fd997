"""Rows of serving at a layout, by one engine that is opened once: the first burst, the second, and what a step takes.

    python -m tests.gpu.serving_rows --out rows.jsonl [--tp 2] [--pp 2] [--model llama2-7b] [--rows burst stream ...]

    burst     64 requests of 512 tokens in and 128 out, at once, right after the engine is warmed up; and once more
    stream    one request alone
    greedy    one request alone, of the likeliest tokens: random weights repeat themselves then
    prompts   8 prompts of 2,048 tokens, of which one token is asked
    rate      256 requests, at 80 % of the second burst's requests a second
    profile   kernels of steps of one row and of 64, by time

A model of random weights, prompts of random tokens. A JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from mega.core.bench import serving as serving_bench
from mega.core.bench.load import Load, run_on_engine, summary
from mega.core.bench.serving import ServingBench, engine_of_plan
from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.device import Device
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.parallel.linear import RowLinear
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise
from mega.core.processes.connect import connect
from mega.core.processes.launch import run_ranks
from tests.gpu.serving import SMALL, ask, busy, drain

ROWS = ("burst", "stream", "greedy", "prompts", "rate", "profile")


def measure(arguments: Sequence[str]) -> int:
    """One rank's part."""
    given = parsed(arguments)
    world, device, groups = connect(given.device)
    mesh, began = Mesh(world.rank, tp=given.tp, pp=given.pp, groups=groups), time.perf_counter()
    if device.is_cuda:
        torch.zeros(1, device=device.torch)
    if given.repeating:
        serving_bench.initialise = repeating  # type: ignore[assignment]
    options = EngineOptions(
        max_requests=64, cuda_graph=given.graphs, prefill_chunk=given.chunk, speculate=given.speculate
    )
    flags = {} if device.is_cuda else SMALL
    if given.layers is not None:
        flags = {**flags, "layers": given.layers}
    model = model_alone(compose(given.model, flags=flags))
    plan = ServingBench(model=model, engine=options, tp=given.tp, pp=given.pp, dtype=given.dtype)
    engine, what = engine_of_plan(plan, mesh, device)
    if engine is None:
        return 0
    layout = {
        "tp": given.tp,
        "pp": given.pp,
        "device": device.name,
        "what": what,
        "speculate": given.speculate,
        "torch": torch.__version__,
    }

    def report(row_name: str, **values: Any) -> None:
        line = json.dumps({"row": row_name, **layout, **values})
        print(line, flush=True)
        with open(given.out, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    opened = time.perf_counter() - began
    warm = engine.warm_up()
    report("ready", opened=opened, warm=warm, seconds={str(tuple(k)): v for k, v in engine.chunks._seconds.items()})
    per_second = 0.0
    scale = 1 if device.is_cuda else 16
    for name in given.rows:
        if name == "burst":
            for turn in ("first burst", "second burst"):
                row = of_load(engine, Load(0, 64 // scale, 512 // scale, 128 // scale), turn)
                per_second = row["requests_per_second"]
                report(turn, **row)
        elif name == "stream":
            report(name, **of_load(engine, Load(0, 1, 512 // scale, 128), "warm"))
            report(name, **of_load(engine, Load(0, 1, 511 // scale, 256), name))
        elif name == "greedy":
            report(name, **greedily(engine))
        elif name == "prompts":
            for turn in ("warm", name):
                row = of_load(engine, Load(0, 8, 2048 // scale, 1), turn)
            report(name, prompt_tokens_per_second=8 * 2048 // scale / row["seconds"], **row)
        elif name == "rate":
            report(
                name, **of_load(engine, Load(0.8 * per_second or 1.0, 256 // scale, 512 // scale, 128 // scale), name)
            )
        else:
            profiled(engine, device)
    engine.close()
    return 0


def of_load(engine: Any, load: Load, seed: str) -> dict[str, Any]:
    """last first: seconds until every request has a token. Prompts differ by seed."""
    prompts = load.prompts

    class Seeded(Load):
        def prompts(self, vocab: int) -> list[tuple[int, ...]]:
            shift = sum(map(ord, seed))
            return [tuple((token + shift) % vocab for token in each) for each in prompts(vocab)]

    timings = run_on_engine(engine, Seeded(load.rate, load.requests, load.prompt, load.new))
    found = summary(load, timings).fields()
    return {**found, "last_first": max(each.tokens[0] - each.arrival for each in timings)}


def said(engine: Any, prompt: tuple[int, ...], new: int) -> list[int]:
    engine.add(Request(prompt=prompt, tokens=new, sampling=Sampling(temperature=0.0)))
    ids: list[int] = []
    while not engine.idle:
        ids += [event.token for event in engine.step()]
    return ids


def greedily(engine: Any, new: int = 256) -> dict[str, Any]:
    """steps: of new tokens, of which there are `new`. seconds: after the first token. The prompt has what the model
    says to its beginning, so the answer repeats it where that depends on the last token alone."""
    prompt = tuple((7919 * at + 13) % engine.limits.vocab for at in range(64))
    prompt = (*prompt, *said(engine, prompt, new))
    engine.add(Request(prompt=prompt, tokens=new, sampling=Sampling(temperature=0.0)))
    times, ids, steps = list[float](), list[int](), 0
    while not engine.idle:
        events = engine.step()
        steps += bool(events)
        times += [time.perf_counter()] * len(events)
        ids += [event.token for event in events]
    return {"new": new, "steps": steps, "seconds": times[-1] - times[0], "digest": hash(tuple(ids)), "ids": ids[-8:]}


def repeating(stage: Any, seed: int) -> None:
    """No branch adds to the residual stream, so greedy text runs into a circle."""
    initialise(stage, seed)
    for module in stage.modules():
        if isinstance(module, RowLinear):
            module.weight.data.zero_()


def profiled(engine: Any, device: Device) -> None:
    for rows in (1, 64):
        ask(engine, rows)
        while any(sequence.pending > 1 for answer in engine._scheduler._running for sequence in answer.sequences) or (
            engine._scheduler._waiting
        ):
            engine.step()
        for _ in range(8):
            engine.step()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(16):
            engine.step()
        took = 1e3 * (time.perf_counter() - began) / 16
        works, lines = busy(device, engine.step)
        print(f"decode of {rows} rows: {took:.3f} ms a step, the device busy {works:.3f} ms", flush=True)
        print("\n".join(lines), flush=True)
        drain(engine)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int, help="fewer blocks")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--speculate")
    parser.add_argument(
        "--repeating", action="store_true", help="a model whose next token depends on the last one alone"
    )
    parser.add_argument("--graphs", type=lambda text: text == "yes", default=None)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    import sys

    from tests.gpu import serving_rows  # by name, for the ranks

    asked = parsed(sys.argv[1:])
    raise SystemExit(run_ranks(asked.tp * asked.pp, serving_rows.measure, sys.argv[1:]))
