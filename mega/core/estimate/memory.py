"""Memory of every rank of a run: what it holds all the time, and a step played through the pipeline's own plan.

The ranks of one pipeline stage hold equally much, so there is one answer per stage: its peak, what it consists of, and
when it comes. The plan is the one that the trainer executes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mega.core.config.resolve import data_parallel, microbatches
from mega.core.config.run import RunConfig
from mega.core.estimate.activations import Footprint, Sizes, footprint
from mega.core.estimate.weights import BYTES, Weights, passing, stage_weights, wide
from mega.core.inventory import parameters
from mega.core.plan import Act, Compute, Exchange, plan, stage_layers

LIBRARIES = 32 << 20
"""Workspace of cuBLAS on a Hopper device, which comes out of the allocator like any tensor."""

SENT = 4
"""Sends of a pipeline that may be on their way (parallel/pipeline.py)."""

SLACK = 0.06
"""Share of the moving memory that the caching allocator reserves and cannot use, as we budget it."""


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage; bytes. The parts add up to the peak.

    activations: kept for microbatches in flight. working: what the op at the peak needs besides. cargo: pipeline
    sends and receives. live: the most microbatches (of a chunk) in flight. when: what runs at the peak.
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

    @property
    def moving(self) -> int:
        return self.activations + self.working + self.cargo

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return self.held.total + self.batches + self.moving

    @property
    def slack(self) -> int:
        return int(SLACK * self.moving)


@dataclass(frozen=True)
class Memory:
    """All stages of a run, and the sizes that belong to the whole of it."""

    stages: tuple[StageMemory, ...]
    parameters: int
    checkpoint: int
    communicators: int
    """The most that one rank takes part in; each has buffers outside the allocator."""
    mapped: int
    """Bytes outside the allocator that tensor ranks write for one another (--tp-overlap)."""

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
        return (self.need + self.mapped) / 2**30 + self.communicators * communicator


def memory(run: RunConfig, world: int) -> Memory:
    """What a resolved `run` needs on `world` ranks."""
    parallel, count = run.parallel, microbatches(run, world)
    assert parallel.schedule is not None
    acts = plan(parallel.schedule, parallel.pp, parallel.chunks, representative(run, count)).acts
    dp = data_parallel(run, world)
    stages = tuple(_stage(run, acts[stage], stage, dp, count) for stage in range(parallel.pp))
    return Memory(stages, parameters(run.model), checkpoint_bytes(run), communicators(run, dp), mapped_bytes(run))


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
    ends = parallel.pp > 1 and run.model.tied
    return len(groups) + links + ends


def mapped_bytes(run: RunConfig) -> int:
    """Four exchanges of a microbatch's tokens, see parallel/peers.py."""
    batch, parallel = run.batch, run.parallel
    if not parallel.tp_overlap:
        return 0
    assert batch.micro_batch and batch.seq_length and run.model.hidden
    return 4 * batch.micro_batch * batch.seq_length // parallel.cp * run.model.hidden * BYTES[run.precision.dtype]


def checkpoint_bytes(run: RunConfig) -> int:
    """Bytes of tensors in one checkpoint: weights, and masters and moments where they are saved."""
    weight, high = BYTES[run.precision.dtype], wide(run.precision.dtype)
    masters = high if high != weight and run.precision.masters else 0
    moments = {"adam": 2, "lamb": 2, "sgd": int(run.optimizer.sgd_momentum > 0), "adafactor": 0}
    state = masters + moments[run.optimizer.optimizer] * high
    return parameters(run.model) * (weight + (state if run.checkpoint.save_optim else 0))


def serving_bytes(run: RunConfig) -> int:
    """Bytes of the weights alone, over all tensor ranks, as a server holds them."""
    return parameters(run.model) * BYTES[run.precision.dtype]


def kv_cache_bytes(run: RunConfig) -> int:
    """Bytes of one token's keys and values over all layers and tensor ranks, while serving."""
    model = run.model
    assert model.layers and model.kv_heads and model.head_dim
    return 2 * model.layers * model.kv_heads * model.head_dim * BYTES[run.precision.dtype]


def footprints(run: RunConfig, stage: int, dp: int, count: int) -> list[Footprint]:
    """One microbatch of `count` on each chunk of a stage."""
    parallel = run.parallel
    assert run.model.layers
    layers = stage_layers(run.model.layers, parallel.pp, parallel.chunks, parallel.stage_layers)[stage]
    last = parallel.chunks - 1
    moving = passing(run, dp, repeats=count > 1)
    return [
        footprint(
            run,
            len(blocks),
            first=stage == 0 and chunk == 0,
            last=stage == parallel.pp - 1 and chunk == last,
            passing=moving,
        )
        for chunk, blocks in enumerate(layers)
    ]


def representative(run: RunConfig, count: int) -> int:
    """The fewest microbatches whose plan has the peaks that `count` would have: the steady part only repeats itself.

    gpipe has no steady part. Under 1F1B rank r is full once it holds pp - r microbatches; interleaved plans take two
    rounds of pp to fill every chunk, and their last round may be uneven.
    """
    parallel = run.parallel
    if parallel.schedule == "gpipe":
        return count
    full = 2 * parallel.pp + count % parallel.pp if parallel.chunks > 1 else parallel.pp + 2
    return min(count, full)


def _stage(run: RunConfig, acts: Sequence[Act], stage: int, dp: int, count: int) -> StageMemory:
    parallel = run.parallel
    assert run.model.layers
    sizes, held = Sizes(run), stage_weights(run, dp, stage)
    playing = _Playing(acts, footprints(run, stage, dp, count), sizes.residual, stage, parallel.pp)
    activations, working, cargo, when = playing.peak
    update = _update(run, held, dp)
    if update > activations + working + cargo:
        activations, working, cargo, when = 0, update, 0, "optimizer step"
    # tokens, labels and positions are int64, loss weights fp32; all microbatches of a step are on the device
    batches = count * sizes.rows * (sizes.length * (36 if sizes.documents else 28) + 8)
    layers = stage_layers(run.model.layers, parallel.pp, parallel.chunks, parallel.stage_layers)[stage]
    return StageMemory(
        stage=stage,
        layers=sum(map(len, layers)),
        held=held,
        batches=batches,
        activations=activations,
        working=working + (LIBRARIES if sizes.kernels else 0),
        cargo=cargo,
        live=playing.most,
        when=when,
    )


def _update(run: RunConfig, held: Weights, dp: int) -> int:
    """What the optimizer needs besides its state: copies of a bucket's span, wide. Weights are gathered in place."""
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    weight, high = BYTES[precision.dtype], wide(precision.dtype)
    copies = {"adam": 0, "sgd": 1, "lamb": 3, "adafactor": 2}[options.optimizer]
    copies += (BYTES[precision.grad_dtype] != high) + (not precision.masters)
    shares = dp * run.parallel.cp if run.parallel.zero else 1
    return 0 if options.optimizer_offload else copies * (held.largest // weight // shares * high)


class _Playing:
    """One rank's acts in order, with what is alive at each. `peak`: activations, working, cargo, and when."""

    def __init__(
        self, acts: Sequence[Act], chunks: Sequence[Footprint], residual: int, stage: int, stages: int
    ) -> None:
        self.chunks, self.residual, self.stage, self.stages = chunks, residual, stage, stages
        self.peak = (0, 0, 0, "never")
        self.held = self.live = self.most = 0
        self.arrived = 0
        self.leaving: deque[int] = deque(maxlen=SENT)
        for act in acts:
            if isinstance(act, Exchange):
                self._exchange(act)
            else:
                self._compute(act)

    def _exchange(self, act: Exchange) -> None:
        # What is sent forwards is kept for the backward pass anyway.
        self.leaving.extend(self.residual if transfer.kind == "B" else 0 for transfer in act.sends)
        self.arrived += len(act.recvs) * self.residual

    def _compute(self, act: Compute) -> None:
        chunk, where = self.chunks[act.chunk], act.chunk * self.stages + self.stage
        last = where == len(self.chunks) * self.stages - 1
        if act.kind == "F":
            self.arrived -= self.residual if where and self.stages > 1 else 0
            self._see(chunk.forward, act)
            self.held += chunk.held
            self.live += 1
            self.most = max(self.most, self.live)
        elif act.kind == "B":
            self._see(chunk.backward - chunk.held, act)
            self.arrived -= self.residual if not last and self.stages > 1 else 0
            self.held += chunk.products - chunk.held
            self.live -= 1
        else:
            self.held -= chunk.products

    def _see(self, working: int, act: Compute) -> None:
        cargo = max(0, self.arrived) + sum(self.leaving)
        if self.held + working + cargo > sum(self.peak[:3]):
            pass_ = "forward" if act.kind == "F" else "backward"
            chunk = f", chunk {act.chunk}" if len(self.chunks) > 1 else ""
            self.peak = (self.held, working, cargo, f"{pass_} of microbatch {act.microbatch}{chunk}")
