"""Searches for the fastest layout that fits into memory, among all ways to divide a run's model over the devices.

A candidate is the run with different layout options. A candidate must satisfy the rules for every run. The memory
estimate determines whether the candidate fits. The candidate's step time is that of its simulated pipeline plan. This
module contains no formulas for memory or time.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf
from typing import TypedDict

from mega.core.architecture import architecture
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import data_parallel, divisors, model_alone, resolve
from mega.core.config.run import Options, RunConfig, entries, options_with, updated, value_of
from mega.core.estimate.hardware import Hardware, hardware
from mega.core.estimate.memory import Memory, memory, minimum_gib
from mega.core.estimate.operations import with_overlap
from mega.core.estimate.steptime import StepTime, step_time

RESERVE = 0.03
"""Fraction of a device's memory that a layout must leave free, which is about the error of predicted peaks."""

CONTEXT = 4096
"""Minimum number of tokens per context rank. For shorter sequences, other parallel axes are faster."""

MICRO = (1, 2, 4, 8, 16)
"""Microbatch sizes that are tried."""

ZERO = (1, 2, 3)
"""ZeRO stages that are tried. Only stage 1 is tried with a pipeline, because pipelines do not support stages 2 and
3."""


class RecomputeOptions(TypedDict):
    """Recomputation options that are tried."""

    recompute: str
    recompute_method: str | None
    recompute_layers: int | None


class LayoutOptions(RecomputeOptions):
    """A layout as a dict, keyed by option name."""

    tp: int
    cp: int
    pp: int
    chunks: int
    schedule: str | None
    layers_per_chunk: None
    sequence_parallel: bool
    zero: int
    micro_batch: int


RECOMPUTE: tuple[RecomputeOptions, ...] = (
    {"recompute": "none", "recompute_method": None, "recompute_layers": None},
    {"recompute": "selective", "recompute_method": None, "recompute_layers": None},
    {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1},
)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits into memory."""

    world: int  # Number of ranks
    options: LayoutOptions  # The options of the layout
    run: RunConfig  # The resolved run
    memory: Memory  # The predicted memory
    time: StepTime  # The predicted step time
    communicator: float  # GiB for each process group

    @property
    def dp(self) -> int:
        return data_parallel(self.run, self.world)

    @property
    def need(self) -> float:
        """GiB of the rank with the highest peak, including slack and communicators."""
        return self.memory.needed(self.communicator)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    candidates: list[Candidate]
    """Layouts that fit, fastest first."""
    tried: int
    """Number of layouts that pass the checks of every run."""
    weighed: int
    """Number of layouts that were examined, in order of estimated step time, until enough layouts fitted."""
    fitting: int
    """Number of examined layouts that fit into memory."""
    smallest: float
    """GiB of the layout that needs the least memory, even if this layout does not fit."""


def cluster(fit: str | None, gpus: int | None, gpu: str | None) -> tuple[int, Hardware]:
    """Return the number of devices and their hardware, from `--fit 8x80GB` (H100s with this memory), `--fit 8xh200`, or
    `--gpus 8 --gpu h200`.

    Errors: ValueError naming the flag.

    >>> count, device = cluster("64xh100", None, None)
    >>> count, device.name
    (64, 'h100')
    """
    if fit is None:
        assert gpus is not None
        count, device = gpus, hardware(gpu or "h100")
    else:
        parsed = re.fullmatch(r"([0-9]{1,7})x(?:([0-9]{1,4})GB|(.+))", fit, re.IGNORECASE)
        if parsed is None or int(parsed[1]) < 1:
            raise ValueError(f"--fit {fit}: must be a number of devices and what they are, such as 8x80GB or 8xh200")
        count = int(parsed[1])
        if gpus not in (None, count):
            raise ValueError(f"--fit {fit}: excludes --gpus {gpus}; give one of them")
        if gpu is not None and parsed[3] not in (None, gpu):
            raise ValueError(f"--fit {fit}: excludes --gpu {gpu}; give one of them, or the memory as in {count}x80GB")
        device = hardware(gpu or parsed[3] or "h100", None if gpu else f"--fit {fit}")
        if parsed[2]:
            # The driver reserves about 1.5 % of the nominal memory.
            device = replace(device, memory=0.985 * int(parsed[2]))
    if count < 1:
        raise ValueError(f"--gpus {count}: must be at least 1")
    return count, device


def without_layout(options: Options) -> Options:
    """Return `options` with all layout options reset to their defaults."""
    return updated(options, {name: entries()[name].default for name in options_with(layout=True)})


def any_layout(options: Options, world: int) -> Options:
    """Return `options` with a default layout and microbatches of 1, as a dry run on `world` ranks."""
    return updated(without_layout(options), {"micro_batch": 1, "dry_run": True, "nproc": None, "world": world})


def search(options: Options, world: int, device: Hardware, keep: int = 8) -> SearchResult:
    """Find the fastest layouts of `options` on `world` devices.

    options: the options of a run as the user gave them, with the vocabulary size. Layout options among them are
    replaced. Errors: ValueError if the global batch is missing or no layout is valid.
    """
    if options.batch.global_batch is None:
        raise ValueError("--global-batch is missing: layouts can only be compared at one batch size")
    for name in ("heads", "layers"):
        if value_of(options, name) is None:
            raise ValueError(f"--{name} is missing: give a number of at least 1, or a preset with --model")
    with _frozen_garbage():
        return _searched(options, world, device, keep)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude existing objects, mostly torch's, from garbage collection. Otherwise repeated collections take a fifth of
    a search's time. What the process has frozen before stays frozen."""
    frozen_before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def _searched(options: Options, world: int, device: Hardware, keep: int) -> SearchResult:
    """Estimate the memory of layouts, in order of rough step time, until enough layouts fit."""
    allowed = _by_rough_time(options, world, device)
    fitting: list[tuple[LayoutOptions, RunConfig, Memory]] = []
    weighed, smallest, available_gib = 0, inf, (1 - RESERVE) * device.memory
    smallest_too_large: dict[tuple[object, ...], int] = {}
    for layout, resolved in allowed:
        weighed += 1
        # If a layout does not fit, it does not fit with larger microbatches either.
        other_options = tuple(value for name, value in layout.items() if name != "micro_batch")
        if layout["micro_batch"] >= smallest_too_large.get(other_options, inf):
            continue
        if minimum_gib(resolved, world, device.communicator) > max(available_gib, smallest):
            continue
        layout_memory = memory(resolved, world)
        size = layout_memory.needed(device.communicator)
        smallest = min(smallest, size)
        if size > available_gib:
            smallest_too_large[other_options] = layout["micro_batch"]
            continue
        fitting.append((layout, resolved, layout_memory))
        # The error of the rough time is less than the time to fill and drain the pipeline, so the best layout is among
        # the first layouts.
        if len(fitting) == 3 * keep:
            break
    played = [
        Candidate(world, layout, resolved, layout_memory, step_time(resolved, world, device), device.communicator)
        for layout, resolved, layout_memory in fitting
    ]
    played.sort(key=lambda candidate: candidate.time.seconds)
    return SearchResult(played[:keep], len(allowed), weighed, len(fitting), smallest)


def _by_rough_time(options: Options, world: int, device: Hardware) -> list[tuple[LayoutOptions, RunConfig]]:
    """Resolve the valid layouts, and sort them by rough step time, which is computed without simulating
    plans."""
    timed_layouts, refusals, base = (
        list[tuple[float, LayoutOptions, RunConfig]](),
        list[str](),
        any_layout(options, world),
    )
    for layout in layouts(options, world, device.node):
        candidate = updated(base, layout)
        try:
            check(candidate, world)
        except ValueError as error:
            refusals.append(str(error))
            continue
        resolved = with_overlap(resolve(candidate, world), device)
        timed_layouts.append((step_time(resolved, world, device, play=False).seconds, layout, resolved))
    if not timed_layouts:
        raise ValueError(_no_layout(options, world, device.node, refusals))
    timed_layouts.sort(key=lambda row: row[0])
    return [(layout, resolved) for _, layout, resolved in timed_layouts]


def _no_layout(options: Options, world: int, node: int, refusals: list[str]) -> str:
    """Explain why no layout is valid: the message names the rules that all layouts violate or, if there are none,
    the numbers that must be divisible."""
    first = refusals[0].splitlines() if refusals else []
    broken = [set(refusal.splitlines()) for refusal in refusals]
    if shared := [line for line in first if all(line in lines for lines in broken)]:
        return "\n".join(shared)
    message = f"--global-batch {options.batch.global_batch}: no layout of {world} devices "
    if refusals:
        message += f"obeys every rule (of {len(refusals)} that divide it the first breaks: {first[0]})"
    else:
        message += f"divides it, --layers {options.model.layers} and --heads {options.model.heads}"
    units = _units(options, world, node)
    multiples = f"multiples of {' or '.join(map(str, units))}, or " if units else ""
    return f"{message}; valid: {multiples}another number of devices"


def _units(options: Options, world: int, node: int) -> list[int]:
    """The smallest global batches with a valid layout. Multiples of these batch sizes, which also have a valid layout,
    are left out.

    >>> _units(compose("llama2-13b"), 12, 8), _units(compose("llama2-13b"), 14, 8)
    ([3], [7])
    """
    base, batch_units = any_layout(options, world), list[int]()
    sizes = {world // (tp * cp * pp) * micro for (tp, cp, pp), micro in product(_grids(options, world, node), MICRO)}
    for size in sorted(sizes):
        sized_options = updated(base, {"global_batch": size})
        if any(size % unit == 0 for unit in batch_units):
            continue
        if any(_allowed(updated(sized_options, layout), world) for layout in layouts(sized_options, world, node)):
            batch_units.append(size)
    return batch_units


def _allowed(options: Options, world: int) -> bool:
    try:
        check(options, world)
    except ValueError:
        return False
    return True


def layouts(options: Options, world: int, node: int) -> list[LayoutOptions]:
    """All layouts worth checking, as options of a run.

    If the run fills whole hosts, tp must divide the number of GPUs per host, unless no such layout exists.
    """
    all_layouts = list(_layouts(options, world, node))
    return [layout for layout in all_layouts if world % node or node % layout["tp"] == 0] or all_layouts


def _layouts(options: Options, world: int, node: int) -> Iterator[LayoutOptions]:
    layers, batch = options.model.layers, options.batch.global_batch
    assert layers and batch
    for tp, cp, pp in _grids(options, world, node):
        dp = world // (tp * cp * pp)
        data_ranks = dp * cp
        stages = ZERO if pp == 1 else ZERO[:1]
        for micro, (schedule, chunks), recompute in product(MICRO, _schedules(layers, pp), RECOMPUTE):
            if batch % (micro * dp):
                continue
            for zero in stages if data_ranks > 1 else (0,):
                yield {
                    "tp": tp,
                    "cp": cp,
                    "pp": pp,
                    "chunks": chunks,
                    "schedule": schedule,
                    "layers_per_chunk": None,
                    # Sequence parallelism is used if the sequence can be divided, because it saves memory and moves no
                    # more bytes.
                    "sequence_parallel": tp > 1 and (options.batch.seq_length or 0) % (tp * cp) == 0,
                    "zero": zero,
                    "micro_batch": micro,
                    **recompute,
                }


def _grids(options: Options, world: int, node: int) -> Iterator[tuple[int, int, int]]:
    """Yield each (tp, cp, pp) with which `world` ranks store a whole number of model replicas.

    tp divides a block's heads and feed-forward width, and is at most the number of GPUs per host. Each context rank has
    at least CONTEXT tokens of a sequence.
    """
    model, parts = architecture(model_alone(options, vocab=1)), (options.batch.seq_length or 0) // CONTEXT
    shared = gcd(*model.block.shared.values())
    tps = [tp for tp in range(1, min(node, world) + 1) if shared % tp == 0]
    cps = [cp for cp in range(1, min(max(parts, 1), world) + 1) if world % cp == 0]
    for tp, cp, pp in product(tps, cps, divisors(len(model.stacks[0].layers))):
        if world % (tp * cp * pp) == 0:
            yield tp, cp, pp


def _schedules(layers: int, pp: int) -> list[tuple[str, int]]:
    """List (schedule, number of chunks per rank) for a pipeline of `pp` stages."""
    if pp == 1:
        return [("1f1b", 1)]
    return [("1f1b", 1), ("zb-h1", 1), *(("interleaved", c) for c in (2, 3, 4) if layers // pp % c == 0)]


def command(candidate: Candidate, options: Options) -> list[str]:
    """List the flags of `mega pretrain` for a candidate: the flags that the user gave, and the layout.

    Options whose value is the family's default are left out, as is a family that --use-checkpoint-config implies.
    """
    final_options = updated(options, candidate.options)
    final_options = updated(final_options, {"dry_run": False, "world": None, "nproc": None})
    family_defaults = compose(flags={"family": final_options.model.family})
    words: list[str] = []
    for name, entry in entries().items():
        value = value_of(final_options, name)
        is_named = name == "family" and not options.checkpoint.use_checkpoint_config
        if not is_named and value == value_of(family_defaults, name):
            continue
        if entry.kind is bool and not entry.many:
            words.append(entry.flag if value else entry.flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [entry.flag, *(map(str, value) if entry.many else [str(value)])]
    return words
