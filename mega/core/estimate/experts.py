"""What an uneven load of experts takes. The estimate has every expert chosen equally often; a rank whose experts are
chosen by all tokens gets more rows than that, and keeps them for the backward pass."""

from __future__ import annotations

from typing import NamedTuple

from mega.core.architecture import architecture
from mega.core.config.resolve import gathers_experts, microbatch_rows
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.weights import BYTES


class WorstLoad(NamedTuple):
    """Of one mixture and microbatch on one rank. even, rows: rows of its experts, chosen equally often and at the
    worst. more: bytes that all mixtures of the fullest stage keep of the difference for one microbatch."""

    even: int
    rows: int
    more: int


def worst_load(run: RunConfig) -> WorstLoad | None:
    """Of a resolved run; None where no rank can get more rows than others: it has all experts, or a fixed number of
    rows of each."""
    parallel, layers = run.parallel, architecture(run.model).layers
    mixtures = [layer.experts for layer in layers if layer.experts is not None]
    if not mixtures or parallel.ep == 1:
        return None
    value, ep = mixtures[0], parallel.ep
    if value.capacity is not None and value.capacity.padded and not gathers_experts(run):
        return None
    tensor = parallel.tp if parallel.sequence_parallel else 1
    tokens = microbatch_rows(run) * run.batch.seq_length // parallel.cp // tensor * ep
    tokens *= max(1, parallel.etp // (1 if parallel.sequence_parallel else parallel.tp))
    even, rows = tokens * value.chosen // ep, tokens * min(value.chosen, value.count // ep)
    if value.capacity is not None:
        rows = min(rows, int(even * value.capacity.factor))
    width = value.expert.width // parallel.etp
    kept = layers[0].norm.width + (2 + 1 + value.expert.gated) * width
    held = max(sum(map(_mixtures, stage)) for stage in stage_chunks(run))
    held = 1 if run.memory.recompute == "full" else held
    return WorstLoad(even, rows, max(0, rows - even) * kept * BYTES[run.precision.dtype] * held)


def _mixtures(chunk: Chunk) -> int:
    """Blocks of a chunk that have experts, of a model that has some."""
    return sum(kind.experts for kind in chunk.kinds) if chunk.kinds else chunk.blocks
