"""Check a run of any size on a laptop: build one rank of each kind without allocating memory, verify the pipeline plan,
and report sizes.

Stages are built on the meta device in a mesh without process groups, so a 128-rank layout needs only one process. All
tensor and data ranks of a stage hold blocks of equal size, except that the last tensor rank may hold less of the
vocabulary. So only the first and the last tensor rank of the first data rank are built.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from mega.core.architecture import active_parameters, parameters
from mega.core.config.resolve import data_parallel, microbatches, no_overlap_reason, overlaps_exchanges
from mega.core.parallel.weight import local_parameters
from mega.core.plan import plan, prove, simulate
from mega.core.training.start.inputs import Inputs
from mega.core.training.start.introduce import expert_axes, overlap_note
from mega.core.training.wire import build_mesh, build_stages


def dry_run(inputs: Inputs, world: int) -> None:
    """Build the stages, verify the pipeline plan, and print the sizes. Errors: the ValueError that training would raise
    for an invalid layout."""
    run, console = inputs.run, Console(highlight=False)
    parallel, dp = run.parallel, data_parallel(inputs.run, world)
    axes = [f"tp {parallel.tp} x cp {parallel.cp} x dp {dp} x pp {parallel.pp}", *expert_axes(run)]
    table = Table(title=f"{world} ranks: {'; '.join(axes)}")
    for column in ("stage", "ranks", "blocks", "ends", "parameters per rank"):
        table.add_column(column, justify="right")
    stride = parallel.tp * parallel.cp * dp
    for stage in range(parallel.pp):
        sizes = set()
        for tensor_rank in sorted({0, parallel.tp - 1}):
            mesh = build_mesh(run, stage * stride + tensor_rank, world)
            chunks = build_stages(run, mesh, torch.device("meta"))
            sizes.add(sum(local_parameters(chunk) for chunk in chunks))
        blocks = ", ".join(_run_of([unit for unit in chunk.units if isinstance(unit, int)]) for chunk in chunks)
        ends = [unit for chunk in chunks for unit in chunk.units if isinstance(unit, str)]
        ranks = f"{stage * stride}-{(stage + 1) * stride - 1}" if stride > 1 else str(stage)
        table.add_row(str(stage), ranks, blocks, " + ".join(ends), " or ".join(f"{size:,}" for size in sorted(sizes)))
    console.print(table)
    count = microbatches(run, world)
    schedule = plan(parallel.schedule, parallel.pp, parallel.chunks, count)
    prove(schedule)
    bubble = simulate(schedule).bubble
    active = f", {active_parameters(run.model):,} active" if run.model.experts else ""
    console.print(f"model: {parameters(run.model):,} parameters{active}")
    console.print(f"plan: {parallel.schedule}, {count} microbatches a step, proven; bubble {100 * bubble:.1f}%")
    if parallel.tp > 1:
        console.print(overlap_note(run, overlaps_exchanges(run), None, no_overlap_reason(run)))
    for note in inputs.notes:
        console.print(note, markup=False, emoji=False)
    console.print("everything checked, nothing trained")


def _run_of(numbers: list[int]) -> str:
    """Format consecutive block indices as a range.

    >>> _run_of([4, 5, 6]), _run_of([3]), _run_of([])
    ('4-6', '3', 'none')
    """
    if not numbers:
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
