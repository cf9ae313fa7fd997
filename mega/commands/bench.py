"""`mega bench`: how fast a run is on this machine, on random tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from mega.core.config.compose import Asked
from mega.core.config.run import RunConfig, updated
from mega.core.config.world import ranks, world_from_env


def run(
    run: RunConfig,
    asked: Asked,
    rows: Annotated[
        list[str] | None, typer.Argument(help="w1, w2, w2-fp8 or w3; without one, the run that the flags say")
    ] = None,
    repeats: Annotated[int, typer.Option(help="timed steps; their median counts", min=1)] = 7,
    warmup: Annotated[int, typer.Option(help="steps before those", min=1)] = 5,
    json: Annotated[str | None, typer.Option(help="file that gets one JSON line a row")] = None,
    against: Annotated[str | None, typer.Option(help="such a file of another time, to compare with")] = None,
    trace: Annotated[str | None, typer.Option(help="file for one step's trace, for Perfetto")] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="measure this machine instead, into a .toml that memory-estimate --gpu reads")
    ] = None,
) -> int:
    """Measure speed: the trainer's own step on random tokens, one row after another in one process group.

    Rows: w1 is GPT 345M, w2 Llama-2 7B, w2-fp8 the same by --fp8, w3 GPT 22B by tensor ranks. Batch and layout of a row
    follow the number of ranks; any flag that you type stands above the row.
    """
    world = world_from_env()
    size = ranks(world, run.runtime.nproc)
    if calibrate is not None:
        return _calibrate(run, calibrate, repeats, world.source == "alone" and size > 1, size)
    from mega.core.config.check import check
    from mega.core.config.resolve import resolve
    from mega.core.training import bench

    if rows and asked.preset is not None:
        raise ValueError(f"--model {asked.preset}: excludes rows, which say their model; leave out one of them")
    runs = [(name, bench.row(name, asked.values, size)) for name in rows or ()] or [("run", run)]
    # Neither data nor a length is asked for: the rules of a run want both.
    runs = [(name, updated(one, {"mock_data": True, "steps": warmup + repeats})) for name, one in runs]
    for _, one in runs:
        check(one, size)
    resolved = [(name, resolve(one, size)) for name, one in runs]
    job = partial(bench.bench, repeats=repeats, warmup=warmup, out=json, against=against, trace=trace)
    if world.source != "alone" or size == 1:
        return job(resolved)
    from mega.core.parallel.launch import launch

    return launch(size, job, resolved)


def _calibrate(run: RunConfig, out: str, repeats: int, start: bool, size: int) -> int:
    if not out.endswith(".toml"):
        raise ValueError(f"--calibrate {out}: must end in .toml, as memory-estimate --gpu tells files from names")
    from mega.core.training.calibrate import calibrate

    runtime = run.runtime
    arguments = (out, runtime.device, runtime.backend, runtime.timeout_minutes, repeats)
    if not start:
        return calibrate(*arguments)
    from mega.core.parallel.launch import launch

    return launch(size, calibrate, *arguments)
