"""Computes the additional memory that a rank needs if experts have uneven loads.

The memory estimate assumes that all experts are chosen equally often. If all tokens choose experts on the same rank,
this rank receives more rows, which it stores for the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

from mega.core.architecture import architecture
from mega.core.config.resolve import gathers_experts, microbatch_rows
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.weights import BYTES


class WorstLoad(NamedTuple):
    """The load of one rank in an MoE layer, for one microbatch."""

    even: int
    """Number of rows that the rank's experts process if all experts are chosen equally often."""
    rows: int
    """Number of rows that the rank's experts process in the worst case."""
    more: int
    """Additional bytes in the worst case for one microbatch, summed over the MoE layers of a stage."""


def worst_load(run: RunConfig) -> WorstLoad | None:
    """Return the worst load of a resolved run. None if all ranks receive equal numbers of rows, because every rank has
    all experts or each expert takes a fixed number of rows."""
    parallel, layers = run.parallel, architecture(run.model).layers
    mixtures = [layer.experts for layer in layers if layer.experts is not None]
    if not mixtures or parallel.ep == 1:
        return None
    experts, ep = mixtures[0], parallel.ep
    if experts.capacity is not None and experts.capacity.padded and not gathers_experts(run):
        return None
    tensor = parallel.tp if parallel.sequence_parallel else 1
    tokens = microbatch_rows(run) * run.batch.seq_length // parallel.cp // tensor * ep
    tokens *= max(1, parallel.etp // (1 if parallel.sequence_parallel else parallel.tp))
    even_rows, worst_rows = tokens * experts.chosen // ep, tokens * min(experts.chosen, experts.count // ep)
    if experts.capacity is not None:
        worst_rows = min(worst_rows, int(even_rows * experts.capacity.factor))
    width = experts.expert.width // parallel.etp
    row_width = layers[0].norm.width + (2 + 1 + experts.expert.gated) * width
    mixtures_held = max(sum(map(_mixtures, stage)) for stage in stage_chunks(run))
    mixtures_held = 1 if run.memory.recompute == "full" else mixtures_held
    return WorstLoad(
        even_rows, worst_rows, max(0, worst_rows - even_rows) * row_width * BYTES[run.precision.dtype] * mixtures_held
    )


def _mixtures(chunk: Chunk) -> int:
    """The number of blocks with experts in a chunk of a model with experts."""
    return sum(kind.experts for kind in chunk.kinds) if chunk.kinds else chunk.blocks
