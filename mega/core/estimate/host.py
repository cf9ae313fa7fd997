"""Whether this host has the cores and the memory for the ranks that `--nproc` starts on its processors, said before
they start. It refuses nothing: an estimate may be wrong, and slow ranks are still ranks.
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
"""Of a rank that has loaded torch and holds no tensor."""

BYTES = 18
"""Of a parameter in training, in bf16; in fp32 they are 16."""

SAVED = 40
"""Of an element of the residual stream in one block, about as much as is kept for the backward pass."""


def crowded(run: RunConfig, ranks: int) -> Iterator[str]:
    """Lines about what a resolved `run` asks too much of; nothing where its ranks have GPUs."""
    if run.runtime.device == "cuda" or (run.runtime.device == "auto" and has_cuda()):
        return
    if ranks > (own := cores()):
        yield f"--nproc {ranks}: this host has {own} cores for these ranks, which wait for each other at every step"
    room = available()
    if room is None or _rough(run, ranks) < room / 4:
        return
    from mega.core.estimate.memory import memory  # which a run that is small beside its host starts without

    try:
        found = memory(variant(run, {"device": "cpu"}), ranks)
    except ValueError:
        return
    each = ranks // len(found.stages)
    need = sum(stage.peak + stage.slack for stage in found.stages) * each + ranks * PROCESS
    if need > room:
        which = "this run needs" if ranks == 1 else f"--nproc {ranks}: these ranks need"
        what, less = ("it", "a smaller model,") if ranks == 1 else ("one", "fewer ranks,")
        yield (
            f"{which} about {need / GIB:.1f} GiB, and this host has {room / GIB:.1f} GiB: "
            f"{what} may be killed; {less} a smaller --micro-batch or --recompute full take less"
        )


def _rough(run: RunConfig, ranks: int) -> float:
    """Bytes of all ranks, at a glance: an estimate takes seconds, which a small run need not wait for."""
    model, parallel = architecture(run.model), run.parallel
    share = ranks / (parallel.tp * parallel.pp)
    tokens = run.batch.micro_batch * sum(text_lengths(run))
    saved = tokens * (len(model.layers) * model.hidden * SAVED + 12 * model.input.vocab)
    return share * (BYTES * parameters(run.model) + parallel.pp * saved) + ranks * PROCESS


def available() -> int | None:
    """Bytes of memory that new processes can have here; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
