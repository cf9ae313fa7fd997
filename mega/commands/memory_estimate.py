"""`mega memory-estimate`: what a run needs and how fast it will be, from its flags alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mega.core.config.check import check
from mega.core.config.run import RunConfig, updated
from mega.core.config.sections import DataConfig
from mega.core.config.world import ranks, world_from_env


def run(
    run: RunConfig,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON value, sizes in bytes")] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="device to plan for: h200, h100, a100, ... or a TOML file; adds the step's time"),
    ] = None,
    megatron: Annotated[bool, typer.Option("--megatron", help="show Megatron-LM's own estimate beside ours")] = False,
    draw: Annotated[Path | None, typer.Option("--draw", help="write the bars to a .svg or .png file")] = None,
    draw_schedule: Annotated[
        Path | None, typer.Option("--draw-schedule", help="write the pipeline's timeline to a .svg or .png file")
    ] = None,
) -> int:
    """Say what a run needs, before it is started.

    Takes the flags of pretrain. Memory is counted as the trainer allocates it, for each pipeline stage; --world says
    for how many ranks. No device and no torch are needed.
    """
    from rich.console import Console

    from mega.core.estimate import show
    from mega.core.estimate.hardware import hardware
    from mega.core.estimate.memory import memory

    resolved, world = planned(run)
    device = hardware(gpu) if gpu is not None else None
    found = memory(resolved, world)
    if draw is not None:
        show.draw(found, show.layout(resolved, world), draw)
    if draw_schedule is not None:
        _draw_schedule(resolved, world, draw_schedule)
    if as_json:
        import json

        print(json.dumps(show.as_json(resolved, world, found)))
        return 0
    console = Console()
    console.print(show.layout(resolved, world), highlight=False)
    console.print(show.table(found))
    for line in show.bars(found):
        console.print(line, soft_wrap=True)
    for text in show.notes(resolved, world, found, device, megatron):
        console.print(text, highlight=False, soft_wrap=True)
    return 0


def planned(run: RunConfig) -> tuple[RunConfig, int]:
    """The run as its ranks would resolve it, and their number. Errors: ValueError, as of a dry run."""
    run = updated(run, {"dry_run": True})
    world = ranks(world_from_env(), run.runtime.nproc, run.runtime.world)
    check(run, world)
    from mega.core.training.prepare import prepare

    # What the token files hold changes nothing here.
    return prepare(replace(run, data=DataConfig(reset_attention=run.data.reset_attention)), world).run, world


def _draw_schedule(run: RunConfig, world: int, path: Path) -> None:
    from mega.core.config.resolve import microbatches
    from mega.core.plan import draw, plan, simulate

    parallel = run.parallel
    assert parallel.schedule is not None
    draw(simulate(plan(parallel.schedule, parallel.pp, parallel.chunks, microbatches(run, world))), path)
