"""An estimate for people and programs: a table, bars and a picture for the first, one JSON value for the second."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega.core.config.resolve import data_parallel, lengths, microbatches, rising_steps
from mega.core.config.run import RunConfig, updated
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.megatron import report
from mega.core.estimate.memory import Memory, StageMemory, kv_cache_bytes, serving_bytes
from mega.core.estimate.schedule import Training, training_time
from mega.core.estimate.search import RESERVE, Found
from mega.core.estimate.steptime import step_time

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

GIB = 2**30

RESTART_SECONDS = 600.0
"""From a failure to the next step: noticing it, new processes, reading a checkpoint."""

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
"""Heading, attribute, and colour of each part of a peak, from the bottom up."""


SHORT = {"gradients": "grads", "activations": "activ.", "working": "work"}
"""Headings where there is little room."""


def parts(stage: StageMemory) -> dict[str, int]:
    """Bytes of each part by its heading; they add up to the peak."""
    held = ("weights", "grads", "masters", "moments")
    return {head: getattr(stage.held if name in held else stage, name) for head, name, _ in PARTS}


def layout(run: RunConfig, world: int) -> str:
    """One line: which ranks do what."""
    parallel, batch = run.parallel, run.batch
    words = [
        f"world {world} = tp {parallel.tp} x cp {parallel.cp} x dp {data_parallel(run, world)} x pp {parallel.pp}",
        f"{microbatches(run, world)} microbatches of {batch.micro_batch} x {batch.seq_length} tokens",
        run.precision.dtype,
        f"zero {parallel.zero}",
        f"recompute {run.memory.recompute}",
    ]
    if parallel.sequence_parallel:
        words.append("sequence parallel")
    if parallel.pp > 1:
        words.append(f"{parallel.schedule}, {parallel.chunks} chunks")
    return "; ".join(words)


def as_json(run: RunConfig, world: int, found: Memory, device: Hardware | None = None) -> dict[str, Any]:
    """Sizes in bytes, times in seconds; stages in order. The layout stands by its options' names."""
    parallel = run.parallel
    timed = {} if device is None else {"device": device.name, "step": asdict(step_time(run, world, device))}
    return {
        "layout": {
            "tp": parallel.tp,
            "cp": parallel.cp,
            "pp": parallel.pp,
            "dp": data_parallel(run, world),
            "chunks": parallel.chunks,
            "zero": parallel.zero,
            "micro_batch": run.batch.micro_batch,
            "recompute": run.memory.recompute,
        },
        **timed,
        "world": world,
        "parameters": found.parameters,
        "peak": found.worst.peak,
        "peak_stage": found.worst.stage,
        "checkpoint": found.checkpoint,
        "serving_weights": serving_bytes(run),
        "kv_cache_per_token": kv_cache_bytes(run),
        "stages": [
            {
                "stage": stage.stage,
                "layers": stage.layers,
                "parameters": stage.held.parameters,
                **parts(stage),
                "host": stage.held.host,
                "peak": stage.peak,
                "slack": stage.slack,
                "live_microbatches": stage.live,
                "when": stage.when,
            }
            for stage in found.stages
        ],
    }


def choice_as_json(found: Found, start: Sequence[str]) -> dict[str, Any]:
    """What a search found, fastest first: each layout by its options, GiB of its fullest rank, and its step."""
    return {
        "tried": found.tried,
        "fitting": found.fitting,
        "layouts": [
            {**candidate.options, "dp": candidate.dp, "need_gib": candidate.need, "step": asdict(candidate.time)}
            for candidate in found.candidates
        ],
        "start": list(start),
    }


def table(found: Memory) -> Table:
    """GiB of each part at the peak, a row for each kind of stage; equal neighbours share one. Fits 80 columns."""
    from rich.table import Table

    shown = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, title="GiB per rank at its peak", title_justify="left"
    )
    for heading in ("stage", "layers", *(SHORT.get(head, head) for head, _, _ in PARTS), "peak"):
        shown.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for first, last, stage in _alike(found):
        shown.add_row(
            str(first) if first == last else f"{first}-{last}",
            str(stage.layers),
            *(gib(size) for size in parts(stage).values()),
            f"[bold]{gib(stage.peak)}[/bold]",
        )
    return shown


def bars(found: Memory, width: int = 52) -> Iterator[Text]:
    """A stacked bar for each row of the table, and what the colours mean."""
    from rich.text import Text

    largest = max(stage.peak for stage in found.stages)
    for first, last, stage in _alike(found):
        line = Text(f"{f'stage {first}' if first == last else f'stages {first}-{last}':<14}")
        end = 0
        done = 0
        for (_, _, colour), size in zip(PARTS, parts(stage).values(), strict=True):
            done += size
            cells = round(done / largest * width) - end
            line.append("█" * cells, colour)
            end += cells
        yield line.append(f" {gib(stage.peak)} GiB")
    legend = Text()
    for head, _, colour in PARTS:
        legend.append("█ ", colour).append(f"{SHORT.get(head, head)} ")
    yield legend


def notes(run: RunConfig, world: int, found: Memory, device: Hardware | None, megatron: bool) -> Iterator[str]:
    """Lines below the table; with a `device`, whether it fits and how long a step takes."""
    worst, held = found.worst, found.worst.held
    yield (
        f"peak: {gib(worst.peak)} GiB on stage {worst.stage}, in the {worst.when}, {worst.live} in flight; "
        f"the allocator may take {gib(worst.slack)} more"
    )
    yield (
        f"parameters {found.parameters / 1e9:.3f}e9, {held.parameters / 1e9:.3f}e9 on a rank of it, "
        f"{held.total / held.parameters:.2f} bytes each; "
        f"checkpoint {gib(found.checkpoint)} GiB; serving: {gib(serving_bytes(run))} GiB of weights, "
        f"{kv_cache_bytes(run) / 2**20:.3f} MiB of keys and values "
        "per token"
    )
    if held.host:
        yield f"in the host's memory: {gib(held.host)} GiB of masters and moments for each rank"
    if device is not None:
        need = found.needed(device.communicator)
        verdict = "fits" if need <= device.memory else "does not fit"
        groups = found.communicators
        outside = f" and {groups} communicator{'s' if groups > 1 else ''}" if groups else ""
        outside += f" and {gib(found.mapped)} GiB mapped" if found.mapped else ""
        yield f"{device.name}: {need:.2f} GiB with slack{outside}, of {device.memory:g}: {verdict}"
        step = step_time(run, world, device)
        yield (
            f"{device.name}: {step.seconds:.3f} s a step ({step.tflops:.0f} TFLOP/s per device, MFU {step.mfu:.1%}); "
            f"pipeline {step.pipeline:.3f} s of which {step.bubble:.1%} bubble, gradients {step.reduction:.3f} s, "
            f"update {step.update:.3f} s"
        )
        if run.precision.fp8 and "fp8" not in device.peak:
            yield f"--fp8: {device.name} has no fp8 products; timed as emulated in fp32, wide copies not counted"
    if megatron:
        theirs = report(run, world)
        yield (
            f"Megatron-LM says: weights and optimizer {theirs.weights:.2f} MB, "
            f"activations {theirs.activations:.2f} MB, total {theirs.total:.2f} MB"
        )


def training(
    run: RunConfig, world: int, device: Hardware, mtbf_hours: float | None, save_seconds: float
) -> Training | None:
    """How long the whole training takes, where its length is given. Errors: ValueError where it would never end."""
    if not lengths(run).steps:
        return None
    failures = mtbf_hours * 3600 if mtbf_hours else None
    whole = training_time(
        step_time(run, world, device).seconds,
        _whole_steps(run, world, device),
        save_seconds=save_seconds,
        restart_seconds=RESTART_SECONDS,
        failure_seconds=failures,
    )
    if whole.days == inf:
        raise ValueError(
            f"--mtbf {mtbf_hours:g}: with --save-seconds {save_seconds:g} and {RESTART_SECONDS:g} s from a failure to "
            "the next step such a training never ends; valid: more hours, or shorter saves"
        )
    return whole


def _whole_steps(run: RunConfig, world: int, device: Hardware) -> float:
    """The training's length in steps of the whole batch: those of a ramp-up are shorter."""

    def rough(size: int) -> float:
        return step_time(updated(run, {"global_batch": size}), world, device, play=False).seconds

    rising = Counter(rising_steps(run.batch))
    assert run.batch.global_batch is not None
    whole = rough(run.batch.global_batch)
    return lengths(run).steps - sum(count * (1 - rough(size) / whole) for size, count in rising.items())


def training_note(
    run: RunConfig, world: int, device: Hardware, mtbf_hours: float | None, save_seconds: float
) -> str | None:
    """The same in words."""
    steps, whole = lengths(run).steps, training(run, world, device, mtbf_hours, save_seconds)
    if whole is None:
        return None
    if whole.save_every is None:
        return f"{steps} steps: {whole.days:.2f} days"
    best = max(1, round(whole.save_every / step_time(run, world, device).seconds))
    return (
        f"{steps} steps: {whole.days:.2f} days, of which {whole.effective:.1%} train; with a failure every "
        f"{mtbf_hours:g} h save every {best} steps ({whole.save_every / 60:.0f} minutes)"
    )


def layouts_table(found: Found) -> Table:
    """The best layouts, fastest first."""
    from rich.table import Table

    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
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
        shown.add_column(heading, justify="left" if heading in ("plan", "recompute") else "right", no_wrap=True)
    for candidate in found.candidates:
        run, time = candidate.run, candidate.time
        shown.add_row(
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
    return shown


def _plan(run: RunConfig) -> str:
    """The pipeline's schedule in a word."""
    parallel = run.parallel
    if parallel.pp == 1:
        return ""
    return f"{parallel.chunks} chunks" if parallel.chunks > 1 else str(parallel.schedule)


def why(found: Found, device: Hardware) -> str:
    """The choice in a sentence."""
    best = found.candidates[0]
    text = (
        f"{found.tried} layouts obey the rules, {found.fitting} fit into {1 - RESERVE:.0%} of the {device.memory:.1f} "
        f"GiB of {device.name}; "
        f"the first is predicted fastest ({best.time.seconds:.3f} s)"
    )
    if len(found.candidates) > 1:
        second = found.candidates[1]
        text += f", {second.time.seconds / best.time.seconds - 1:.1%} ahead of the second"
    return f"{text}. exposed: gradients and update that nothing hides"


def launch_lines(words: Sequence[str], world: int, node: int, tp: int) -> list[str]:
    """Ready command lines: torchrun on one host or several, and sbatch.

    Every host starts equally many ranks, as many as there are devices or else whole groups of `tp`.
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


def draw(found: Memory, title: str, path: Path) -> None:
    """The bars as a picture: .svg, or .png (needs matplotlib). The file appears whole or not at all."""
    from mega.core.files import whole_file

    content = {".svg": _svg, ".png": _png}[path.suffix](found, title)
    with whole_file(path) as out:
        out.write(content)


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**29)
    '1.50'
    """
    return f"{size / GIB:.2f}"


def _alike(found: Memory) -> Iterator[tuple[int, int, StageMemory]]:
    """First and last stage of each run of equal ones, to a hundredth of a GiB."""
    begin = 0
    for number, stage in enumerate(found.stages):
        after = found.stages[number + 1] if number + 1 < len(found.stages) else None
        if after is None or _shown(after) != _shown(stage):
            yield begin, number, stage
            begin = number + 1


def _shown(stage: StageMemory) -> tuple[object, ...]:
    return (stage.layers, stage.live, *(gib(size) for size in parts(stage).values()))


def _svg(found: Memory, title: str) -> bytes:
    rows = list(_alike(found))
    largest = max(stage.peak for stage in found.stages)
    height = 70 + 30 * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="8" y="18">{title}</text>'
    ]
    for index, (heading, _, colour) in enumerate(PARTS):
        corner = 90 + 105 * index
        lines.append(f'<rect x="{corner}" y="28" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{corner + 16}" y="38">{heading}</text>')
    for row, (first, last, stage) in enumerate(rows):
        top, left = 52 + 30 * row, 90.0
        name = f"stage {first}" if first == last else f"{first} to {last}"
        lines.append(f'<text x="8" y="{top + 15}">{name}</text>')
        for (heading, _, colour), size in zip(PARTS, parts(stage).values(), strict=True):
            wide = 800 * size / largest
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="22" fill="{colour}">'
                f"<title>{heading}: {gib(size)} GiB</title></rect>"
            )
            left += wide
        lines.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{gib(stage.peak)} GiB</text>')
    return "\n".join([*lines, "</svg>", ""]).encode()


def _png(found: Memory, title: str) -> bytes:
    import io

    from matplotlib.figure import Figure

    rows = list(_alike(found))
    figure = Figure(figsize=(11, 1.6 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    starts = [0.0] * len(rows)
    for heading, _, colour in PARTS:
        sizes = [parts(stage)[heading] / GIB for _, _, stage in rows]
        axes.barh(range(len(rows)), sizes, left=starts, color=colour, label=heading)
        starts = [before + size for before, size in zip(starts, sizes, strict=True)]
    axes.set_yticks(range(len(rows)), [f"stage {a}" if a == b else f"stages {a}-{b}" for a, b, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="GiB")
    figure.suptitle(textwrap.fill(title, 140), fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
