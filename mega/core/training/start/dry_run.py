"""Check a run of any size on a laptop: compare it with the checkpoint from which it would start, build one rank of
each kind without allocating memory, verify the pipeline plan, and report sizes.

Stages are built on the meta device in a mesh without process groups, so a 128-rank layout needs only one process. All
tensor and data ranks of a stage hold blocks of equal size, except that the last tensor rank may hold fewer rows of the
vocabulary. So only the first and the last tensor rank of the first data rank are built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from mega.core.architecture import active_parameters, parameters
from mega.core.config.resolve import (
    data_parallel,
    microbatches,
    no_overlap_reason,
    overlap_resumes,
    overlaps_exchanges,
)
from mega.core.config.run import RunConfig
from mega.core.device import has_cuda
from mega.core.parallel.weight import local_parameters
from mega.core.plan import plan, prove, simulate
from mega.core.processes.connect import threads
from mega.core.processes.world import world_from_env
from mega.core.terminal import print_table
from mega.core.training.saves.place import check_no_newer
from mega.core.training.saves.resume import (
    check_corpora,
    check_resumable,
    find_resume_point,
    overlapped_before,
    progress_of,
)
from mega.core.training.start.continuation import differing, nothing_left, planned, with_former_blends
from mega.core.training.start.inputs import Inputs
from mega.core.training.start.introduce import expert_axes, overlap_note
from mega.core.training.wire import build_mesh, build_stages


def dry_run(inputs: Inputs, world: int) -> None:
    """Compare the run with its checkpoint, build the stages, verify the pipeline plan, and print the sizes. Errors: the
    ValueError that training would raise for an invalid layout, or for a checkpoint from which a run cannot start."""
    run, console = inputs.run, Console(highlight=False)
    report = partial(console.print, markup=False, emoji=False, soft_wrap=True)
    overlaps, overlapped = _compare(inputs, world, report)
    print_table(console, _sizes(run, world))
    parallel, count = run.parallel, microbatches(run, world)
    schedule = plan(parallel.schedule, parallel.pp, parallel.chunks, count)
    prove(schedule)
    bubble = simulate(schedule).bubble
    active = f", {active_parameters(run.model):,} active" if run.model.experts else ""
    report(f"model: {parameters(run.model):,} parameters{active}")
    report(f"plan: {parallel.schedule}, {count} microbatches a step, proven; bubble {100 * bubble:.1f}%")
    if parallel.tp > 1:
        report(overlap_note(run, overlaps, overlapped, no_overlap_reason(run)))
    for note in inputs.notes:
        report(note)
    report("everything checked, nothing trained")


def _compare(inputs: Inputs, world: int, report: Callable[[str], None]) -> tuple[bool, bool | None]:
    """Find the checkpoint from which the run would start, check that the run may start from it, and report the
    differences. Return a pair: whether the exchanges between tensor ranks would overlap GEMMs, and the result of
    `overlapped_before`.

    Only metadata are compared; tensors are read only to verify the checkpoint. Errors: ValueError, as in training.
    """
    run = inputs.run
    point = find_resume_point(run, report)
    overlapped = overlapped_before(run, point)
    overlaps = overlaps_exchanges(run)
    if run.parallel.tp_overlap is None and overlapped is not None:  # a resumed run keeps its setting
        overlaps = overlap_resumes(run, overlapped)
    if point is not None:
        check_resumable(run, point)
        check_corpora(run, point, inputs.datasets)
    inputs, progress = with_former_blends(inputs, point, report), progress_of(point)
    steps = None
    if run.evaluation.skip_train or (run.optimizer.lr is not None and (run.batch.steps or run.batch.samples)):
        steps, _ = planned(inputs, point, progress, report)
    else:  # a dry run may omit the length
        check_no_newer(run, progress.step)
    gpu = _on_gpu(run)
    for line in differing(inputs, point, build_mesh(run, 0, world), _threads(run, gpu), gpu, overlaps, progress.step):
        report(line)
    if point is not None and steps is not None and progress.step >= steps:
        report(nothing_left(steps))
    return overlaps, overlapped


def _on_gpu(run: RunConfig) -> bool | None:
    """Return whether the ranks of this run have GPUs; None if this is unknown because the ranks are on other
    machines."""
    runtime = run.runtime
    if runtime.device == "auto":
        return None if runtime.world is not None else has_cuda()
    return runtime.device == "cuda"


def _threads(run: RunConfig, gpu: bool | None) -> int | None:
    """Return the number of CPU threads of a rank of this run; None if the ranks use GPUs or are on other machines."""
    runtime, world = run.runtime, world_from_env()
    if gpu is not False or runtime.world is not None:
        return None
    return threads((runtime.nproc or 1) if world.source == "alone" else world.local_size)


def _sizes(run: RunConfig, world: int) -> Table:
    """Build the stages on the meta device; return a table of their blocks and sizes. Errors: ValueError for an invalid
    layout."""
    parallel, dp = run.parallel, data_parallel(run, world)
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
    return table


def _run_of(numbers: list[int]) -> str:
    """Format consecutive indices of transformer blocks as a range.

    >>> _run_of([4, 5, 6]), _run_of([3]), _run_of([])
    ('4-6', '3', 'none')
    """
    if not numbers:
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
