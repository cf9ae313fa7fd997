"""How long a step takes: the pipeline's plan on a clock, the reductions over data, the update.

    pipeline   the plan that the trainer executes, played with the seconds of a microbatch on each chunk (cost.py)
    step       plus what is exposed of the reductions over data, and the optimizer

Nothing is measured here: hardware.toml and curves.json have the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from mega.core.config.resolve import data_parallel, eager_microbatches, microbatches, records_graph, text_lengths
from mega.core.config.run import RunConfig
from mega.core.estimate import cost
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.cost import Card, Pass, chunk_pass
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.operations import operations, rough_operations
from mega.core.estimate.weights import BYTES, Weights, data_shards, stage_weights, wide
from mega.core.flops import model_flops_per_token
from mega.core.plan import Costs, plan, simulate

RULES = {"adam": 7.0, "sgd": 5.5, "lamb": 29.0, "adafactor": 23.0, "muon": 21.0}
"""Wide numbers per parameter that an update in torch's own steps moves, besides masters and gradients on their way;
of pass after pass, as measured (tests/gpu/updates.py); muon's as counted, without its products. AdamW's are of torch's
one pass on a host; on a device it is one pass of a kernel."""

MOMENTUM = 4.5
"""The same for the velocities of SGD."""

HIDES, LAST = 0.8, 0.1
"""Share of a pass in which data ranks exchange, and of the exchange what no pass hides: the last gradients' sum, the
first weights' coming."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and its parts. bubble: share of the pipeline's time in which ranks wait.

    mfu: model operations over the devices' peak in that time.
    """

    seconds: float
    pipeline: float
    bubble: float
    reduction: float
    update: float
    tflops: float
    mfu: float


def step_time(run: RunConfig, world: int, on: Hardware, *, play: bool = True) -> StepTime:
    """Predict one step of a resolved `run`.

    play: False takes the pipeline's length from its slowest stage, in no time.
    """
    parallel, dp, count = run.parallel, data_parallel(run, world), microbatches(run, world)
    recorded = records_graph(run, world)
    times = Times(run, on, recorded=recorded, rough=not play)
    stages = stage_chunks(run)
    chunks, hop = times.pipeline(), times.hop(parallel.tp * parallel.cp * dp)
    pipeline, busy = pipeline_time(run, chunks, count, hop) if play else _bound(run, chunks, count)
    # Every stage has its own; all of them wait for the norm of all, and for the slowest update.
    held = {stage: stage_weights(run, dp, stage) for stage in set(stages)}
    sums = [times.reduction(dp, held[stage]) for stage in stages]
    reduction = max(sums)
    if parallel.zero >= 2:
        reduction = count * times.sharing(dp, held[stages[0]], chunks[0])
    elif parallel.overlap_grad_reduce:
        passes = [sum(chunk.backward + chunk.weight for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
        reduction = max(exposed(summed, backward) for summed, backward in zip(sums, passes, strict=True))
    if recorded and dp * parallel.cp > 1:
        if eager_microbatches(dp * parallel.cp, count):
            late = Times(run, on, recorded=False, rough=not play).chunk(stages[0][0])
            pipeline += late.all - chunks[0].all
        else:
            reduction = max(sums)
    forwards = [sum(chunk.forward for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
    update = max(times.update(dp, held[stage], forward) for stage, forward in zip(stages, forwards, strict=True))
    seconds = pipeline + reduction + update
    flops = model_flops_per_token(run) * sum(text_lengths(run)) * run.batch.global_batch
    rate = flops / seconds / world / 1e12
    return StepTime(
        seconds=seconds,
        pipeline=pipeline,
        bubble=1 - busy / (parallel.pp * pipeline),
        reduction=reduction,
        update=update,
        tflops=rate,
        mfu=rate / on.peak[run.precision.dtype],
    )


def plan_costs(run: RunConfig, world: int, on: Hardware) -> Costs:
    """Seconds of what the pipeline's plan consists of, as `step_time` plays it."""
    parallel, times = run.parallel, Times(run, on, recorded=records_graph(run, world))
    return _costs(times.pipeline(), times.hop(parallel.tp * parallel.cp * data_parallel(run, world)))


def update_bytes(run: RunConfig) -> float:
    """Bytes per parameter that zeroing gradients, their norm and the update by the run's rule move on a device.

    Of an update on the host the first two are left.

    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.config.compose import compose
    >>> rules = ({}, {"masters": False}, {"optimizer": "sgd", "sgd_momentum": 0.0}, {"optimizer": "adafactor"})
    >>> runs = [compose("gpt2-345m", flags={"micro_batch": 1, "dtype": "bf16", **rule}) for rule in rules]
    >>> [update_bytes(resolve(run, 1)) for run in runs]
    [38, 32, 44.0, 114.0]
    """
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    grad, weight, high = BYTES[precision.grad_dtype], BYTES[precision.dtype], wide(precision.dtype)
    if options.optimizer_offload:
        return 2 * grad
    apart = precision.masters and weight != high
    if options.optimizer == "adam":
        return 3 * grad + 4 * high + (2 * high + weight if apart else 2 * weight)
    # A master is made where none is kept.
    return 2 * grad + (0 if apart or weight == high else weight + high) + stepwise_bytes(run)


def stepwise_bytes(run: RunConfig) -> float:
    """Bytes per parameter that the update in torch's own steps moves in the memory where masters lie.

    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.config.compose import compose
    >>> runs = [compose("gpt2-345m", flags={"micro_batch": 1, "dtype": dtype}) for dtype in ("bf16", "fp32")]
    >>> [stepwise_bytes(resolve(run, 1)) for run in runs]
    [42.0, 36.0]
    """
    precision, options = run.precision, run.optimizer
    assert precision.grad_dtype
    grad, weight, high = BYTES[precision.grad_dtype], BYTES[precision.dtype], wide(precision.dtype)
    # The gradient is widened and scaled, the weight written from the master.
    moved = (grad + high if grad != high else 0) + 2 * high + (high + weight if weight != high else 0)
    momentum = MOMENTUM if options.optimizer == "sgd" and options.sgd_momentum else 0.0
    return moved + (RULES[options.optimizer] + momentum) * high


def exposed(exchange: float, overlapped: float) -> float:
    """What an exchange of gradients or weights between data ranks adds to the pass that it overlaps: what that does not
    hide, and what it slows that down by."""
    late = max(LAST * exchange, exchange - HIDES * overlapped)
    return late + cost.CROWDED * (exchange - late)


def pipeline_time(run: RunConfig, chunks: Sequence[Pass], count: int, hop: float) -> tuple[float, float]:
    """Length of all microbatches, and the sum of all ranks' work.

    A long plan is played short: once the pipeline is full, each further round takes as long as the one before.
    """
    parallel = run.parallel
    busy = count * sum(chunk.all for chunk in chunks)
    if parallel.pp == 1:
        return busy, busy
    kind, costs = parallel.schedule, _costs(chunks, hop)
    # 1F1B is in its steady state after pp microbatches, an interleaved plan after two rounds of pp.
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
    """The slowest stage's work, and the others' share of the first and last microbatch."""
    stages = [sum(chunk.all for chunk in chunks[rank :: run.parallel.pp]) for rank in range(run.parallel.pp)]
    ends = (sum(stages) - max(stages)) / run.parallel.chunks
    return count * max(stages) + ends, count * sum(stages)


class Times:
    """Seconds of the parts of a step of a resolved `run` on a card. recorded: microbatches are graphs. rough: in less
    time."""

    def __init__(self, run: RunConfig, on: Hardware, *, recorded: bool, rough: bool = False) -> None:
        self.run, self.on, self.card, self.recorded = run, on, Card(on), recorded
        self._operations = rough_operations if rough else operations

    def pipeline(self) -> list[Pass]:
        """One microbatch through every stage, one chunk of them after the other."""
        stages = stage_chunks(self.run)
        passes = {chunk: self.chunk(chunk) for chunk in set(chain(*stages))}
        return [passes[stage[number]] for number in range(self.run.parallel.chunks) for stage in stages]

    def chunk(self, chunk: Chunk) -> Pass:
        return chunk_pass(self._operations(self.run, chunk), self.on, recorded=self.recorded)

    def hop(self, distance: int) -> float:
        """One piece of cargo to the next stage, whose ranks are `distance` away."""
        parallel = self.run.parallel
        if parallel.pp == 1:
            return 0.0
        size = self._operations(self.run, stage_chunks(self.run)[0][0]).cargo
        # Every tensor rank holds the same where the sequence is whole; then each sends its part of it.
        split = parallel.sequence_parallel and parallel.tp > 1
        return self.card.handed(size / (1 if split else parallel.tp), parallel.pp, distance)

    def collective(self, kind: str, size: float, ranks: int) -> float:
        """Over data and context ranks."""
        return self.card.collective(kind, size, ranks, self.run.parallel.tp)

    def reduction(self, dp: int, held: Weights) -> float:
        """Summing a stage's gradients over the data ranks, if nothing hides it."""
        parallel = self.run.parallel
        assert self.run.precision.grad_dtype
        kind = "reduce-scatter" if parallel.zero else "all-reduce"
        return self.exchanged(kind, dp, held, BYTES[self.run.precision.grad_dtype])

    def exchanged(self, kind: str, dp: int, held: Weights, size: int) -> float:
        """A collective of all that is trained, `size` bytes an element, over the ranks that hold copies of it."""
        by_axis = held.by_axis(data_shards(self.run.parallel, dp))
        return sum(self.collective(kind, size * elements, ranks) for elements, ranks in by_axis)

    def sharing(self, dp: int, held: Weights, chunk: Pass) -> float:
        """What ZeRO 2 and 3 add to every microbatch: buckets made, summed and added up; weights gathered twice.

        A bucket leaves as soon as it is complete, whatever --overlap-grad-reduce says; weights are gathered while the
        unit before runs.
        """
        run, size = self.run, BYTES[self.run.precision.grad_dtype]
        summed = self.exchanged("reduce-scatter", dp, held, size)
        own = sum(elements / ranks for elements, ranks in held.by_axis(data_shards(run.parallel, dp)))
        made = self.card.elementwise(size * (held.trained + 3 * own))
        if run.parallel.zero < 3:
            return made + exposed(summed, chunk.backward + chunk.weight)
        gathered = self.exchanged("all-gather", dp, held, BYTES[run.precision.dtype])
        backward = chunk.backward + chunk.weight
        if not run.parallel.overlap_param_gather:
            return made + 2 * gathered + exposed(summed, backward)
        return made + exposed(gathered, chunk.forward) + exposed(gathered + summed, backward)

    def update(self, dp: int, held: Weights, forward: float) -> float:
        """The update of a stage's rank, and under ZeRO 1 and 2 what is exposed of the weights on their way to all.

        forward: seconds of the rank's first forward pass, whose units wait for their weights one after the other. Where
        passes are recorded, the first finds all of them there.
        """
        run, on, parallel = self.run, self.on, self.run.parallel
        shards = data_shards(parallel, dp)
        own = sum(elements / (ranks if parallel.zero else 1) for elements, ranks in held.by_axis(shards))
        seconds = update_bytes(run) * own / (on.bandwidth * 1e12 * on.elementwise)
        if run.optimizer.optimizer_offload:
            seconds += self.offloaded(own, min(dp * parallel.cp * parallel.tp * parallel.pp, on.node))
        if max(shards.values()) > 1 and 0 < parallel.zero < 3:
            gathered = self.exchanged("all-gather", dp, held, BYTES[self.run.precision.dtype])
            overlapped = parallel.overlap_param_gather and not self.recorded
            seconds += exposed(gathered, forward) if overlapped else gathered
        return seconds

    def offloaded(self, parameters: float, mates: int) -> float:
        """An update on the host, whose memory `mates` ranks share: one bucket after the other, and nothing overlaps.

        Gradients go there as they are summed and are widened there; weights are narrowed there and come back.
        """
        precision = self.run.precision
        assert precision.grad_dtype
        travels = (BYTES[precision.grad_dtype] + BYTES[precision.dtype]) / self.on.link
        return parameters * (travels + stepwise_bytes(self.run) * mates / self.on.host_memory) / 1e9
