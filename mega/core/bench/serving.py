"""`mega bench serve`: measure an engine or a running server under load; print a table, and write JSON rows and a plot.

The engine is the one that `mega serve` uses, but without HTTP, with the weights of a checkpoint or random weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mega.core.architecture import architecture
from mega.core.architecture.words import size_words
from mega.core.bench.load import (
    Load,
    ServingRow,
    Timing,
    plot,
    run_on_engine,
    run_on_server,
    summary,
    table,
    vocabulary,
)
from mega.core.bench.options import ServingLoadOptions
from mega.core.config.sections import ModelConfig
from mega.core.device import DTYPES, Device
from mega.core.files import whole_file
from mega.core.inference.capacity import even_layers
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.loading.load import empty_stage, open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import check_layout, engine_on, start_engine
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise
from mega.core.processes.connect import connect

_WARM = 4
"""Number of requests in the warm-up."""


@dataclass(frozen=True, kw_only=True)
class ServingBench:
    """What to measure: the server at `serving.url` or, if there is no URL, an engine. The engine has the weights of
    `load` or, without `load`, random weights for `model`."""

    serving: ServingLoadOptions = field(default_factory=ServingLoadOptions)
    load: str | None = None
    """Path or name of a checkpoint or of other weights; None for random weights."""
    model: ModelConfig | None = None
    """The model for random weights."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    tp: int = 1
    pp: int = 1
    dtype: str | None = None
    """The value of --dtype, such as "fp32"; None for the dtype that `mega serve` would choose."""
    device: str = "auto"
    backend: str = "auto"
    out: str | None = None
    """File to which a line of JSON is written for each rate."""

    @property
    def loads(self) -> tuple[Load, ...]:
        """One load for each rate."""
        serving = self.serving
        return tuple(
            Load(rate, serving.requests, serving.prompt_tokens, serving.new_tokens) for rate in serving.rate or (0.0,)
        )


def bench_url(plan: ServingBench) -> int:
    """Measure a server. Errors: ValueError naming flag and address; OSError if no server answers."""
    url = plan.serving.url
    assert url is not None
    vocab = vocabulary(url)
    first = plan.loads[0]
    run_on_server(url, Load(0, _WARM, first.prompt, first.new), vocab)
    _measure(plan, f"{url}, through HTTP", lambda load: run_on_server(url, load, vocab))
    return 0


def bench_engine(plan: ServingBench) -> int:
    """Measure an engine, as one of the engine's ranks. Errors: as in `start_engine`; ValueError if a load does not
    fit."""
    world, device, groups = connect(plan.device, plan.backend)
    mesh = Mesh(world.rank, tp=plan.tp, pp=plan.pp, groups=groups)
    engine, title = engine_of_plan(plan, mesh, device)
    if engine is None:
        return 0
    if device.is_cuda:
        title += f", warmed up in {engine.warm_up():.1f} s,"
    first = plan.loads[0]
    run_on_engine(engine, Load(0, _WARM, first.prompt, first.new))
    _measure(plan, f"{title} on {world.size} x {device.name}", lambda load: run_on_engine(engine, load))
    engine.close()
    return 0


def engine_of_plan(plan: ServingBench, mesh: Mesh, device: Device) -> tuple[BatchingEngine | None, str]:
    """Return the engine to measure, or None as in `start_engine`, and a description of the engine."""
    dtype_of_plan = DTYPES[plan.dtype] if plan.dtype is not None else None if device.is_cuda else DTYPES["fp32"]
    if plan.load is not None:
        checkpoint = open_model(plan.load)
        return start_engine(checkpoint, mesh, device, plan.engine, dtype=dtype_of_plan), plan.load
    model = plan.model
    assert model is not None
    check_layout(model, plan.tp, plan.pp, plan.engine)
    layers, dtype = even_layers(len(architecture(model).layers), plan.pp), dtype_of_plan or DTYPES["bf16"]
    ops = forward_only(choose(device.torch, dtype), fp8_weights=plan.engine.fp8_weights)
    stage = empty_stage(model, mesh, device, dtype, ops=ops, stage_layers=layers)
    initialise(stage, 1)
    name = f"{size_words(architecture(model))}, random weights, {str(dtype).split('.')[-1]}"
    return engine_on(stage.eval(), mesh, device, plan.engine), name


def _measure(plan: ServingBench, title: str, run: Callable[[Load], Sequence[Timing]]) -> None:
    rows: list[ServingRow] = []
    load = plan.loads[0]
    title = f"{title}: {load.prompt} tokens in, {load.new} out"
    print(title)
    for load in plan.loads:
        row = summary(load, run(load))
        rows.append(row)
        lines = table(rows).splitlines()
        print("\n".join(lines[:2] if len(rows) == 1 else []) + "\n" * (len(rows) == 1) + lines[-1], flush=True)
        if row.failed:
            print(f"--rate {load.rate:g}: {row.failed} of {row.requests} requests failed", file=sys.stderr)
        if plan.out is not None:
            with open(plan.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({**row.fields(), "what": title}) + "\n")
    if plan.serving.draw is not None:
        with whole_file(plan.serving.draw) as out:
            out.write(plot(rows, title).encode())
