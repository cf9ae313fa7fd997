"""Formats an estimate as tables, bars and messages for the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mega.core.architecture import active_parameters
from mega.core.config.check import graph
from mega.core.config.resolve import (
    data_parallel,
    microbatches,
    overlaps_exchanges,
    records_graph,
    text_lengths,
    variant,
)
from mega.core.config.run import RunConfig
from mega.core.estimate.duration import Interruptions, TrainingTime
from mega.core.estimate.experts import worst_load
from mega.core.estimate.hardware import GIB, Hardware
from mega.core.estimate.memory import Memory, StageMemory, kv_cache_bytes, logits_bytes, serving_bytes
from mega.core.estimate.search import RESERVE, SearchResult
from mega.core.estimate.steptime import step_time
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

PARTS: tuple[tuple[str, str, str], ...] = (
    ("weights", "weights", "#4c78a8"),
    ("gradients", "grads", "#f58518"),
    ("masters", "masters", "#54a24b"),
    ("moments", "moments", "#b79a20"),
    ("batches", "batches", "#9d755d"),
    ("activations", "activations", "#e45756"),
    ("working", "working", "#b279a2"),
    ("cargo", "cargo", "#72b7b2"),
)
"""The tuple (heading, attribute of `StageMemory` or `Weights`, colour) for each segment of a bar, from the bottom
up."""


SHORT = {"gradients": "grads", "activations": "activ.", "working": "work"}
"""Headings for narrow columns."""


def parts(stage: StageMemory) -> dict[str, int]:
    """Return the bytes of each component of the peak, keyed by heading."""
    held_names = ("weights", "grads", "masters", "moments")
    return {head: getattr(stage.held if name in held_names else stage, name) for head, name, _ in PARTS}


def layout(run: RunConfig, world: int) -> str:
    """One line that describes the layout."""
    parallel, batch, count = run.parallel, run.batch, microbatches(run, world)
    words = [
        f"world {world} = tp {parallel.tp} x cp {parallel.cp} x dp {data_parallel(run, world)} x pp {parallel.pp}",
        f"{count} microbatch{'' if count == 1 else 'es'} of {batch.micro_batch} x "
        f"{' + '.join(map(str, text_lengths(run)))} tokens",
        run.precision.dtype,
        f"zero {parallel.zero}",
        f"recompute {run.memory.recompute}",
    ]
    if parallel.sequence_parallel:
        words.append("sequence parallel" + (", overlapped" if overlaps_exchanges(run) else ""))
    if parallel.pp > 1:
        words.append(f"{parallel.schedule}" + (f", {parallel.chunks} chunks" if parallel.chunks > 1 else ""))
    return "; ".join(words)


def options(run: RunConfig, world: int) -> dict[str, Json]:
    """The layout keyed by option name, with the derived values `dp` and `microbatches`."""
    parallel = run.parallel
    return {
        "tp": parallel.tp,
        "cp": parallel.cp,
        "pp": parallel.pp,
        "dp": data_parallel(run, world),
        "chunks": parallel.chunks,
        "schedule": parallel.schedule,
        "stage_layers": list(parallel.stage_layers),
        "sequence_parallel": parallel.sequence_parallel,
        "tp_overlap": overlaps_exchanges(run),
        "zero": parallel.zero,
        "micro_batch": run.batch.micro_batch,
        "microbatches": microbatches(run, world),
        "dtype": run.precision.dtype,
        "recompute": run.memory.recompute,
        "recompute_method": run.memory.recompute_method,
        "recompute_layers": run.memory.recompute_layers,
    }


def as_json(run: RunConfig, world: int, memory: Memory, device: Hardware | None = None) -> dict[str, Json]:
    """Return the estimate as JSON values. Sizes are in bytes (in GiB for keys that end with `_gib`), and times in
    seconds. Stages are listed in order, and the layout is keyed by option name."""
    timed: dict[str, Json] = {}
    if device is not None:
        need = memory.needed(device.communicator)
        timed = {"device": device.name, "step": asdict(step_time(run, world, device))}
        timed |= {"need_gib": need, "fits": need <= device.memory}
    return {
        "layout": options(run, world),
        **timed,
        "world": world,
        "parameters": memory.parameters,
        "active_parameters": active_parameters(run.model),
        "peak": memory.worst.peak,
        "peak_stage": memory.worst.stage,
        "checkpoint": memory.checkpoint,
        "communicators": memory.communicators,
        "mapped": memory.mapped,
        "logits": logits_bytes(run),
        "serving_weights": serving_bytes(run) if _continues(run) else None,
        "kv_cache_per_token": kv_cache_bytes(run) if _continues(run) else None,
        "stages": [
            {
                "stage": stage.stage,
                "layers": stage.layers,
                "parameters": stage.held.parameters,
                "bytes_per_parameter": stage.held.total / stage.held.parameters,
                **parts(stage),
                "host": stage.held.host,
                "peak": stage.peak,
                "slack": stage.slack,
                "live_microbatches": stage.live,
                "when": stage.when,
            }
            for stage in memory.stages
        ],
    }


def choice_as_json(result: SearchResult, start: Sequence[str], missing: Sequence[str]) -> dict[str, object]:
    """Return the result of a search as JSON values. Layouts are listed fastest first; each has its options, the highest
    memory of any rank in GiB, and its step time.

    start: command lines that start the fastest layout. missing: flags that the user must add to these command lines.
    """
    return {
        "tried": result.tried,
        "weighed": result.weighed,
        "fitting": result.fitting,
        "layouts": [
            {
                **candidate.options,
                **options(candidate.run, candidate.world),
                "need_gib": candidate.need,
                "step": asdict(candidate.time),
            }
            for candidate in result.candidates
        ],
        "start": list(start),
        "missing": list(missing),
    }


def table(memory: Memory) -> Table:
    """A table of the components of the peak memory, in GiB, at most 80 columns wide. Consecutive stages with equal
    values share a row."""
    from rich.table import Table

    output = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, title="GiB per rank at its peak", title_justify="left"
    )
    for heading in ("stage", "layers", *(SHORT.get(head, head) for head, _, _ in PARTS), "peak"):
        output.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for first, last, stage in equal_stages(memory):
        output.add_row(
            str(first) if first == last else f"{first}-{last}",
            str(stage.layers),
            *(gib(size) for size in parts(stage).values()),
            f"[bold]{gib(stage.peak)}[/bold]",
        )
    return output


def bars(memory: Memory, width: int = 52) -> Iterator[Text]:
    """A stacked bar for each row of the table, and a legend."""
    from rich.text import Text

    largest = max(stage.peak for stage in memory.stages)
    for first, last, stage in equal_stages(memory):
        line = Text(f"{f'stage {first}' if first == last else f'stages {first}-{last}':<14}")
        cells_drawn = 0
        bytes_drawn = 0
        for (_, _, colour), size in zip(PARTS, parts(stage).values(), strict=True):
            bytes_drawn += size
            cells = round(bytes_drawn / largest * width) - cells_drawn
            line.append("█" * cells, colour)
            cells_drawn += cells
        yield line.append(f" {gib(stage.peak)} GiB")
    legend = Text()
    for head, _, colour in PARTS:
        legend.append("█ ", colour).append(f"{SHORT.get(head, head)} ")
    yield legend


def _continues(run: RunConfig) -> bool:
    """Whether a model of the run's family can generate text."""
    from mega.core.family import family  # imports torch, which an invalid run does not need

    return family(run.model).prompt is not None


def _serving(run: RunConfig) -> str:
    if not _continues(run):
        return ""
    cache = kv_cache_bytes(run) / 2**20
    return f"; serving: {gib(serving_bytes(run))} GiB of weights, {cache:.3f} MiB of keys and values per token"


def notes(run: RunConfig, world: int, memory: Memory, device: Hardware | None, megatron: bool) -> Iterator[str]:
    """Yield the messages below the table. With a `device`, messages state whether the run fits into its memory, and the
    step time."""
    worst, stage_weights = memory.worst, memory.worst.held
    yield (
        f"peak: {gib(worst.peak)} GiB on stage {worst.stage}, in the {worst.when}, {worst.live} in flight; "
        f"the allocator may take {gib(worst.slack)} more"
    )
    active = f" ({active_parameters(run.model) / 1e9:.3f}e9 active)" if run.model.experts else ""
    yield (
        f"parameters {memory.parameters / 1e9:.3f}e9{active}, {stage_weights.parameters / 1e9:.3f}e9 on a rank of it, "
        f"{stage_weights.total / stage_weights.parameters:.2f} bytes each; "
        f"checkpoint {gib(memory.checkpoint)} GiB{_serving(run)}"
    )
    yield f"logits and loss of a microbatch: {gib(logits_bytes(run))} GiB of the last stage's activations"
    if (load := worst_load(run)) is not None:
        yield (
            f"experts: {load.even:,} rows of a microbatch in a layer on each rank, chosen equally often; if all tokens "
            f"choose those of one rank, {load.rows:,} there, and {gib(load.more)} GiB more of its activations"
        )
    groups = memory.communicators
    outside = f"{groups} communicator{'s' if groups > 1 else ''}" if groups else ""
    outside += f" and {gib(memory.mapped)} GiB mapped" if memory.mapped else ""
    if outside and device is None:
        yield f"besides, outside the allocator: {outside}"
    if stage_weights.host:
        yield f"in the host's memory: {gib(stage_weights.host)} GiB of masters and moments for each rank"
    if device is not None:
        needed_gib = memory.needed(device.communicator)
        verdict = "fits" if needed_gib <= device.memory else "does not fit"
        outside_note = f" and {outside}" if outside else ""
        yield f"{device.name}: {needed_gib:.2f} GiB with slack{outside_note}, of {device.memory:g}: {verdict}"
        step = step_time(run, world, device)
        yield (
            f"{device.name}: {step.seconds:.3f} s a step ({step.tflops:.0f} TFLOP/s per device, MFU {step.mfu:.1%}); "
            f"pipeline {step.pipeline:.3f} s of which {step.bubble:.1%} bubble, gradients {step.reduction:.3f} s, "
            f"update {step.update:.3f} s"
        )
        if step.host_bound:
            faster = _recorded(run, world, device)
            graph_note = "" if faster is None else f"; with --cuda-graph {faster:.3f} s a step"
            yield f"{device.name}: host-bound: devices wait {step.waiting:.0%} of the passes for launches{graph_note}"
        if run.precision.fp8 and "fp8" not in device.peak:
            yield f"--fp8: {device.name} has no fp8 products; timed as emulated in fp32, wide copies not counted"
    if megatron and not run.model.experts:  # Megatron-LM's formula is valid only for dense models
        yield from _megatron_says(run, world)


def _megatron_says(run: RunConfig, world: int) -> Iterator[str]:
    """Yield Megatron-LM's theoretical memory report for the run, as messages."""
    from mega.core.estimate.megatron import report

    estimate = report(run, world)
    other_shards = f", {estimate.others / 1e9:.4f}e9 on the others" if run.parallel.pp > 1 else ""
    in_flight = f", {estimate.in_flight} microbatches in flight" if estimate.in_flight is not None else ""
    yield (
        f"Megatron-LM says: {estimate.parameters / 1e9:.4f}e9 parameters, {estimate.shard / 1e9:.4f}e9 on the fullest "
        f"shard{other_shards}; activations of a layer {estimate.layer:.2f} MB{in_flight}"
    )
    yield (
        f"Megatron-LM says: weights and optimizer {estimate.weights:.2f} MB, "
        f"activations {estimate.activations:.2f} MB, total {estimate.total:.2f} MB"
    )


def precision(run: RunConfig, memory: Memory, halved: Memory, seconds: tuple[float, float] | None) -> str:
    """A message that compares the memory of an fp32 run with that of the same run in bf16, `halved`. seconds: step
    times in fp32 and bf16; None if no device is given."""
    text = f"precision: {run.precision.dtype}, {gib(memory.worst.peak)} GiB at the peak; with --dtype bf16 "
    text += f"{gib(halved.worst.peak)} GiB"
    return text if seconds is None else f"{text}, and {seconds[1]:.3f} s a step instead of {seconds[0]:.3f}"


def _recorded(run: RunConfig, world: int, device: Hardware) -> float | None:
    """Seconds of a step with --cuda-graph; None if the run already uses this option or cannot use it."""
    recorded = variant(run, {"cuda_graph": True})
    if records_graph(run, world) or any(graph(recorded)):
        return None
    return step_time(recorded, world, device).seconds


def training_note(whole: TrainingTime, stops: Interruptions, typed: bool) -> str:
    """A message with the time of the training run. typed: whether the user gave a save interval."""
    text = f"{whole.steps} steps: {whole.days:.2f} days"
    if whole.save_interval is None:
        return text
    text += f", of which {whole.effective:.1%} train"
    if typed:
        text += f", with {whole.saves} saves, one every {whole.save_interval} steps"
    if whole.save_every is None or whole.save_every_days is None:
        return text
    text += (
        f"; with a failure every {stops.mtbf_hours:g} h save every {whole.save_every_steps} steps "
        f"({whole.save_every / 60:.0f} minutes)"
    )
    return f"{text}: {whole.save_every_days:.2f} days" if typed else text


def layouts_table(result: SearchResult) -> Table:
    """A table of the best layouts, fastest first."""
    from rich.table import Table

    output = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (
        "tp",
        "cp",
        "pp",
        "dp",
        "zero",
        "plan",
        "micro",
        "recompute",
        "s/step",
        "MFU",
        "bubble",
        "exposed",
        "GiB",
    ):
        output.add_column(heading, justify="left" if heading in ("plan", "recompute") else "right", no_wrap=True)
    for candidate in result.candidates:
        run, time = candidate.run, candidate.time
        output.add_row(
            str(run.parallel.tp),
            str(run.parallel.cp),
            str(run.parallel.pp),
            str(candidate.dp),
            str(run.parallel.zero),
            _plan(run),
            str(run.batch.micro_batch),
            run.memory.recompute,
            f"[bold]{time.seconds:.3f}[/bold]",
            f"{time.mfu:.1%}",
            f"{time.bubble:.1%}",
            f"{(time.reduction + time.update) / time.seconds:.1%}",
            f"{candidate.need:.1f}",
        )
    return output


def _plan(run: RunConfig) -> str:
    """A short name of the pipeline's schedule."""
    parallel = run.parallel
    if parallel.pp == 1:
        return ""
    return f"{parallel.chunks} chunks" if parallel.chunks > 1 else str(parallel.schedule)


def explain_choice(result: SearchResult, device: Hardware) -> str:
    """A text that explains why the first layout was chosen."""
    best = result.candidates[0]
    text = (
        f"{result.tried} layouts obey the rules; of the {result.weighed} fastest {result.fitting} fit into "
        f"{1 - RESERVE:.0%} of the {device.memory:.1f} GiB of {device.name}; "
        f"the first is predicted fastest ({best.time.seconds:.3f} s)"
    )
    if len(result.candidates) > 1:
        second = result.candidates[1]
        text += f", {second.time.seconds / best.time.seconds - 1:.1%} ahead of the second"
    return f"{text}. exposed: gradients and update that nothing hides"


def launch_lines(words: Sequence[str], world: int, node: int, tp: int) -> list[str]:
    """Complete command lines: torchrun on one or several hosts, and sbatch.

    Every host starts the same number of ranks: the largest multiple of `tp` that divides `world` and is at most `node`.
    """
    import shlex

    flags = shlex.join(words)
    local = max(part for part in range(1, min(world, node) + 1) if world % part == 0 and part % tp == 0)
    hosts = world // local
    join = "" if hosts == 1 else f" --nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    wrapped = shlex.quote(f"srun mega pretrain {flags}")
    return [
        f"torchrun --nproc-per-node {local}{join} -m mega pretrain {flags}",
        f"sbatch --nodes {hosts} --ntasks-per-node {local} --gpus-per-node {local} --wrap {wrapped}",
    ]


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**29)
    '1.50'
    """
    return f"{size / GIB:.2f}"


def equal_stages(memory: Memory) -> Iterator[tuple[int, int, StageMemory]]:
    """Yield (first index, last index, stage) for each group of consecutive stages that are equal when rounded to 0.01
    GiB."""
    begin = 0
    for number, stage in enumerate(memory.stages):
        after = memory.stages[number + 1] if number + 1 < len(memory.stages) else None
        if after is None or _shown(after) != _shown(stage):
            yield begin, number, stage
            begin = number + 1


def _shown(stage: StageMemory) -> tuple[object, ...]:
    return (stage.layers, stage.live, *(gib(size) for size in parts(stage).values()))
