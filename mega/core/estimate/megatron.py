"""Computes Megatron-LM's `report_theoretical_memory` with the same formulas, for comparison.

The formulas ignore biases and position tables, and assume bf16 with fp32 gradients and Adam. Activations follow the
closed formula of Korthikanti et al. 2022 (arXiv 2205.05198). A megabyte is 1024 squared bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mega.core.architecture import Architecture, architecture
from mega.core.config.resolve import data_parallel, microbatches
from mega.core.config.run import RunConfig

MEGABYTE = 1024.0**2


@dataclass(frozen=True)
class TheoreticalMemory:
    """The numbers in Megatron-LM's report. Parameters are in elements; sizes are in megabytes on the most loaded
    rank."""

    parameters: float  # Number of parameters of the whole model
    shard: float  # Number of parameters on the most loaded rank
    others: float  # Number of parameters on each of the other ranks, if there are several stages
    layer: float  # Activations of one layer on a rank
    in_flight: int | None  # Number of microbatches in flight; None if there is one stage
    weights: float  # Weights and optimizer
    activations: float  # Activations

    @property
    def total(self) -> float:
        return self.weights + self.activations


def report(run: RunConfig, world: int) -> TheoreticalMemory:
    """Megatron-LM's numbers for a resolved `run`."""
    model, parallel = architecture(run.model), run.parallel
    queries, dense = model.block.attention, model.block.feed_forward
    layers, h, t, p = _layers(model), model.hidden, parallel.tp, parallel.pp
    attention = 2 * h * h * (1 + queries.kv_heads / queries.heads) * (queries.width / h)
    mlp = 2 * h * dense.width * (1.5 if dense.gated else 1)
    norm = (2 if model.block.norm.kind == "layernorm" else 1) * h
    embedding = h * model.input.rows(t)
    all_parameters = layers * (attention + mlp + 2 * norm) + norm + embedding * (1 if model.tied else 2)
    layers_per_rank = layers * (attention + mlp) / p / t + (layers * 2 * norm + norm) / p
    shard = layers_per_rank + embedding / t * (2 if not model.tied and p == 1 else 1)
    per_parameter = 6 + 12 / data_parallel(run, world) if parallel.zero else 18
    layer, activations, in_flight = _activations(run, world)
    return TheoreticalMemory(
        parameters=all_parameters,
        shard=shard,
        others=layers_per_rank,
        layer=layer / MEGABYTE,
        in_flight=in_flight,
        weights=shard * per_parameter / MEGABYTE,
        activations=activations / MEGABYTE,
    )


def _layers(model: Architecture) -> int:
    """The value of --num-layers; for a model with an encoder and a decoder, the number of encoder layers."""
    return len(model.stacks[0].layers)


def _activations(run: RunConfig, world: int) -> tuple[float, float, int | None]:
    """Return (activation bytes of one layer, activation bytes of a rank, number of microbatches in flight). The last
    value is None for a single stage."""
    model, parallel, batch = architecture(run.model), run.parallel, run.batch
    s, b, h, t, p, v = batch.seq_length, batch.micro_batch, model.hidden, parallel.tp, parallel.pp, parallel.chunks
    vocab, ffn = model.input.rows(t), model.block.feed_forward.width
    selective = parallel.sequence_parallel and run.memory.recompute == "selective"
    layer = s * b * h * (18 + 4 * ffn / h) if selective else s * b * h * (10 + 24 / t)
    total = layer * _layers(model) + 8 * s * b * p + s * b * h * p
    in_flight = None
    if v > 1:
        interleave_factor = 1 + (p - 1) / (p * v)
        total, in_flight = total * interleave_factor, ceil(p * interleave_factor)
    elif p > 1:
        in_flight = min(microbatches(run, world), p)
        total *= in_flight / p
    if selective:
        if p == 1:
            total += 4 * s * b * h * (1 + vocab / h)
        return layer / t, total / t, in_flight
    if p == 1:
        total += 2 * (s * b * vocab / t + s * b * h)
    return layer, total * 1.05, in_flight
