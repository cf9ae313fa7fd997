"""How long a step takes: products, attention, elementwise passes, collectives, and the pipeline's plan on a clock.

    block      one microbatch through one block on one tensor rank: seconds forward and backward
    stage      its blocks, embedding and head
    pipeline   the plan that the trainer executes, played with those times
    step       plus what is exposed of the reductions over data, and the optimizer

A product takes its operations at the device's share of its peak, and a part of its reading and writing; all else takes
its bytes. In fp8 the share is of another peak, and casts are passes like any other. Nothing is measured here:
hardware.toml has the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from mega.core.architecture import shape
from mega.core.config.resolve import data_parallel, eager_microbatches, microbatches, records_graph, text_lengths
from mega.core.config.run import RunConfig, updated
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.sizes import Sizes
from mega.core.estimate.weights import BYTES, Weights, stage_weights, wide
from mega.core.flops import model_flops_per_token
from mega.core.plan import Costs, plan, simulate

RULES = {"adam": 7.0, "sgd": 5.5, "lamb": 29.0, "adafactor": 23.0}
"""Wide numbers per parameter that an update in torch's own steps moves, besides masters and gradients on their way;
of pass after pass, as measured (tests/gpu/updates.py). AdamW's are of torch's one pass on a host; on a device it is one
pass of a kernel."""

MOMENTUM = 4.5
"""The same for the velocities of SGD."""

CASTS, EXCHANGES, OVERLAPPED, MASKS, AGAIN = 1.0, 1.5, 2.75, 0.5, 0.7
"""What adds to the host's time for a block, in its own measure: casts to fp8; exchanges among tensor ranks, who wait
for each other's hosts too, by collectives or while products run; dropout; blocks asked for again within a backward."""

MASK, DROP = 265, 9
"""Bytes per element that hashing a dropout mask moves, int64 pass after pass (ops/counter.py), and applying it."""

DECIDED = 1.6
"""How much longer attention takes where a kernel drops its weights: 1.43 times for heads of 64, 1.78 of 128 on H200."""

CROWDED = 0.2
"""Share of an overlapped collective by which the product is slower: it takes some of its processors."""

HIDES, LAST = 0.8, 0.1
"""Share of a pass in which data ranks exchange, and of the exchange what no pass hides: the last gradients' sum, the
first weights' coming."""


@dataclass(frozen=True)
class Pass:
    """Seconds of a part: forward, backward towards its input, and the weights' gradient."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, times: float) -> Pass:
        return Pass(self.forward * times, self.backward * times, self.weight * times)

    @property
    def all(self) -> float:
        return self.forward + self.backward + self.weight


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


def step_time(
    run: RunConfig, world: int, on: Hardware, *, overlap: bool = True, core_again: bool = False, play: bool = True
) -> StepTime:
    """Predict one step of a resolved `run`.

    overlap: communication overlaps computing where this trainer lets it. False computes nothing during an exchange
    between stages or while gradients are summed, as Megatron-LM of 2021. core_again: selective recompute repeats plain
    attention's core, as Megatron-LM's does, instead of norms and activations. play: False takes the pipeline's length
    from its slowest stage, in no time.
    """
    parallel, dp, count = run.parallel, data_parallel(run, world), microbatches(run, world)
    assert run.model.layers and run.batch.seq_length and run.batch.global_batch and parallel.schedule
    recorded = records_graph(run, world)
    times = _Times(run, on, core_again, overlap, recorded=recorded)
    stages = stage_chunks(run)
    chunks, hop = times.pipeline(), times.hop(parallel.tp * parallel.cp * dp)
    pipeline, busy = pipeline_time(run, chunks, count, hop, overlap) if play else _bound(run, chunks, count)
    # Every stage has its own; all of them wait for the norm of all, and for the slowest update.
    held = {stage: stage_weights(run, dp, stage) for stage in set(stages)}
    sums = [times.reduction(dp, held[stage]) for stage in stages]
    reduction = max(sums)
    if parallel.zero >= 2:
        reduction = count * times.sharing(dp, held[stages[0]], chunks[0])
    elif overlap and parallel.overlap_grad_reduce:
        passes = [sum(chunk.backward + chunk.weight for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
        reduction = max(exposed(summed, backward) for summed, backward in zip(sums, passes, strict=True))
    if recorded and dp * parallel.cp > 1:
        if eager_microbatches(dp * parallel.cp, count):
            late = _Times(run, on, core_again, overlap, recorded=False).chunk(stages[0][0])
            pipeline += late.all - chunks[0].all
        else:
            reduction = max(sums)
    forwards = [sum(chunk.forward for chunk in chunks[r :: parallel.pp]) for r in range(parallel.pp)]
    update = max(times.update(dp, held[stage], forward) for stage, forward in zip(stages, forwards, strict=True))
    seconds = pipeline + reduction + update
    texts = text_lengths(run)
    flops = model_flops_per_token(run) * sum(texts) * run.batch.global_batch
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
    recorded, parallel = records_graph(run, world), run.parallel
    times = _Times(run, on, core_again=False, ours=True, recorded=recorded)
    return _costs(times.pipeline(), times.hop(parallel.tp * parallel.cp * data_parallel(run, world)), overlap=True)


def update_bytes(run: RunConfig) -> float:
    """Bytes per parameter that zeroing gradients, their norm and the update by the run's rule move on a device.

    Of an update on the host the first two are left.

    >>> from mega.core.config.resolve import resolve
    >>> from mega.core.config.compose import compose
    >>> rules = ({}, {"masters": False}, {"optimizer": "sgd", "sgd_momentum": 0.0}, {"optimizer": "adafactor"})
    >>> [update_bytes(resolve(compose("gpt2-345m", flags={"dtype": "bf16", **rule}), 1)) for rule in rules]
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
    >>> [stepwise_bytes(resolve(compose("gpt2-345m", flags={"dtype": dtype}), 1)) for dtype in ("bf16", "fp32")]
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
    """What of an exchange of gradients or weights between data ranks the overlapped pass does not hide."""
    return max(LAST * exchange, exchange - HIDES * overlapped)


def pipeline_time(run: RunConfig, chunks: Sequence[Pass], count: int, hop: float, overlap: bool) -> tuple[float, float]:
    """Length of all microbatches, and the sum of all ranks' work.

    A long plan is played short: once the pipeline is full, each further round takes as long as the one before.
    """
    parallel = run.parallel
    busy = count * sum(chunk.all for chunk in chunks)
    if parallel.pp == 1:
        return busy, busy
    kind = parallel.schedule
    assert kind is not None
    costs = _costs(chunks, hop, overlap)
    # 1F1B is in its steady state after pp microbatches, an interleaved plan after two rounds of pp.
    short = 2 * parallel.pp + count % parallel.pp
    longer = short + parallel.pp
    if count <= longer:
        return simulate(plan(kind, parallel.pp, parallel.chunks, count), costs).makespan, busy
    first = simulate(plan(kind, parallel.pp, parallel.chunks, short), costs).makespan
    second = simulate(plan(kind, parallel.pp, parallel.chunks, longer), costs).makespan
    return second + (second - first) * (count - longer) / parallel.pp, busy


def _costs(chunks: Sequence[Pass], hop: float, overlap: bool) -> Costs:
    """Without overlap a rank computes nothing while its cargo is on the way."""
    waits = 0.0 if overlap else hop
    return Costs(
        [chunk.forward + waits for chunk in chunks],
        [chunk.backward + waits for chunk in chunks],
        [chunk.weight for chunk in chunks],
        0.0 if waits else hop,
    )


def _bound(run: RunConfig, chunks: Sequence[Pass], count: int) -> tuple[float, float]:
    """The slowest stage's work, and the others' share of the first and last microbatch."""
    stages = [sum(chunk.all for chunk in chunks[rank :: run.parallel.pp]) for rank in range(run.parallel.pp)]
    ends = (sum(stages) - max(stages)) / run.parallel.chunks
    return count * max(stages) + ends, count * sum(stages)


class _Times:
    """Seconds of the parts of one microbatch on one tensor rank. ours: dropout and overlap are this trainer's.
    recorded: microbatches are graphs.
    """

    def __init__(self, run: RunConfig, on: Hardware, core_again: bool, ours: bool, *, recorded: bool) -> None:
        self.recorded = recorded
        self.run, self.on, self.z, self.core_again, self.ours = run, on, Sizes(run), core_again, ours
        self.flops = on.peak[run.precision.dtype] * 1e12
        self.bytes = on.bandwidth * 1e12
        self.reads: _Times | None = None
        """Of the encoder whose tokens the blocks read too."""
        self.stacks = [self]
        if len(run.model.stacks) > 1:
            alone = updated(run, {"decoder_layers": None, "seq_length": run.masking.decoder_seq_length})
            decoder = _Times(alone, on, core_again, ours, recorded=recorded)
            decoder.reads = self
            self.stacks.append(decoder)

    # -- pieces

    def product(self, m: int, k: int, n: int) -> float:
        return self.multiplied(m, k, n, self.flops, self.z.e * (m * k + k * n + m * n))

    def fp8_product(self, m: int, k: int, n: int, out: int) -> float:
        """out: bytes of an element of the result."""
        return self.multiplied(m, k, n, self.on.fp8 * 1e12, m * k + k * n + out * m * n)

    def multiplied(self, m: int, k: int, n: int, peak: float, moved: int) -> float:
        """[m, k] times [k, n] on a device with so many operations a second, in and out of memory by so many bytes."""
        calculated = 2.0 * m * k * n / (peak * self.on.product)
        return calculated + self.on.traffic * moved / self.bytes + self.on.launch * 1e-6

    def cast(self, size: int, copies: int = 1) -> float:
        """Elements to fp8, as they lie, turned, or both (2 copies): a place for their scale, the largest, the cast."""
        e = self.z.e
        return self.pointwise(0) + self.pointwise(e * size) + self.pointwise((e + copies) * size)

    def pointwise(self, size: float) -> float:
        """An elementwise pass that reads and writes `size` bytes."""
        return size / (self.bytes * self.on.elementwise) + self.on.launch * 1e-6

    def collective(self, size: float, ranks: int, stride: int) -> float:
        """An all-gather or reduce-scatter of `size` bytes in all over ranks that lie `stride` apart."""
        if ranks == 1:
            return 0.0
        on = self.on
        if stride * ranks <= on.node:
            return (ranks - 1) / ranks * size / (on.inside * 1e9) + on.latency * 1e-6
        # A ring that passes through a node on several GPUs uses the network card of each.
        cards = max(1, on.node // stride)
        rate = min(on.inside, on.outside * cards)
        return (ranks - 1) / ranks * size / (rate * 1e9) + on.latency_outside * 1e-6 * ranks

    def handed(self, size: float, ranks: int, stride: int) -> float:
        """`size` bytes from each of ranks that lie `stride` apart to the next, all at once: the slowest pair counts."""
        outside = stride * ranks > self.on.node
        rate = self.on.outside if outside else self.on.peer
        delay = self.on.latency_outside if outside else self.on.latency
        return size / (rate * 1e9) + delay * 1e-6

    def hop(self, distance: int) -> float:
        """One piece of cargo to the next stage, whose ranks are `distance` away."""
        # Every tensor rank holds the same where the sequence is whole; then each sends its part of it.
        size = sum(stack.z.residual for stack in self.stacks)
        return self.handed(size / (1 if self.z.seq else self.z.tp), self.run.parallel.pp, distance)

    def dropped(self, elements: int) -> Pass:
        """Dropout of so many elements; others draw the mask in the kernel that applies it."""
        e = self.z.e
        if not self.ours or self.z.kernels:
            return Pass(self.pointwise(2 * e * elements), self.pointwise(2 * e * elements), 0.0)
        return Pass(self.pointwise((MASK + DROP) * elements), self.pointwise(DROP * elements), 0.0)

    def overlap_cost(self, communication: float, product: float) -> float:
        """What a collective adds to the product that it overlaps."""
        hidden = min(communication, product)
        return communication - hidden + (CROWDED * hidden if self.ours else 0.0)

    # -- gradients and weights over the data ranks

    def reduction(self, dp: int, held: Weights) -> float:
        """Summing a stage's gradients over the data ranks, if nothing hides it."""
        parallel = self.run.parallel
        assert self.run.precision.grad_dtype
        size = held.trained * BYTES[self.run.precision.grad_dtype]
        return self.collective(size, dp * parallel.cp, parallel.tp) * (1 if parallel.zero else 2)

    def sharing(self, dp: int, held: Weights, chunk: Pass) -> float:
        """What ZeRO 2 and 3 add to every microbatch: buckets made, summed and added up; weights gathered twice.

        Under ZeRO 3 all of it waits: a gathering is queued after the sums. Under ZeRO 2 a bucket leaves
        as soon as it is complete, whatever --overlap-grad-reduce says.
        """
        run, ranks = self.run, dp * self.run.parallel.cp
        assert run.precision.grad_dtype
        grads, weights = held.trained * BYTES[run.precision.grad_dtype], held.trained * self.z.e
        summed = self.collective(grads, ranks, run.parallel.tp)
        made = self.pointwise(grads + 3 * grads / ranks)
        if run.parallel.zero < 3:
            return made + exposed(summed, chunk.backward + chunk.weight)
        gathered = self.collective(weights, ranks, run.parallel.tp) + self.pointwise(2 * weights)
        return made + summed + 2 * gathered

    def update(self, dp: int, held: Weights, forward: float) -> float:
        """The update of a stage's rank, and under ZeRO 1 and 2 what is exposed of the weights on their way to all.

        forward: seconds of the rank's first forward pass, whose units wait for their weights one after the other. Where
        passes are recorded, the first finds all of them there.
        """
        run, on, parallel = self.run, self.on, self.run.parallel
        shares = dp * parallel.cp if parallel.zero else 1
        own = held.trained / shares
        seconds = update_bytes(run) * own / (self.bytes * on.elementwise)
        if run.optimizer.optimizer_offload:
            seconds += self.offloaded(own, min(dp * parallel.cp * parallel.tp * parallel.pp, on.node))
        if shares > 1 and parallel.zero < 3:
            gathered = self.collective(held.weights - held.frozen, shares, parallel.tp)
            overlapped = self.ours and parallel.overlap_param_gather and not self.recorded
            seconds += exposed(gathered, forward) if overlapped else gathered
        return seconds

    def offloaded(self, parameters: float, mates: int) -> float:
        """An update on the host, whose memory `mates` ranks share: one bucket after the other, and nothing overlaps.

        Gradients go there as they are summed and are widened there; weights are narrowed there and come back.
        """
        precision = self.run.precision
        assert precision.grad_dtype
        travels = (BYTES[precision.grad_dtype] + self.z.e) / self.on.link
        return parameters * (travels + stepwise_bytes(self.run) * mates / self.on.host_memory) / 1e9

    # -- parts

    def pipeline(self) -> list[Pass]:
        """One microbatch through every stage, one chunk of them after the other."""
        stages = stage_chunks(self.run)
        passes = {chunk: self.chunk(chunk) for chunk in set(chain(*stages))}
        return [passes[stage[number]] for number in range(self.run.parallel.chunks) for stage in stages]

    def chunk(self, chunk: Chunk) -> Pass:
        """Every stack has an embedding in front of it, and the last one a head."""
        total = sum((stack.blocks(count) for stack, count in zip(self.stacks, chunk.stacks, strict=True)), Pass())
        after = shape(self.run.model).after
        for name in chunk.names:
            ends = after[name] == len(self.stacks)
            total += self.stacks[-1].head() if ends else self.stacks[after[name]].embedding()
        return total

    def blocks(self, count: int) -> Pass:
        block, memory = self.block(), self.run.memory
        if memory.recompute == "full":
            again = count if memory.recompute_method == "uniform" else min(count, memory.recompute_layers or 0)
            return block * count + Pass(0.0, block.forward * again, 0.0)
        if memory.recompute == "selective":
            repeated = self.core().forward if self.core_again else self.between().forward
            return (block + Pass(0.0, repeated, 0.0)) * count
        return block * count

    def block(self) -> Pass:
        z = self.z
        gate = 2 if z.model.activation == "swiglu" else 1
        total = self.between() + self.core()
        linear = self.fp8_linear if self.run.precision.fp8 else self.linear
        for inner, outer in ((z.q, z.q + 2 * z.kv), (z.ffn, gate * z.ffn)):
            total += self.column(linear(z.hidden, outer)) + self.row(linear(inner, z.hidden))
        if self.reads is not None:
            total += self.cross(self.reads)
        if self.recorded:
            return total
        # The host asks for one block after the other, and a device that is faster waits.
        asks = 1 + CASTS * z.fp8 + (OVERLAPPED if z.overlapped else EXCHANGES if z.tp > 1 else 0.0)
        asks += MASKS * bool(z.model.hidden_dropout) + AGAIN * (self.run.memory.recompute == "full")
        return total * max(1.0, asks * self.on.host * 1e-6 / total.all)

    def cross(self, encoder: _Times) -> Pass:
        """Attention to the encoder's tokens, which are made keys and values of for it, with a norm of its own."""
        z, stream = self.z, self.z.residual
        norm = Pass(self.pointwise(4 * stream), self.pointwise(5 * stream), 0.0)
        ours = self.column(self.linear(z.hidden, z.q)) + self.row(self.linear(z.q, z.hidden))
        return norm + ours + encoder.column(encoder.linear(z.hidden, 2 * z.kv)) + self.core(encoder.z.whole)

    def linear(self, ins: int, outs: int) -> Pass:
        """The three products of a linear layer; with an adapter, its own in place of the weight's gradient."""
        tokens, rank = self.z.tokens, self.run.model.lora_rank
        if rank:
            added = self.product(tokens, ins, rank) + self.product(tokens, rank, outs)
            return Pass(self.product(tokens, ins, outs) + added, self.product(tokens, outs, ins) + added, added)
        return Pass(self.product(tokens, ins, outs), self.product(tokens, outs, ins), self.product(outs, tokens, ins))

    def fp8_linear(self, ins: int, outs: int) -> Pass:
        """The same with casts before each, and the weight's gradient added up after it (ops/fp8.py)."""
        tokens, e = self.z.tokens, self.z.e
        x, w, y = tokens * ins, ins * outs, tokens * outs
        assert self.run.precision.grad_dtype
        added = self.pointwise((4 + 2 * BYTES[self.run.precision.grad_dtype]) * w)
        return Pass(
            self.cast(x) + self.cast(w) + self.fp8_product(tokens, ins, outs, e),
            self.cast(y, 2) + self.cast(w) + self.fp8_product(tokens, outs, ins, e),
            self.cast(x) + self.fp8_product(outs, tokens, ins, 4) + added,
        )

    def column(self, products: Pass) -> Pass:
        """Entering the region: the gathered input waits, the input's gradient is summed during the weight's product.

        Under --tp-overlap the exchanges overlap the products that they feed.
        """
        z = self.z
        forward, grad, weight = products.forward, products.backward, products.weight
        gather = self.collective(z.e * z.tokens * z.hidden, z.tp, 1)
        if z.overlapped:
            # The input is gathered again; after it parts of its gradient leave, until the weight's product ends too.
            late = max(gather - grad, 0.0)
            left = max(2 * gather, grad + self.alone(gather)) - (grad + late + weight)
            return Pass(forward + self.uncovered(gather, forward), grad + late + max(left, 0.0) + self.total(), weight)
        summed = gather if z.seq else 2 * gather
        waits = self.overlap_cost(summed, weight) + (self.overlap_cost(gather, grad) if z.seq else 0.0)
        return Pass(forward + (gather if z.seq else 0.0), grad + waits, weight)

    def row(self, products: Pass) -> Pass:
        """Leaving the region: its sum waits."""
        z = self.z
        gather = self.collective(z.e * z.tokens * z.hidden, z.tp, 1)
        forward, grad, weight = products.forward, products.backward, products.weight
        if z.overlapped:
            out = self.uncovered(gather, forward) + self.total()
            return Pass(forward + out, grad + self.uncovered(gather, grad), weight)
        return Pass(forward + (gather if z.seq else 2 * gather), grad + (gather if z.seq else 0.0), weight)

    def uncovered(self, exchange: float, product: float) -> float:
        """What an exchange adds to the product that it feeds, or that feeds it, piece by piece."""
        return max(exchange - product * (self.z.pieces - 1) / self.z.pieces, self.alone(exchange))

    def alone(self, exchange: float) -> float:
        """What overlaps nothing: blocks in one piece with our own tokens, a gathering's first and a sum's last."""
        return exchange * (self.z.tp / self.z.pieces - 1) / (self.z.tp - 1)

    def total(self) -> float:
        """Adding up the parts that the tensor ranks have made of our tokens."""
        z = self.z
        return self.pointwise(z.e * z.tokens * z.hidden * (z.tp + 1) / z.tp)

    def between(self) -> Pass:
        """Norms, residual additions, dropout and the activation, each one pass over its tensors."""
        z = self.z
        gate = 2 if z.model.activation == "swiglu" else 1
        stream, wide = z.residual, z.e * z.tokens * z.ffn
        norm = Pass(self.pointwise(4 * stream), self.pointwise(5 * stream), 0.0)
        total = norm * 2 + Pass(self.pointwise((gate + 1) * wide), self.pointwise((2 * gate + 1) * wide), 0.0)
        if z.model.hidden_dropout and self.ours and z.kernels:  # where the branch is added; it has its own gradient
            total += Pass(0.0, 2 * self.pointwise(z.e * z.own * z.hidden), 0.0)
        elif z.model.hidden_dropout:
            total += self.dropped(z.own * z.hidden) * 2
        # Query, key and value are put together again on the way back; turned only where they know positions so.
        turned = 2 * z.e * z.tokens * (z.q + z.kv) if z.model.position == "rope" else 0
        return total + Pass(self.pointwise(turned), self.pointwise(2 * z.e * z.tokens * (z.q + 2 * z.kv)), 0.0)

    def core(self, keys: int | None = None) -> Pass:
        """Scores, softmax and values; fused, or every matrix written out; over the context ranks. keys: of a row."""
        z, keys = self.z, keys or self.z.whole
        assert z.model.head_dim
        half = 2.0 * z.tokens * keys * z.q
        if z.model.window is not None and z.kernels and keys == z.whole:  # pairs before the window are left out
            half *= 1 - max(0.0, 1 - z.model.window / keys) ** 2
        # torch's own attention knows no dropout by counter, nor did that of the systems whose figures we compare.
        if not z.plain and (not z.model.attention_dropout or (self.ours and z.kernels)):
            narrow = self.flops * min(1.0, z.model.head_dim / 128)
            narrow /= DECIDED if z.model.attention_dropout else 1.0
            return self.across(
                half / (narrow * self.on.attention_forward), 2.5 * half / (narrow * self.on.attention_backward)
            )
        elements = z.rows * z.heads * z.length * keys
        scores = z.e * elements
        products = 2 * half / (self.flops * self.on.product) + 2 * self.on.traffic * scores / self.bytes
        # Plain torch scales, widens, masks, takes the softmax and narrows again, each in a pass of its own.
        softmax, slope = (38 * elements, 42 * elements) if self.ours else (2 * scores, 3 * scores)
        drops = self.dropped(elements) if z.model.attention_dropout else Pass()
        return drops + self.across(
            products + self.pointwise(softmax),
            2 * products + self.pointwise(slope),
        )

    def across(self, forward: float, backward: float) -> Pass:
        """Attention of so many seconds on one rank of the context axis, and what it takes to see all tokens.

        all-to-all: query, key and value are exchanged, so is the result, and each is laid out again. ring: computing
        overlaps the transfer of keys and values, on the way back with their gradients in fp32, and parts are merged.
        """
        z, parallel = self.z, self.run.parallel
        size = parallel.cp
        if size == 1:
            return Pass(forward, backward, 0.0)
        mixed, both = z.tokens * z.q, 2 * z.tokens * z.kv
        if not z.ring:
            sent = z.e * (mixed + both)
            swap = self.collective(sent, size, parallel.tp) + self.collective(z.e * mixed, size, parallel.tp)
            laid = self.pointwise(8 * sent + 6 * z.e * mixed)
            return Pass(forward + swap + laid, backward + swap + laid, 0.0)
        hand, wide = (self.handed(width * both, size, parallel.tp) for width in (z.e, z.w))
        ahead = (size - 1) * max(0.0, hand - forward / size)
        back = (size - 1) * max(0.0, hand + wide - backward / size) + wide
        merged = (size - 1) * 26 * mixed * 0.75 + 6 * mixed
        added = size * 0.75 * 10 * (mixed + both)
        return Pass(forward + ahead + self.pointwise(merged), backward + back + self.pointwise(added), 0.0)

    def embedding(self) -> Pass:
        z = self.z
        rows = z.e * z.tokens * z.hidden
        summed = self.collective(rows, z.tp, 1) * (1 if z.seq else 2)
        total = Pass(self.pointwise(3 * rows) + summed, self.pointwise(3 * rows), 0.0)
        return total + self.dropped(z.own * z.hidden) if z.model.hidden_dropout and self.ours else total

    def head(self) -> Pass:
        z = self.z
        scores = z.e * z.tokens * z.vocab
        return self.column(self.linear(z.hidden, z.vocab)) + Pass(
            self.pointwise(scores), self.pointwise(2 * scores), 0.0
        )
