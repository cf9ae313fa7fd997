"""Warns, before the ranks of `--nproc` start, if this host has too few cores or too little memory for all ranks.

A warning does not stop the run, because the estimate may be wrong, and a run with too few cores is only slow.
"""

from __future__ import annotations

from collections.abc import Iterator

from mega.core.architecture import architecture, parameters
from mega.core.config.resolve import text_lengths, variant
from mega.core.config.run import RunConfig
from mega.core.device import has_cuda
from mega.core.estimate.hardware import GIB
from mega.core.processes.world import cores

PROCESS = 0.35 * GIB
"""Memory, in bytes, of a process that has imported torch and has no tensors."""

BYTES = 18
"""Bytes per parameter for weights, gradients, masters and moments when training in bf16; training in fp32 needs 16
bytes."""

SAVED = 40
"""Approximate bytes that a block stores for the backward pass, per element of the residual stream."""


def resource_warnings(run: RunConfig, ranks: int) -> Iterator[str]:
    """Yield a message for each resource (cores, memory) of which this host has less than a resolved `run` needs.
    Nothing is yielded if the ranks run on GPUs."""
    if run.runtime.device == "cuda" or (run.runtime.device == "auto" and has_cuda()):
        return
    if ranks > (cpus := cores()):
        yield f"--nproc {ranks}: this host has {cpus} cores for these ranks, which wait for each other at every step"
    room = available()
    if room is None or _rough(run, ranks) < room / 4:
        return
    from mega.core.estimate.memory import memory  # imported here, because small runs do not need torch at this point

    try:
        run_memory = memory(variant(run, {"device": "cpu"}), ranks)
    except ValueError:
        return
    each = ranks // len(run_memory.stages)
    needed_bytes = sum(stage.peak + stage.slack for stage in run_memory.stages) * each + ranks * PROCESS
    if needed_bytes > room:
        subject = "this run needs" if ranks == 1 else f"--nproc {ranks}: these ranks need"
        victim, remedy = ("it", "a smaller model,") if ranks == 1 else ("one", "fewer ranks,")
        yield (
            f"{subject} about {needed_bytes / GIB:.1f} GiB, and this host has {room / GIB:.1f} GiB: "
            f"{victim} may be killed; {remedy} a smaller --micro-batch or --recompute full take less"
        )


def _rough(run: RunConfig, ranks: int) -> float:
    """Return a rough estimate of the memory of all ranks, in bytes. The exact estimate takes seconds and is skipped if
    the rough estimate is small."""
    model, parallel = architecture(run.model), run.parallel
    share = ranks / (parallel.tp * parallel.pp)
    tokens = run.batch.micro_batch * sum(text_lengths(run))
    saved = tokens * (len(model.layers) * model.hidden * SAVED + 12 * model.input.vocab)
    return share * (BYTES * parameters(run.model) + parallel.pp * saved) + ranks * PROCESS


def available() -> int | None:
    """Bytes of memory available for new processes, or None if the system does not report this number."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
