"""Predicts the time of a step: the simulated pipeline plan, the reductions over data ranks, and the optimizer update.

    pipeline   the plan that the trainer executes, simulated with the seconds of a microbatch on each chunk (cost.py)
    step       the pipeline, plus the exposed part of the reductions over data ranks, and the optimizer

The constants are in hardware.toml and curves.json; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from mega.core.config.resolve import (
    data_parallel,
    eager_microbatches,
    microbatches,
    records_graph,
    shares_casts,
    text_lengths,
)
from mega.core.config.run import RunConfig
from mega.core.estimate import cost
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.cost import Card, Pass, chunk_pass
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.operations import operations, rough_operations
from mega.core.estimate.weights import BYTES, Weights, data_shards, stage_weights, wide_bytes
from mega.core.flops import model_flops_per_token
from mega.core.plan import Costs, plan, simulate

RULES = {"adam": 7.0, "sgd": 5.5, "lamb": 29.0, "adafactor": 23.0, "muon": 21.0}
"""Optimizer -> number of fp32 (or wider) values per parameter that an update in eager torch ops reads and writes, in
addition to masters and gradients. The numbers were measured (tests/gpu/updates.py), except the number for Muon, which
leaves out Muon's matrix products. Adam's number is for torch's fused update on a host; on a device, a single kernel
performs Adam's update."""

MOMENTUM = 4.5
"""Additional number of values per parameter that SGD reads and writes if it has momentum."""

HOST_BOUND = 0.05
"""Minimum fraction of host-bound passes for a step to be reported as host-bound."""

HIDES, LAST = 0.8, 0.1
"""HIDES: fraction of a pass that can overlap with an exchange between data ranks. LAST: fraction of the exchange that
cannot overlap, namely the last gradient reduction or the first parameter gather."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step, in seconds."""

    seconds: float  # Time of the whole step
    pipeline: float  # Time of all microbatches through the pipeline
    bubble: float  # Fraction of the pipeline time that ranks spend waiting
    reduction: float  # Time of the exposed gradient reduction
    update: float  # Time of the optimizer update and the exposed weight gather
    tflops: float  # Model TFLOP/s per device
    mfu: float  # Model FLOPs utilization: `tflops` divided by the peak of a device
    waiting: float  # Fraction of the passes in which devices wait for the host to launch operations
    host_bound: bool  # Whether the host limits the step: `waiting` is at least HOST_BOUND


def step_time(run: RunConfig, world: int, device: Hardware, *, play: bool = True) -> StepTime:
    """Predict one step of a resolved `run`.

    play: whether to simulate the pipeline; otherwise the pipeline's time is computed from the slowest stage only, which
    takes much less time.
    """
    parallel, dp, count = run.parallel, data_parallel(run, world), microbatches(run, world)
    recorded = records_graph(run, world)
    shared = shares_casts(run)
    times = Times(run, device, recorded=recorded, rough=not play, shared=shared)
    stages = stage_chunks(run)
    chunks, hop_seconds = times.pipeline(), times.hop(parallel.tp * parallel.cp * dp)
    pipeline, busy = pipeline_time(run, chunks, count, hop_seconds) if play else _bound(run, chunks, count)
    device_only = Times(run, device, recorded=True, rough=not play, shared=shared)
    waited = busy - count * sum(chunk.all for chunk in device_only.pipeline())
    # The stages reduce and update in parallel, but the gradient norm and the next step wait for the slowest stage.
    stage_weights_of = {stage: stage_weights(run, dp, stage, shared=shared) for stage in set(stages)}
    reductions = [times.reduction(dp, stage_weights_of[stage]) for stage in stages]
    reduction = max(reductions)
    if parallel.zero >= 2:
        reduction = count * times.sharing(dp, stage_weights_of[stages[0]], chunks[0])
    elif parallel.overlap_grad_reduce:
        passes = [sum(chunk.backward + chunk.weight for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
        reduction = max(exposed(summed, backward) for summed, backward in zip(reductions, passes, strict=True))
    if recorded and dp * parallel.cp > 1:
        if eager_microbatches(dp * parallel.cp, count):
            eager_chunk = Times(run, device, recorded=False, rough=not play, shared=shared).chunk(stages[0][0])
            pipeline += eager_chunk.all - chunks[0].all
            waited += eager_chunk.all - chunks[0].all
        else:
            reduction = max(reductions)
    forwards = [sum(chunk.forward for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
    update = max(
        times.update(dp, stage_weights_of[stage], forward) for stage, forward in zip(stages, forwards, strict=True)
    )
    seconds = pipeline + reduction + update
    flops = model_flops_per_token(run) * sum(text_lengths(run)) * run.batch.global_batch
    rate = flops / seconds / world / 1e12
    waiting = waited / max(busy, pipeline)
    return StepTime(
        seconds=seconds,
        pipeline=pipeline,
        bubble=1 - busy / (parallel.pp * pipeline),
        reduction=reduction,
        update=update,
        tflops=rate,
        mfu=rate / device.peak[run.precision.dtype],
        waiting=waiting,
        host_bound=waiting >= HOST_BOUND,
    )


def plan_costs(run: RunConfig, world: int, device: Hardware) -> Costs:
    """Return the durations of the pipeline plan's steps, in seconds, as `step_time` uses them."""
    shared = shares_casts(run)
    parallel, times = run.parallel, Times(run, device, recorded=records_graph(run, world), shared=shared)
    return _costs(times.pipeline(), times.hop(parallel.tp * parallel.cp * data_parallel(run, world)))


def update_bytes(run: RunConfig) -> float:
    """Bytes per parameter that a device moves to zero the gradients, compute their norm and update the weights.

    If the update runs on the host, only the zeroing and the norm are counted.

    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.config.compose import compose
    >>> rules = ({}, {"masters": False}, {"optimizer": "sgd", "sgd_momentum": 0.0}, {"optimizer": "adafactor"})
    >>> runs = [compose("gpt2-345m", flags={"micro_batch": 1, "dtype": "bf16", **rule}) for rule in rules]
    >>> [update_bytes(resolve(run, 1)) for run in runs]
    [38, 32, 44.0, 114.0]
    """
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    grad, weight, high = BYTES[precision.grad_dtype], BYTES[precision.dtype], wide_bytes(precision.dtype)
    if options.optimizer_offload:
        return 2 * grad
    has_masters = precision.masters and weight != high
    if options.optimizer == "adam":
        return 3 * grad + 4 * high + (2 * high + weight if has_masters else 2 * weight)
    # Without stored masters, a temporary fp32 copy of the weight is made.
    return 2 * grad + (0 if has_masters or weight == high else weight + high) + stepwise_bytes(run)


def stepwise_bytes(run: RunConfig) -> float:
    """Bytes per parameter that an update in eager torch ops moves in the memory that holds the masters (device or
    host).

    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.config.compose import compose
    >>> runs = [compose("gpt2-345m", flags={"micro_batch": 1, "dtype": dtype}) for dtype in ("bf16", "fp32")]
    >>> [stepwise_bytes(resolve(run, 1)) for run in runs]
    [42.0, 36.0]
    """
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    grad, weight, high = BYTES[precision.grad_dtype], BYTES[precision.dtype], wide_bytes(precision.dtype)
    # Bytes to widen the gradient, to scale the gradient, and to write the weight from the master.
    bytes_moved = (grad + high if grad != high else 0) + 2 * high + (high + weight if weight != high else 0)
    momentum = MOMENTUM if options.optimizer == "sgd" and options.sgd_momentum else 0.0
    return bytes_moved + (RULES[options.optimizer] + momentum) * high


def exposed(exchange: float, overlapped: float) -> float:
    """The time that an exchange between data ranks adds to an overlapping pass: the exposed part of the exchange, and
    the slowdown of the pass."""
    exposed_seconds = max(LAST * exchange, exchange - HIDES * overlapped)
    return exposed_seconds + cost.CROWDED * (exchange - exposed_seconds)


def pipeline_time(run: RunConfig, chunks: Sequence[Pass], count: int, hop: float) -> tuple[float, float]:
    """Return the time of all microbatches, and the busy time summed over all ranks, in seconds.

    The time of a long plan is extrapolated from short plans, because each further round of pp microbatches takes the
    same time once the pipeline is full.
    """
    parallel = run.parallel
    busy = count * sum(chunk.all for chunk in chunks)
    if parallel.pp == 1:
        return busy, busy
    kind, costs = parallel.schedule, _costs(chunks, hop)
    # 1F1B reaches its steady state after pp microbatches; interleaved plans reach it after 2 pp microbatches.
    short = 2 * parallel.pp + count % parallel.pp
    longer = short + parallel.pp
    if count <= longer:
        return simulate(plan(kind, parallel.pp, parallel.chunks, count), costs).makespan, busy
    first = simulate(plan(kind, parallel.pp, parallel.chunks, short), costs).makespan
    second = simulate(plan(kind, parallel.pp, parallel.chunks, longer), costs).makespan
    return second + (second - first) * (count - longer) / parallel.pp, busy


def _costs(chunks: Sequence[Pass], hop: float) -> Costs:
    return Costs(
        [chunk.forward for chunk in chunks],
        [chunk.backward for chunk in chunks],
        [chunk.weight for chunk in chunks],
        hop,
    )


def _bound(run: RunConfig, chunks: Sequence[Pass], count: int) -> tuple[float, float]:
    """Estimate the pipeline's time roughly, as the work of the slowest stage plus the other stages' work on one
    microbatch of one chunk."""
    stages = [sum(chunk.all for chunk in chunks[rank :: run.parallel.pp]) for rank in range(run.parallel.pp)]
    ends = (sum(stages) - max(stages)) / run.parallel.chunks
    return count * max(stages) + ends, count * sum(stages)


class Times:
    """Computes how long each component of a step takes, in seconds, for a resolved `run` on a device.

    recorded: whether microbatches are replayed as CUDA graphs. rough: compute the times faster but less exactly.
    shared: whether the passes of a step share fp8 casts of weights.
    """

    def __init__(
        self, run: RunConfig, device: Hardware, *, recorded: bool, rough: bool = False, shared: bool = False
    ) -> None:
        self.run, self.on, self.card, self.recorded, self.shared = run, device, Card(device), recorded, shared
        self._operations = rough_operations if rough else operations

    def pipeline(self) -> list[Pass]:
        """Return the time of one microbatch on every chunk: first chunk 0 of all stages, then chunk 1 of all stages,
        and so on."""
        stages = stage_chunks(self.run)
        passes = {chunk: self.chunk(chunk) for chunk in set(chain(*stages))}
        return [passes[stage[number]] for number in range(self.run.parallel.chunks) for stage in stages]

    def chunk(self, chunk: Chunk) -> Pass:
        return chunk_pass(self._operations(self.run, chunk, shared=self.shared), self.on, recorded=self.recorded)

    def hop(self, distance: int) -> float:
        """Seconds to send the tensors of a microbatch to the next stage, whose ranks are `distance` ranks away."""
        parallel = self.run.parallel
        if parallel.pp == 1:
            return 0.0
        size = self._operations(self.run, stage_chunks(self.run)[0][0], shared=self.shared).cargo
        # Without sequence parallelism, all tensor ranks hold the same tensor, and each rank sends 1 / tp of this
        # tensor.
        split = parallel.sequence_parallel and parallel.tp > 1
        return self.card.handed(size / (1 if split else parallel.tp), parallel.pp, distance)

    def collective(self, kind: str, size: float, ranks: int) -> float:
        """Seconds of a collective over data and context ranks."""
        return self.card.collective(kind, size, ranks, self.run.parallel.tp)

    def reduction(self, dp: int, weights: Weights) -> float:
        """Return the time in seconds to reduce a stage's gradients over the data ranks, without overlap."""
        parallel = self.run.parallel
        assert self.run.precision.grad_dtype
        kind = "reduce-scatter" if parallel.zero else "all-reduce"
        return self.exchanged(kind, dp, weights, BYTES[self.run.precision.grad_dtype])

    def exchanged(self, kind: str, dp: int, weights: Weights, size: int) -> float:
        """Seconds of a collective over the ranks that hold copies of a parameter, for all trained parameters, with
        `size` bytes per element."""
        by_axis = weights.by_axis(data_shards(self.run.parallel, dp))
        return sum(self.collective(kind, size * elements, ranks) for elements, ranks in by_axis)

    def sharing(self, dp: int, weights: Weights, chunk: Pass) -> float:
        """Seconds that ZeRO 2 and 3 add to every microbatch, because buckets are created, reduced and added. Under ZeRO
        3, weights are also gathered twice.

        A complete bucket is reduced immediately, even without --overlap-grad-reduce. With --overlap-param-gather, the
        weights of a unit are gathered while the previous unit runs.
        """
        run, size = self.run, BYTES[self.run.precision.grad_dtype]
        summed = self.exchanged("reduce-scatter", dp, weights, size)
        owned_elements = sum(elements / ranks for elements, ranks in weights.by_axis(data_shards(run.parallel, dp)))
        bucket_seconds = self.card.elementwise(size * (weights.trained + 3 * owned_elements))
        if run.parallel.zero < 3:
            return bucket_seconds + exposed(summed, chunk.backward + chunk.weight)
        gathered = self.exchanged("all-gather", dp, weights, BYTES[run.precision.dtype])
        backward = chunk.backward + chunk.weight
        if not run.parallel.overlap_param_gather:
            return bucket_seconds + 2 * gathered + exposed(summed, backward)
        return bucket_seconds + exposed(gathered, chunk.forward) + exposed(gathered + summed, backward)

    def update(self, dp: int, weights: Weights, forward: float) -> float:
        """Seconds that a rank of a stage spends on its update and, under ZeRO 1 and 2, on the exposed part of the
        weight gather.

        forward: seconds of the rank's first forward pass, in which each unit waits for its weights. With CUDA graphs,
        the whole gather precedes the first pass.
        """
        run, on, parallel = self.run, self.on, self.run.parallel
        shards = data_shards(parallel, dp)
        owned_elements = sum(elements / (ranks if parallel.zero else 1) for elements, ranks in weights.by_axis(shards))
        seconds = update_bytes(run) * owned_elements / (on.bandwidth * 1e12 * on.elementwise)
        # The casts that follow an update: two reads of a weight (one with scales of blocks), and two writes in fp8.
        reads = 1 if run.precision.fp8_scaling == "block" else 2
        seconds += self.card.elementwise((2 * reads + 2) * weights.casts / 2) if weights.casts else 0.0
        if weights.overwritten and not self.recorded:  # gradients that are overwritten are neither zeroed nor read
            seconds -= self.card.elementwise(2 * BYTES[run.precision.grad_dtype] * weights.overwritten)
        if run.optimizer.optimizer_offload:
            seconds += self.offloaded(owned_elements, min(dp * parallel.cp * parallel.tp * parallel.pp, on.node))
        if max(shards.values()) > 1 and 0 < parallel.zero < 3:
            gathered = self.exchanged("all-gather", dp, weights, BYTES[self.run.precision.dtype])
            overlapped = parallel.overlap_param_gather and not self.recorded
            seconds += exposed(gathered, forward) if overlapped else gathered
        return seconds

    def offloaded(self, parameters: float, mates: int) -> float:
        """Seconds of an update on the host, whose memory bandwidth is shared by `mates` ranks. Buckets are updated one
        after the other, without overlap.

        Reduced gradients are copied to the host and upcast there. Weights are downcast on the host and copied back.
        """
        precision = self.run.precision
        assert precision.grad_dtype
        travels = (BYTES[precision.grad_dtype] + BYTES[precision.dtype]) / self.on.link
        return parameters * (travels + stepwise_bytes(self.run) * mates / self.on.host_memory) / 1e9
