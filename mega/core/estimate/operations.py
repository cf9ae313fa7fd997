"""Lists the operations of a chunk of the model, from the chunk's trace. Torch is imported only when a function is
called."""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from typing import Any

from mega.core.config.resolve import overlaps_exchanges, variant
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk
from mega.core.estimate.cost import ChunkOperations, Operation
from mega.core.estimate.hardware import Hardware


def with_overlap(run: RunConfig, device: Hardware) -> RunConfig:
    """Return a resolved run with --tp-overlap set as the run would set it on `device`, unless the option is given.

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.estimate.hardware import hardware
    >>> flags = {"tp": 4, "sequence_parallel": True, "micro_batch": 4}
    >>> run = resolve(compose("gpt-22b", flags=flags), world=4)
    >>> [overlaps_exchanges(with_overlap(run, hardware(card))) for card in ("h100", "h200", "b200")]
    [True, True, False]
    """
    if run.parallel.tp_overlap is not None or run.parallel.tp == 1:
        return run
    # Ranks of several hosts cannot map each other's memory.
    overlaps = run.parallel.tp <= device.node and overlaps_exchanges(run, device.tflops16)
    return run if overlaps == overlaps_exchanges(run) else variant(run, {"tp_overlap": overlaps})


def operations(run: RunConfig, chunk: Chunk, *, composed: bool = False, shared: bool = False) -> ChunkOperations:
    """Return the operations of a chunk of a resolved run. composed, shared: as in `trace`. If `composed` is True,
    chunks of several lengths need fewer traces, but these traces are not used to measure memory."""
    from mega.core.estimate.trace import trace

    chunk_trace = trace(run, chunk, composed=composed, shared=shared)
    return ChunkOperations(
        chunk_trace.forward_work, chunk_trace.backward_work, chunk_trace.weight_work, chunk_trace.cargo
    )


def rough_operations(run: RunConfig, chunk: Chunk, *, shared: bool = False) -> ChunkOperations:
    """Extrapolate the operations of a chunk from microbatches of 1 and 2 samples, assuming that sizes are linear in the
    number of samples. Deferred weight gradients are counted as part of the backward pass. shared: as in `trace`."""
    run, size = variant(run, {"schedule": "1f1b", "zero": 0}), run.batch.micro_batch
    if overlaps_exchanges(run):  # sizes of blocks are not linear in the number of samples
        return operations(run, chunk, composed=True, shared=shared)
    if size <= 2:
        return operations(run, chunk, shared=shared)
    one, two = (operations(variant(run, {"micro_batch": few}), chunk, shared=shared) for few in (1, 2))
    if [list(map(len, units)) for units in one[:3]] != [list(map(len, units)) for units in two[:3]]:
        return operations(run, chunk, shared=shared)
    parts = [tuple(map(_extrapolated, a, b, repeat(size))) for a, b in zip(one[:3], two[:3], strict=True)]
    return ChunkOperations(parts[0], parts[1], parts[2], one.cargo + (size - 1) * (two.cargo - one.cargo))


@lru_cache(maxsize=1 << 12)
def _extrapolated(one: tuple[Operation, ...], two: tuple[Operation, ...], size: int) -> tuple[Operation, ...]:
    """Extrapolate to `size` samples from the operations of one sample and of two samples."""
    scaled = []
    for a, b in zip(one, two, strict=True):
        kind: Any = type(a)
        scaled.append(kind(*(x + (size - 1) * (y - x) if type(x) is int else x for x, y in zip(a, b, strict=True))))  # type: ignore[operator]
    return tuple(scaled)
