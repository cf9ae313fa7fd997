"""Memory of every rank of a run: what it holds all the time, and a step played through the pipeline's own plan.

The ranks of one pipeline stage hold equally much, so there is one answer per stage: its peak, what it consists of, and
when it comes. The plan is the one that the trainer executes.
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
from mega.core.config.resolve import data_parallel, eager_microbatches, microbatches, records_graph
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.footprint import Footprint, footprint
from mega.core.estimate.hardware import GIB
from mega.core.estimate.weights import BYTES, Weights, stage_weights, tied_stages, transient_buckets, wide
from mega.core.inference.capacity import cache_bytes
from mega.core.plan import Act, Compute, Exchange, plan
from mega.core.plan.exchange import needs

LIBRARIES = 32 << 20
"""Workspace of cuBLAS on a Hopper device, which comes out of the allocator like any tensor; a graph has two of its own,
one for each pass."""

SENT = 4
"""Sends of a pipeline that may be on their way (parallel/pipeline.py)."""

SLACK = 0.06
"""Share of the moving memory that the caching allocator reserves and cannot use, as we budget it."""


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage; bytes. The parts add up to the peak.

    activations: kept for microbatches in flight. working: what the op at the peak needs besides. cargo: pipeline
    sends and receives. live: the most microbatches (of a chunk) in flight. when: what runs at the peak. graph: what a
    recorded microbatch keeps from the allocator besides (--cuda-graph).
    """

    stage: int
    layers: int
    held: Weights
    batches: int
    activations: int
    working: int
    cargo: int
    live: int
    when: str
    graph: int = 0

    @property
    def moving(self) -> int:
        return self.activations + self.working + self.cargo

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return self.held.total + self.batches + self.moving

    @property
    def slack(self) -> int:
        return int(SLACK * self.moving) + self.graph


@dataclass(frozen=True)
class Memory:
    """All stages of a run, and the sizes that belong to the whole of it."""

    stages: tuple[StageMemory, ...]
    parameters: int
    checkpoint: int
    communicators: int
    """The most that one rank takes part in; each has buffers outside the allocator."""
    mapped: int
    """Bytes outside the allocator, into which tensor ranks write the tokens of an exchange (--tp-overlap)."""

    @property
    def worst(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def need(self) -> int:
        """Bytes that a device must have for the fullest rank, slack included."""
        return max(stage.peak + stage.slack for stage in self.stages)

    def needed(self, communicator: float) -> float:
        """GiB of the fullest rank, with so many GiB for each communicator."""
        return (self.need + self.mapped) / GIB + self.communicators * communicator


def memory(run: RunConfig, world: int) -> Memory:
    """What a resolved `run` needs on `world` ranks."""
    parallel, count = run.parallel, microbatches(run, world)
    timelines = played(parallel.schedule, parallel.pp, parallel.chunks, representative(run, count))
    dp, chunks = data_parallel(run, world), stage_chunks(run)
    weights = {own: stage_weights(run, dp, own) for own in set(chunks)}
    prints = footprints(run, set(chain(*chunks)), dp, count)
    libraries = 0 if run.runtime.device == "cpu" else LIBRARIES
    stages = []
    for stage, own in enumerate(chunks):
        held, timeline, footprints_ = weights[own], timelines[stage], [prints[chunk] for chunk in own]
        activations, working, cargo, when = timeline.peak(footprints_)
        update = _update(run, held) + max(one.in_flight for one in footprints_)
        # A graph keeps what its microbatch took. Not recorded are the last of several, where data are shared, or else
        # updates and validation.
        graph = (activations + working) if records_graph(run, world) else 0
        kept = graph if eager_microbatches(dp * parallel.cp, count) else min(graph, max(update, working))
        if update > activations + working + cargo:
            activations, working, cargo, when, kept = 0, update, 0, "optimizer step", graph
        stages.append(
            StageMemory(
                stage=stage,
                layers=sum(chunk.blocks for chunk in own),
                held=held,
                batches=count * footprints_[0].batch,  # all microbatches of a step are on the device
                activations=activations,
                working=working + libraries * (3 if graph else 1),
                cargo=cargo,
                live=timeline.live,
                when=when,
                graph=kept,
            )
        )
    return Memory(
        tuple(stages),
        parameters=parameters(run.model),
        checkpoint=checkpoint_bytes(run),
        communicators=communicators(run, dp),
        mapped=max(one.mapped for one in prints.values()),
    )


def least(run: RunConfig, world: int, communicator: float) -> float:
    """GiB below which `memory(run, world).needed(communicator)` cannot be: what the first stage holds all the time."""
    dp = data_parallel(run, world)
    return stage_weights(run, dp, stage_chunks(run)[0]).total / GIB + communicators(run, dp) * communicator


def communicators(run: RunConfig, dp: int) -> int:
    """Process groups of an inner rank: those of its axes (equal sets of ranks share one), and links to neighbours.

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
    """Bytes of tensors in one checkpoint: trained weights, and masters and moments where they are saved."""
    weight, high = BYTES[run.precision.dtype], wide(run.precision.dtype)
    apart = run.optimizer.optimizer_offload  # the host then updates masters of its own
    masters = high if high != weight and (apart or run.precision.masters) else 0
    trained = [tensor for tensor in inventory(run.model) if tensor.trainable]
    kept = sum(tensor.elements for tensor in trained)
    if not run.checkpoint.save_optim:
        return kept * weight
    moments = {"adam": 2, "lamb": 2, "sgd": int(run.optimizer.sgd_momentum > 0), "adafactor": 0, "muon": 2}
    values = moments[run.optimizer.optimizer] * kept
    if run.optimizer.optimizer == "muon":
        values -= sum(tensor.elements for tensor in trained if tensor.hidden_matrix)
    return kept * (weight + masters) + values * high


def logits_bytes(run: RunConfig) -> int:
    """Bytes that the last stage keeps of a microbatch's logits and loss until their backward pass."""
    return footprint(run, stage_chunks(run)[-1][-1]).head


def serving_bytes(run: RunConfig) -> int:
    """Bytes of the weights alone, over all tensor ranks, as a server holds them."""
    return parameters(run.model) * BYTES[run.precision.dtype]


def kv_cache_bytes(run: RunConfig) -> int:
    """Bytes of one token's keys and values over all layers and tensor ranks, while serving."""
    return cache_bytes(architecture(run.model), BYTES[run.precision.dtype])


def footprints(run: RunConfig, chunks: Collection[Chunk], dp: int, count: int) -> dict[Chunk, Footprint]:
    """One microbatch of `count` on each of the chunks."""
    buckets = transient_buckets(run, dp)
    return {chunk: footprint(run, chunk, buckets, repeats=count > 1) for chunk in chunks}


STEADY = ("1f1b", "interleaved", "zb-h1")
"""Schedules of which a few microbatches show the peaks of many."""


def representative(run: RunConfig, count: int) -> int:
    """The fewest microbatches whose plan has the peaks that `count` would have: the steady part only repeats itself.

    Any other schedule, as gpipe, may have no steady part. Under 1F1B rank r is full once it holds pp - r microbatches;
    interleaved plans take two rounds of pp to fill every chunk, a third with all cargo on its way, and their last round
    may be uneven.
    """
    parallel = run.parallel
    if parallel.schedule not in STEADY:
        return count
    full = 3 * parallel.pp + count % parallel.pp if parallel.chunks > 1 else parallel.pp + 2
    return min(count, full)


def _update(run: RunConfig, held: Weights) -> int:
    """What the optimizer needs besides its state: copies of a bucket's span, wide. Weights are gathered in place."""
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    high = wide(precision.dtype)
    copies = {"adam": 0, "sgd": 1, "lamb": 3, "adafactor": 2, "muon": 1}[options.optimizer]
    copies += (BYTES[precision.grad_dtype] != high) + (not precision.masters)
    # Whole matrices of which this rank is the owner: as they come, put together, made orthogonal, and as they return.
    return (0 if options.optimizer_offload else copies * held.largest * high) + 4 * held.owned * high


class LiveSet(NamedTuple):
    """What is alive on a rank during a compute, in numbers: no bytes, so that many runs share one plan's.

    held: microbatches of each chunk from forward to backward. deferred: those between backward and weights.
    cargo: pieces that have come and wait, and gradients sent that may be in flight.
    """

    kind: str
    chunk: int
    held: tuple[int, ...]
    deferred: tuple[int, ...]
    cargo: int


@dataclass(frozen=True)
class Timeline:
    """One rank's plan: its different live sets, each with the first microbatch that meets it, in order.

    live: the most microbatches (of a chunk) in flight.
    """

    sets: Mapping[LiveSet, int]
    live: int

    def peak(self, chunks: Sequence[Footprint]) -> tuple[int, int, int, str]:
        """Activations, working and cargo of the first of the largest live sets, and what runs then."""
        held, deferred = [chunk.held for chunk in chunks], [chunk.deferred for chunk in chunks]
        peaks = {"F": [chunk.forward for chunk in chunks], "B": [chunk.backward for chunk in chunks]}

        def bytes_of(live: LiveSet) -> tuple[int, int, int]:
            kept = sum(map(mul, live.held, held)) + sum(map(mul, live.deferred, deferred))
            return kept, peaks[live.kind][live.chunk] - held[live.chunk], live.cargo * chunks[0].cargo

        largest = max(self.sets, key=lambda live: sum(bytes_of(live)))
        pass_ = "forward" if largest.kind == "F" else "backward"
        chunk = f", chunk {largest.chunk}" if len(chunks) > 1 else ""
        return *bytes_of(largest), f"{pass_} of microbatch {self.sets[largest]}{chunk}"


@lru_cache(maxsize=256)
def played(kind: str, stages: int, chunks: int, count: int) -> tuple[Timeline, ...]:
    """Every rank's timeline of a plan."""
    acts = plan(kind, stages, chunks, count).acts
    return tuple(_timeline(acts[stage], stage, stages, chunks) for stage in range(stages))


def _timeline(acts: Sequence[Act], stage: int, stages: int, chunks: int) -> Timeline:
    sets: dict[LiveSet, int] = {}
    held, deferred = [0] * chunks, [0] * chunks
    later = any(isinstance(act, Compute) and act.kind == "W" for act in acts)
    arrived, sent = 0, deque[bool](maxlen=SENT)
    for act in acts:
        if isinstance(act, Exchange):
            # What is sent forwards is kept for the backward pass anyway.
            sent.extend(transfer.kind == "B" for transfer in act.sends)
            arrived += len(act.recvs)
        elif act.kind == "W":
            deferred[act.chunk] -= 1
        else:
            forward, brought = act.kind == "F", needs(act, act.chunk * stages + stage, chunks * stages - 1)
            used = stages > 1 and brought is not None
            arrived -= used and forward
            held[act.chunk] += forward
            live = LiveSet(act.kind, act.chunk, tuple(held), tuple(deferred), max(0, arrived) + sum(sent))
            sets.setdefault(live, act.microbatch)
            arrived -= used and not forward
            held[act.chunk] -= not forward
            deferred[act.chunk] += later and not forward
    return Timeline(sets, max(sum(live.held) for live in sets))
