"""Measure the speed of a run: time training steps on random tokens, then profile one step.

    measure    median seconds of a step after warm-up, and figures derived from this median
    profile    one more step under the profiler: device time by kind of work

As in training, the host launches a step while the previous step runs, so the time of a step is measured from the end of
the previous step to the end of the step. Gathers of weights continue after the end of a step, and the next step waits
for these gathers. Rows are measured one after another in one process group. This module does not read token files or
checkpoints.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch

from mega.core.activity import ACTIVITY
from mega.core.batch import Batch, DecoderBatch
from mega.core.bench.rows import read_rows
from mega.core.config.resolve import microbatches, records_graph, text_lengths
from mega.core.config.run import RunConfig
from mega.core.data.synthetic import packed
from mega.core.device import MARK, Device, Reading, Timestamp
from mega.core.family import synthetic_batch
from mega.core.flops import model_flops_per_token
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups
from mega.core.processes.connect import connect, disconnect
from mega.core.training.state import TrainState
from mega.core.training.step import StepReport, train_step
from mega.core.training.wire import build_mesh, build_state
from mega.core.untrusted import Json, below, numbers_below

SILENCE = 2.0
"""Minimum number of seconds between progress messages."""

MATMULS, ATTENTION, COMMUNICATION = "products", "attention", "communication"
UPDATE, CASTS, REST = "update", "casts", "rest"
KINDS = (
    (COMMUNICATION, ("nccl", "gloo", "all_reduce", "all_gather", "reduce_scatter", "memcpy ptop")),
    (ATTENTION, ("cudnn", "flash", "fmha", "sdpa", "sdp_", "attention")),
    (MATMULS, ("gemm", "nvjet", "cutlass", "xmma", "mm", "splitk")),
    (UPDATE, ("adamw", "normtwo")),
    (CASTS, ("_cast", "_largest")),
)
"""Kind of work -> substrings of kernel names. A kernel belongs to the first kind that matches, otherwise to the kind
REST."""

Span = tuple[float, float, str]
"""A kernel or a copy on the device: begin and end in microseconds, and name."""


@dataclass(frozen=True)
class Speed:
    """The result of one measured row."""

    name: str
    world: int
    device: str
    ops: str
    products: str
    """Dtype of the GEMMs in blocks: --dtype, or fp8."""
    work: dict[str, object]
    """Description of the computation in a step, independent of the layout. Rows whose computation differs are not
    compared."""
    micro_batch: int
    global_batch: int
    seconds: float
    """Median time of a step, in seconds."""
    spread: float
    """Spread of step times: (slowest - fastest) / median."""
    tokens_per_second: float
    """Tokens per second over all ranks."""
    tflops: float
    """TFLOP/s per rank, with 6 N + 12 L h s operations per token."""
    mfu: float | None
    """Model FLOPs utilization: `tflops` / peak; None if the peak of the device is unknown."""
    peak_gib: float
    """Peak memory of this rank, in GiB."""
    loss: float
    largest_share: float | None = None
    """Largest fraction of an MoE layer's choices that select the same expert, in the last step."""
    skipped: int = 0
    """Number of timed steps whose update was skipped."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each timed step."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds of device time in one step, by kind of work, including the `idle` time between kernels."""

    def fields(self) -> dict[str, object]:
        return asdict(self)


def bench(
    runs: Sequence[tuple[str, RunConfig]],
    *,
    repeats: int,
    warmup: int,
    out: str | None = None,
    against: str | None = None,
    trace: str | None = None,
) -> int:
    """Measure `runs` as one rank of the job described by the environment. Returns the exit code.

    out: file to which one line of JSON is appended after each row. against: earlier file of this format, to compare
    with.
    """
    before = read_rows("--against", against) if against is not None else []
    runtime = runs[0][1].runtime
    world, device, groups = connect(runtime.device, runtime.backend, runtime.timeout_minutes)
    ACTIVITY.phase = "measuring"
    for name, run in runs:
        if run.runtime.deterministic:
            device.deterministic()
        traced = None if trace is None else trace if len(runs) == 1 else f"{trace}.{name}"
        speed = measure(
            *(name, run, world.rank, world.size, device, groups),
            repeats=repeats,
            warmup=warmup,
            trace=traced,
            progress=_SlowProgress(name) if world.rank == 0 and not device.is_cuda else None,
        )
        if world.rank:
            continue
        print(format_speed(speed), flush=True)
        if against is not None:
            print(f"  {compared(speed, before, against)}", flush=True)
        if out is not None:
            # Each row is appended immediately after the measurement, so that a later failure loses no row.
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(speed.fields()) + "\n")
    disconnect()
    return 0


def compared(speed: Speed, before: Sequence[Mapping[str, Json]], path: str) -> str:
    """Compare `speed` with the last row of the same name in `before`, if both rows measured the same work.

    >>> now = Speed("w1", 1, "CPU", "torch", "bf16", {"layers": 24}, 1, 1, 1.0, 0.0, 110.0, 1.0, None, 1.0, 1.0)
    >>> compared(now, [{"name": "w1", "tokens_per_second": 100, "work": {"layers": 24}}], "old")
    '+10.0% against old'
    >>> compared(now, [{"name": "w1", "tokens_per_second": 100, "work": {"layers": 12}}], "old")
    'not compared with old, whose row w1 is other work: layers 12, here 24'
    """
    row = next((row for row in reversed(before) if row["name"] == speed.name), None)
    if row is None:
        return f"not compared with {path}, which has no row {speed.name}"
    old_work, work, rate = below(row, "work"), speed.work, numbers_below(row)["tokens_per_second"]
    unlike = [
        f"{name} {old_work.get(name)}, here {value}" for name, value in work.items() if old_work.get(name) != value
    ]
    if unlike:
        return f"not compared with {path}, whose row {speed.name} is other work: {'; '.join(unlike)}"
    return f"{100 * (speed.tokens_per_second / rate - 1):+.1f}% against {path}"


def _work(run: RunConfig, world: int) -> dict[str, object]:
    """Return the options of model, batch and precision, and the number of ranks. Only rows in which all of these are
    equal are compared."""
    batch, precision = run.batch, run.precision
    options: dict[str, object] = {
        **asdict(run.model),
        "seq_length": batch.seq_length,
        "global_batch": batch.global_batch,
    }
    if len(run.model.stacks) > 1:
        options["decoder_seq_length"] = run.masking.decoder_seq_length
    options |= {name: getattr(precision, name) for name in ("dtype", "fp8", "grad_dtype", "masters")}
    if precision.fp8 and precision.fp8_scaling != "tensor":  # absent in rows of earlier versions
        options["fp8_scaling"] = precision.fp8_scaling
    options |= {"optimizer": run.optimizer.optimizer, "world": world}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def format_speed(speed: Speed) -> str:
    """Format a row as two lines for the user. Idle is the time in which the device waits for the host or another
    rank."""
    idle = 100 * speed.phases.get("idle", 0.0) / max(sum(speed.phases.values()), 1e-9)
    mfu = "n/a" if speed.mfu is None else f"{100 * speed.mfu:.1f}%"
    per_rank = f" ({speed.tokens_per_second / speed.world:,.0f} a rank)" if speed.world > 1 else ""
    skipped = f"; {speed.skipped} of the timed steps were skipped and updated nothing" if speed.skipped else ""
    return (
        f"{speed.name}: {speed.tokens_per_second:,.0f} tokens/s{per_rank}  {speed.tflops:.1f} TFLOP/s  MFU {mfu}  "
        f"{1e3 * speed.seconds:,.1f} ms a step, spread {100 * speed.spread:.1f}%  peak {speed.peak_gib:.1f} GiB  "
        f"{speed.world} x {speed.device}, ops {speed.ops}, {speed.products} products, micro batch {speed.micro_batch}"
        f"{skipped}\n"
        f"  ms by kind: {', '.join(f'{kind} {ms:,.1f}' for kind, ms in sorted(speed.phases.items()))}; idle {idle:.1f}%"
    )


def measure(
    name: str,
    run: RunConfig,
    rank: int,
    world: int,
    device: Device,
    groups: Groups,
    *,
    repeats: int = 7,
    warmup: int = 5,
    trace: str | None = None,
    profiled: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Speed:
    """Measure a resolved run on all ranks, and return the row. Rank 0 writes `trace`, a Chrome trace.

    warmup: steps before the timed steps; at least two if the second step records a graph. profiled: whether to profile
    one more step, which takes some seconds. progress: called with the numbers of finished and of all steps.
    """
    batch = run.batch
    mesh = build_mesh(run, rank, world, groups)
    state = build_state(run, mesh, device)
    batches = [
        random_batch(run, number * mesh.dp.size + mesh.dp.index, device.torch)
        for number in range(microbatches(run, world))
    ]
    device.reset_memory_peak()  # the peak includes the steps, but not the construction of the state
    warmup = max(warmup, 2) if records_graph(run, world) else warmup
    times, numbers_of_steps = _timed(state, batches, warmup, repeats, progress)
    seconds = statistics.median(times)
    tokens = batch.global_batch * sum(text_lengths(run))
    tflops = tokens / seconds / world * model_flops_per_token(run) / 1e12
    peak = device.memory_peak() or device.resident()
    speed = Speed(
        name=name,
        world=world,
        device=device.name,
        ops=state.optimizer.ops.name,
        products="fp8" if run.precision.fp8 else run.precision.dtype,
        work=_work(run, world),
        micro_batch=batch.micro_batch,
        global_batch=batch.global_batch,
        seconds=seconds,
        spread=(max(times) - min(times)) / seconds,
        tokens_per_second=tokens / seconds,
        tflops=tflops,
        mfu=None if device.peak_tflops is None else tflops / device.peak_tflops,
        peak_gib=peak / 2**30,
        loss=numbers_of_steps[-1]["loss"],
        largest_share=numbers_of_steps[-1].get("largest_share"),
        skipped=sum(not numbers["finite"] for numbers in numbers_of_steps[warmup:]),
        steps=times,
        phases=profile(state, batches, trace if rank == 0 else None) if profiled else {},
    )
    state.grads.wait_param_gather()
    state.pipeline.close()
    del state, batches  # frees this row's memory before the next state is built
    gc.collect()
    device.release()
    return speed


def _timed(
    state: TrainState,
    batches: Sequence[Batch],
    warmup: int,
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[float], list[dict[str, float]]]:
    """Return the seconds of each of `repeats` steps, on the step's slowest rank, and the metrics of all steps,
    including the `warmup` steps."""
    start, readings = Timestamp(state.device.torch), list[Reading]()
    for _ in range(warmup + repeats):
        readings.append(_step(state, batches).start_reading())
        if len(readings) > 1:
            readings[-2].numbers()  # the host is one step ahead, as in training
        if progress is not None:
            progress(len(readings), warmup + repeats)
    numbers_of_steps = [reading.numbers() for reading in readings]
    ends = [start, *(reading.moment for reading in readings)]
    times = [begin.seconds_to(end) for begin, end in pairwise(ends[warmup:])]
    slowest = torch.tensor(times, dtype=torch.float64, device=state.device.torch)
    all_reduce(slowest, state.mesh.everyone, "max")
    return slowest.tolist(), numbers_of_steps


class _SlowProgress:
    """Prints progress to stderr during slow steps, as on a CPU, with at most one message every SILENCE seconds."""

    def __init__(self, name: str):
        self._name, self._last = name, time.monotonic()

    def __call__(self, taken: int, steps: int) -> None:
        if (seconds := time.monotonic()) > self._last + SILENCE:
            self._last = seconds
            print(f"{self._name}: {taken} of {steps} steps", file=sys.stderr, flush=True)


def _step(state: TrainState, batches: Sequence[Batch]) -> StepReport:
    options = state.run.optimizer
    report = train_step(state, batches, options.lr or 0.0, options.weight_decay)
    state.progress.step += 1  # as in training: on a GPU, only some steps check weights and moments for NaN
    return report


def random_batch(run: RunConfig, number: int, device: torch.device) -> Batch:
    """Return microbatch `number` of random tokens, all with loss weight 1."""
    rows = run.batch.micro_batch
    assert rows
    samples = torch.arange(number * rows, (number + 1) * rows, device=device)
    batch = synthetic_batch(run, samples, seed=run.runtime.seed, ragged=False)
    return packed(batch) if run.data.reset_attention and isinstance(batch, DecoderBatch) else batch


def profile(state: TrainState, batches: Sequence[Batch], trace: str | None = None) -> dict[str, float]:
    """Return the milliseconds of one more step by kind of work; on a CPU the whole step belongs to the kind REST.

    The device is profiled over two steps, of which only the second is evaluated, because that step begins with the
    gathers that the first step leaves in flight.
    """
    activities, begin = [torch.profiler.ProfilerActivity.CPU], time.perf_counter()
    if not state.device.is_cuda and trace is None:
        _step(state, batches)
        return {REST: 1e3 * (time.perf_counter() - begin)}
    if state.device.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(2 if state.device.is_cuda else 1):
            _step(state, batches)
            state.device.mark()
        state.device.synchronize()
    seconds = time.perf_counter() - begin
    if trace is not None:
        profiler.export_chrome_trace(trace)
    if not state.device.is_cuda:
        return {REST: 1e3 * seconds}
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return phases_of(between_marks(spans))


def between_marks(spans: Sequence[Span]) -> list[Span]:
    """Return the spans between the ends of the last two marks, clipped to this interval.

    >>> between_marks([(0, 9, "a"), (4, 5, "spin_kernel"), (6, 8, "b"), (7, 12, "c"), (9, 10, "spin_kernel")])
    [(5, 9, 'a'), (6, 8, 'b'), (7, 10, 'c')]
    """
    first, last = sorted(end for _, end, name in spans if MARK in name)[-2:]
    clipped = [(max(begin, first), min(end, last), name) for begin, end, name in spans if MARK not in name]
    return [(begin, end, name) for begin, end, name in clipped if begin < end]


def phases_of(spans: Sequence[Span]) -> dict[str, float]:
    """Return the milliseconds by kind of work. spans: kernels as (begin, end, name), in microseconds.

    Communication counts only while no other kernel runs; `idle` is time without any kernel.

    >>> phases_of([(0, 1000, "nvjet_tst"), (500, 2000, "ncclKernel"), (3000, 4000, "triton")])
    {'products': 1.0, 'communication': 1.0, 'idle': 1.0, 'rest': 1.0}
    """
    milliseconds: dict[str, float] = {}
    covered_until = min((begin for begin, _, _ in spans), default=0.0)
    # Communication is sorted last among spans that begin together, so that overlapping work covers the communication.
    work = sorted((span for span in spans if kind_of(span[2]) != COMMUNICATION), key=lambda span: span[0])
    exposed = _uncovered([span for span in spans if kind_of(span[2]) == COMMUNICATION], work)
    for begin, end, name in sorted([*work, *exposed], key=lambda span: span[0]):
        if begin > covered_until:
            milliseconds["idle"] = milliseconds.get("idle", 0.0) + (begin - covered_until) / 1e3
        if end > covered_until:
            kind = kind_of(name)
            milliseconds[kind] = milliseconds.get(kind, 0.0) + (end - max(begin, covered_until)) / 1e3
            covered_until = end
    return milliseconds


def _uncovered(spans: Sequence[Span], covers: Sequence[Span]) -> list[Span]:
    """Yield the parts of `spans` that no span in `covers` overlaps. covers: sorted by begin."""
    exposed: list[Span] = []
    for begin, end, name in spans:
        position = begin
        for start, stop, _ in covers:
            if start >= end:
                break
            if stop > position:
                if start > position:
                    exposed.append((position, start, name))
                position = stop
        if position < end:
            exposed.append((position, end, name))
    return exposed


def kind_of(kernel: str) -> str:
    """
    >>> kind_of("nvjet_hsh_256x128"), kind_of("ncclDevKernel_AllReduce"), kind_of("_gate_forward")
    ('products', 'communication', 'rest')
    """
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), REST)
