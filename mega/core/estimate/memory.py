"""Predicts the memory of every rank of a run: constant memory, and the memory of a step, simulated with the pipeline
plan.

All ranks of a pipeline stage use the same amount of memory, so the result has one entry per stage: the peak, what it
consists of, and when it occurs. The simulation uses the plan that the trainer executes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import mul
from typing import NamedTuple

from mega.core.architecture import architecture, inventory, parameters
from mega.core.config.resolve import data_parallel, eager_microbatches, microbatches, records_graph, shares_casts
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.footprint import Footprint, footprint
from mega.core.estimate.hardware import GIB
from mega.core.estimate.weights import BYTES, Weights, stage_weights, tied_stages, transient_buckets, wide_bytes
from mega.core.inference.capacity import cache_bytes
from mega.core.plan import Act, Compute, Exchange, plan
from mega.core.plan.exchange import needs

LIBRARIES = 32 << 20
"""Bytes of the cuBLAS workspace on a Hopper device, which torch's allocator allocates. A CUDA graph has two additional
workspaces, one for each pass."""

SENT = 4
"""Maximum number of pipeline sends in flight (parallel/pipeline.py)."""

SLACK = 0.06
"""Assumed memory that the caching allocator reserves but cannot use, as a fraction of `StageMemory.moving`."""


@dataclass(frozen=True)
class StageMemory:
    """The memory of one rank of a pipeline stage at its peak, in bytes."""

    stage: int  # Index of the stage
    layers: int  # Number of blocks in the stage
    held: Weights  # Weights and optimizer state
    batches: int  # Inputs of all microbatches of a step
    activations: int  # Activations stored for microbatches in flight
    working: int  # Additional memory of the op at the peak
    cargo: int  # Pipeline sends and receives
    live: int  # Maximum number of microbatches (of a chunk) in flight
    when: str  # What runs at the peak, as text
    graph: int = 0  # Additional memory that a CUDA graph reserves for its microbatch (--cuda-graph)

    @property
    def moving(self) -> int:
        return self.activations + self.working + self.cargo

    @property
    def peak(self) -> int:
        """Maximum number of allocated bytes."""
        return self.held.total + self.batches + self.moving

    @property
    def slack(self) -> int:
        return int(SLACK * self.moving) + self.graph


@dataclass(frozen=True)
class Memory:
    """The memory of all stages of a run, and totals."""

    stages: tuple[StageMemory, ...]
    """Memory of each pipeline stage, in order."""
    parameters: int
    """Number of parameters of the model."""
    checkpoint: int
    """Bytes of a checkpoint."""
    communicators: int
    """Maximum number of process groups of a rank. Each group has buffers that torch's allocator does not allocate."""
    mapped: int
    """Bytes of buffers outside torch's allocator into which tensor ranks write the tokens of an exchange
    (--tp-overlap)."""

    @property
    def worst(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def need(self) -> int:
        """Bytes that a device needs for the rank with the highest peak, including slack."""
        return max(stage.peak + stage.slack for stage in self.stages)

    def needed(self, communicator: float) -> float:
        """Memory in GiB that the rank with the highest peak needs, including `communicator` GiB for each process
        group."""
        return (self.need + self.mapped) / GIB + self.communicators * communicator


def memory(run: RunConfig, world: int) -> Memory:
    """The memory of a resolved `run` on `world` ranks."""
    parallel, count = run.parallel, microbatches(run, world)
    timelines = timelines_of(parallel.schedule, parallel.pp, parallel.chunks, representative(run, count))
    dp, chunks = data_parallel(run, world), stage_chunks(run)
    shared = shares_casts(run)
    weights = {stage_chunk: stage_weights(run, dp, stage_chunk, shared=shared) for stage_chunk in set(chunks)}
    prints = footprints(run, set(chain(*chunks)), dp, count)
    libraries = 0 if run.runtime.device == "cpu" else LIBRARIES
    stages = []
    for stage, stage_chunk in enumerate(chunks):
        weights_of_stage, timeline, footprints_ = (
            weights[stage_chunk],
            timelines[stage],
            [prints[chunk] for chunk in stage_chunk],
        )
        activations, working, cargo, when = timeline.peak(footprints_)
        update = _update(run, weights_of_stage) + max(one.in_flight for one in footprints_)
        # A CUDA graph reserves the memory of its microbatch. With data-parallel ranks, the last of several microbatches
        # runs eagerly and needs memory in addition; otherwise only updates and validation need additional memory.
        graph = (activations + working) if records_graph(run, world) else 0
        graph_bytes = graph if eager_microbatches(dp * parallel.cp, count) else min(graph, max(update, working))
        if update > activations + working + cargo:
            activations, working, cargo, when, graph_bytes = 0, update, 0, "optimizer step", graph
        stages.append(
            StageMemory(
                stage=stage,
                layers=sum(chunk.blocks for chunk in stage_chunk),
                held=weights_of_stage,
                batches=count * footprints_[0].batch,  # inputs of all microbatches of a step are on the device
                activations=activations,
                working=working + libraries * (3 if graph else 1),
                cargo=cargo,
                live=timeline.live,
                when=when,
                graph=graph_bytes,
            )
        )
    return Memory(
        tuple(stages),
        parameters=parameters(run.model),
        checkpoint=checkpoint_bytes(run),
        communicators=communicators(run, dp),
        mapped=max(one.mapped for one in prints.values()),
    )


def minimum_gib(run: RunConfig, world: int, communicator: float) -> float:
    """A lower bound of `memory(run, world).needed(communicator)`, in GiB: the constant memory of the first stage and
    the memory of process groups."""
    dp, shared = data_parallel(run, world), shares_casts(run)
    weights = stage_weights(run, dp, stage_chunks(run)[0], shared=shared)
    return weights.total / GIB + communicators(run, dp) * communicator


def communicators(run: RunConfig, dp: int) -> int:
    """The number of process groups of a rank in a stage between the first and the last: one group per distinct set of
    ranks along its axes, and one per link to a neighbouring stage.

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> run = resolve(compose("llama2-7b", flags={"micro_batch": 1, "tp": 2, "pp": 2}), world=4)
    >>> communicators(run, dp=1)  # tp, pp, both together, and a link for each direction
    5
    """
    parallel = run.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": dp, "pp": parallel.pp}
    norm = sizes if parallel.zero else ("tp", "pp")
    used = [("tp",), ("cp",), ("cp", "dp"), ("cp", "dp", "pp"), norm]
    groups = {frozenset(axis for axis in axes if sizes[axis] > 1) for axes in used} - {frozenset()}
    links = 0 if parallel.pp == 1 else 2 if parallel.pp == 2 and parallel.chunks == 1 else 4
    tied = tied_stages(run.model, parallel.pp, parallel.chunks, parallel.stage_layers)
    return len(groups) + links + len(set(tied.values()))


def checkpoint_bytes(run: RunConfig) -> int:
    """Bytes of tensors in a checkpoint: trained weights, and masters and moments if these are saved."""
    weight, high = BYTES[run.precision.dtype], wide_bytes(run.precision.dtype)
    offloaded = run.optimizer.optimizer_offload  # with offload, the host stores separate masters
    masters = high if high != weight and (offloaded or run.precision.masters) else 0
    elements, hidden_matrices = _trained_elements(run.model)
    if not run.checkpoint.save_optim:
        return elements * weight
    moments = {"adam": 2, "lamb": 2, "sgd": int(run.optimizer.sgd_momentum > 0), "adafactor": 0, "muon": 2}
    values = moments[run.optimizer.optimizer] * elements
    if run.optimizer.optimizer == "muon":
        values -= hidden_matrices
    return elements * (weight + masters) + values * high


@lru_cache(maxsize=8)
def _trained_elements(model: ModelConfig) -> tuple[int, int]:
    """Return (number of trained elements, number of these in hidden matrices)."""
    trained = [tensor for tensor in inventory(model) if tensor.trainable]
    return sum(tensor.elements for tensor in trained), sum(t.elements for t in trained if t.hidden_matrix)


def logits_bytes(run: RunConfig) -> int:
    """Bytes that the last stage stores for the backward pass of a microbatch's logits and loss."""
    return footprint(run, stage_chunks(run)[-1][-1]).head


def serving_bytes(run: RunConfig) -> int:
    """Bytes of the weights of a server, summed over all tensor ranks."""
    return parameters(run.model) * BYTES[run.precision.dtype]


def kv_cache_bytes(run: RunConfig) -> int:
    """Bytes of one token's keys and values in a server's cache, summed over all layers and tensor ranks."""
    return cache_bytes(architecture(run.model), BYTES[run.precision.dtype])


def footprints(run: RunConfig, chunks: Collection[Chunk], dp: int, count: int) -> dict[Chunk, Footprint]:
    """Return a dict: chunk -> footprint of one of `count` microbatches on this chunk."""
    buckets = transient_buckets(run, dp)
    return {chunk: footprint(run, chunk, buckets, repeats=count > 1) for chunk in chunks}


STEADY = ("1f1b", "interleaved", "zb-h1")
"""Schedules with a steady state. Their peaks are the same for few microbatches as for many."""


def representative(run: RunConfig, count: int) -> int:
    """Return the smallest number of microbatches whose plan has the same memory peaks as a plan of `count`
    microbatches.

    The peaks are the same because the steady state only repeats. The result is `count` for schedules that may have no
    steady state, such as gpipe. Under 1F1B, rank r reaches its peak once it stores pp - r microbatches. Interleaved
    plans need two rounds of pp microbatches to fill every chunk, and a third for the maximum number of sends in flight.
    The last round may have fewer microbatches.
    """
    parallel = run.parallel
    if parallel.schedule not in STEADY:
        return count
    full = 3 * parallel.pp + count % parallel.pp if parallel.chunks > 1 else parallel.pp + 2
    return min(count, full)


def _update(run: RunConfig, weights: Weights) -> int:
    """Temporary memory of the optimizer in bytes: fp32 (or wider) copies of the bucket span that this rank updates.
    Weights are gathered in place."""
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    high = wide_bytes(precision.dtype)
    copies = {"adam": 0, "sgd": 1, "lamb": 3, "adafactor": 2, "muon": 1}[options.optimizer]
    copies += (BYTES[precision.grad_dtype] != high) + (not precision.masters)
    # Muon has four copies of the whole matrices that this rank updates: gathered, assembled, orthogonalized, and
    # returned.
    return (0 if options.optimizer_offload else copies * weights.largest * high) + 4 * weights.owned * high


class LiveSet(NamedTuple):
    """The number of tensors of each kind that a rank holds during a forward or backward pass. These numbers do not
    depend on sizes in bytes, so runs with the same plan share live sets."""

    kind: str  # "F" or "B"
    chunk: int  # Index of the chunk that runs
    held: tuple[int, ...]  # Number of microbatches of each chunk between forward and backward
    deferred: tuple[int, ...]  # Number of microbatches of each chunk between backward and weight gradients
    cargo: int  # Number of received tensors not yet consumed, plus number of sent gradients that may be in flight


@dataclass(frozen=True)
class Timeline:
    """The live sets of one rank while it executes the plan."""

    sets: Mapping[LiveSet, int]
    """Live set -> index of the first microbatch with this live set, in the order of the plan."""
    live: int
    """Maximum number of microbatches (of a chunk) in flight."""

    def peak(self, chunks: Sequence[Footprint]) -> tuple[int, int, int, str]:
        """Return the bytes of activations, of working memory and of tensors in transfer for the largest live set (the
        first in case of a tie), and a description of what runs at that time."""
        held_bytes, deferred_bytes = [chunk.held for chunk in chunks], [chunk.deferred for chunk in chunks]
        peaks = {"F": [chunk.forward for chunk in chunks], "B": [chunk.backward for chunk in chunks]}

        def bytes_of(live: LiveSet) -> tuple[int, int, int]:
            stored = sum(map(mul, live.held, held_bytes)) + sum(map(mul, live.deferred, deferred_bytes))
            return stored, peaks[live.kind][live.chunk] - held_bytes[live.chunk], live.cargo * chunks[0].cargo

        largest = max(self.sets, key=lambda live: sum(bytes_of(live)))
        pass_ = "forward" if largest.kind == "F" else "backward"
        chunk = f", chunk {largest.chunk}" if len(chunks) > 1 else ""
        return *bytes_of(largest), f"{pass_} of microbatch {self.sets[largest]}{chunk}"


@lru_cache(maxsize=256)
def timelines_of(kind: str, stages: int, chunks: int, count: int) -> tuple[Timeline, ...]:
    """Return the timeline of every rank for a plan."""
    acts = plan(kind, stages, chunks, count).acts
    return tuple(_timeline(acts[stage], stage, stages, chunks) for stage in range(stages))


def _timeline(acts: Sequence[Act], stage: int, stages: int, chunks: int) -> Timeline:
    sets: dict[LiveSet, int] = {}
    held_count, deferred_count = [0] * chunks, [0] * chunks
    splits_weights = any(isinstance(act, Compute) and act.kind == "W" for act in acts)
    waiting_cargo, sent = 0, deque[bool](maxlen=SENT)
    for act in acts:
        if isinstance(act, Exchange):
            # Forward sends need no additional memory, because the sent tensors are stored for the backward pass anyway.
            # Only sent gradients are counted.
            sent.extend(transfer.kind == "B" for transfer in act.sends)
            waiting_cargo += len(act.recvs)
        elif act.kind == "W":
            deferred_count[act.chunk] -= 1
        else:
            forward, cargo_source = act.kind == "F", needs(act, act.chunk * stages + stage, chunks * stages - 1)
            receives_cargo = stages > 1 and cargo_source is not None
            waiting_cargo -= receives_cargo and forward
            held_count[act.chunk] += forward
            live = LiveSet(
                act.kind, act.chunk, tuple(held_count), tuple(deferred_count), max(0, waiting_cargo) + sum(sent)
            )
            sets.setdefault(live, act.microbatch)
            waiting_cargo -= receives_cargo and not forward
            held_count[act.chunk] -= not forward
            deferred_count[act.chunk] += splits_weights and not forward
    return Timeline(sets, max(sum(live.held) for live in sets))
