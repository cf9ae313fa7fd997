"""Measures the memory of one microbatch on the meta device: bytes stored for the backward pass, and peaks of both
passes.

A rank's pipeline stage is built as in training, with the ops that the run would use on its device, and runs forward and
backward on meta tensors, which have no data. Every storage that an op allocates is counted until it is freed. Any model
that can be trained can therefore be estimated. Because blocks repeat, only a few blocks are run, and the results are
extrapolated to all blocks.

This module measures one microbatch on one chunk of the model. Weights, gradients and optimizer state are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import gcd
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from mega.core.architecture import architecture, shape
from mega.core.batch import Batch
from mega.core.config.resolve import microbatch_rows, overlaps_exchanges, resolve, variant
from mega.core.config.run import Options, RunConfig
from mega.core.config.sections import (
    BatchConfig,
    BatchOptions,
    DataConfig,
    MaskingConfig,
    ModelConfig,
    ParallelOptions,
    RuntimeConfig,
)
from mega.core.device import DTYPES
from mega.core.estimate.chunks import Chunk, of_kind
from mega.core.estimate.cost import Operation, Units
from mega.core.estimate.operation_log import OperationLog
from mega.core.family import synthetic_batch
from mega.core.ops.autograd import run_backward
from mega.core.ops.observe import observing
from mega.core.parallel.deferred import DeferredWgrad, run_wgrad
from mega.core.parallel.gradients import parameter_spec, zero_unwritten
from mega.core.parallel.layout import ParameterSpec
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.peers import MetaPeers
from mega.core.parallel.weight import Weight, weights
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.plan.kinds import splits_backward
from mega.core.training.wire import build_grads, build_stages

REPEATS, ENOUGH = 4, 3
"""Number of periods to run; a period is the number of blocks after which the recomputation pattern repeats. The first
two periods and the last have special neighbours, and the third represents all others. ENOUGH periods are run if blocks
share no memory, because the last period then equals the third."""

WORKSPACES = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: lambda grad, query, *_: 4 * query.numel()
}
"""Op -> function that returns the workspace bytes of the op's kernel. For example, cuDNN accumulates the query's
gradient in fp32."""


PACKED = 0.33
"""Fraction of the causal (query, key) pairs that remain if attention is limited to documents, for documents of 200 to
2,000 tokens that are packed into rows of 4,096 tokens."""


class Part(NamedTuple):
    """The memory of one part of a forward or backward pass, in bytes."""

    peak: int
    """Peak of live bytes, minus the live bytes at the beginning of this part of the pass."""
    change: int
    """Live bytes at the end of this part of the pass, minus the live bytes at its beginning."""
    weight: tuple[int, int] | None = None
    """The tuple (unit, index in the unit) of the weight whose gradient ends this part of the pass. None if this part
    ends with its unit."""
    opens: bool = False
    """If True, this part of the pass ends when the gradient of `weight` is first accumulated, otherwise when that
    gradient is complete."""


Parts = tuple[tuple[Part, ...], ...]
"""The parts of a pass, one tuple per unit. The units are the modules before a stack of blocks, each block of the stack,
the modules after the stack, and so on. The backward pass runs from the last unit to the first."""


class Trace(NamedTuple):
    """The memory, in bytes, and the operations of one microbatch on a chunk."""

    forward: Parts  # Parts of the forward pass
    backward: Parts  # Parts of the backward pass
    before: int  # Live bytes left by earlier microbatches
    in_flight: int  # Bytes of sent blocks that only exchanges keep alive, after the forward pass
    given: int  # Bytes of gradients at the start of the backward pass
    cargo: int  # Bytes received from the previous stage or sent to the next stage
    batch: int  # Bytes of the batch
    mapped: int  # Bytes that exchanges map outside the allocator
    forward_work: Units  # Operations of the forward pass by unit
    backward_work: Units  # Operations of the backward pass by unit
    weight_work: Units  # Deferred weight gradients by unit, for schedules with a split backward pass

    @property
    def held(self) -> int:
        """Bytes stored from the forward pass to the backward pass."""
        return self.before + _change(self.forward) - self.in_flight

    @property
    def deferred(self) -> int:
        """Bytes stored from the backward pass to a separate weight-gradient pass."""
        return self.held + self.in_flight + _change(self.backward) - 2 * self.given - self.before


def _change(parts: Parts) -> int:
    return sum(part.change for unit in parts for part in unit)


Values = tuple[object, ...]
"""The arguments or results of an op."""


class Live(TorchDispatchMode):
    """Counts the bytes of live storages that ops have allocated.

    workspaces: workspace bytes of kernels, in the format of WORKSPACES. log: records every op.
    """

    def __init__(
        self, workspaces: Mapping[OpOverload, Callable[..., int]] | None, log: OperationLog | None = None
    ) -> None:
        super().__init__()
        self._log = log or OperationLog()
        self.live = self.peak = 0
        self._workspaces = {id(func): workspace for func, workspace in (workspaces or {}).items()}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Exclude tensors that are counted elsewhere."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch imports its compiler to skip this mode

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Values = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        kind = _KINDS.get(id(func)) or _KINDS.setdefault(id(func), _kind(func))
        if kind == "written":
            output = kwargs["out"] if "out" in kwargs else args[0]
            self._log.op(func, args, kwargs, output)
            return output
        if kind == "view":
            return func(*args, **kwargs)
        out = _run_op(func, args, kwargs)
        self._log.op(func, args, kwargs, out)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._add(storage, storage.nbytes())
        if id(func) in self._workspaces:
            self.peak = max(self.peak, self.live + self._workspaces[id(func)](*args))
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


_KINDS: dict[int, str] = {id(torch.ops.aten._unsafe_view.default): "view"}
"""id of an op -> kind of its result (see `_kind`). The key is the id because ops are never freed and hashing an op is
slower."""


def _kind(func: OpOverload) -> str:
    """Return the kind of an op's result: "written" into an argument, a "view" of an argument, or "made" (newly
    allocated)."""
    if func.is_view:
        return "view"
    schema = func._schema
    return "written" if schema.is_mutable and len(schema.returns) == 1 else "made"


class _MetaTensor(NamedTuple):
    """A hashable description from which a tensor on the meta device can be created."""

    shape: tuple[int, ...]
    """Shape of the tensor."""
    stride: tuple[int, ...]
    """Strides of the tensor."""
    dtype: torch.dtype
    """Dtype of the tensor."""

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_RESULTS: dict[object, Values] = {}
"""Cached descriptions of the results of ops. Blocks repeat, so most ops run again with equal arguments."""


def _run_op(func: OpOverload, args: Values, kwargs: dict[str, object]) -> object:
    """Return the results of `func(*args, **kwargs)` as newly allocated meta tensors."""
    key = (id(func), tuple(map(_described, args)), tuple(kwargs.items()))
    results = _RESULTS.get(key)
    if results is None:
        results = _run_on_cpu(func, key[1], kwargs)
        if results is None:
            out = func(*args, **kwargs)
            results = tuple(map(_described, out if isinstance(out, tuple) else (out,)))
        _RESULTS[key] = results
    outs = tuple(value.empty() if isinstance(value, _MetaTensor) else value for value in results)
    return outs if len(outs) > 1 else outs[0]


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _MetaTensor(value.shape, value.stride(), value.dtype)
    return tuple(map(_described, value)) if isinstance(value, list) else value


def _dense(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _MetaTensor:
    """Describe a dense tensor of shape `shape` whose dims have the memory order of `stride`."""
    dense, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        dense[dim], step = step, step * max(shape[dim], 1)
    return _MetaTensor(shape, tuple(dense), dtype)


def _attention(q: _MetaTensor, k: _MetaTensor, *_: object) -> Values:
    lse, state = (*q.shape[:-1], 1), _dense((), (), torch.int64)
    sums = _dense(lse, (0,) * len(lse), torch.float32)
    return _dense(*q), sums, None, None, q.shape[2], k.shape[2], state, state, None


def _block_scaled(a: _MetaTensor, b: _MetaTensor, *others: object) -> Values:
    """Describe a GEMM [m, k] x [k, n] of `_scaled_mm_v2`, whose 10th argument is the dtype of the result."""
    dtype = others[7]
    assert isinstance(dtype, torch.dtype)
    return (_dense((a.shape[0], b.shape[1]), (1, 0), dtype),)


_ON_CUDA: dict[OpOverload, Callable[..., Values]] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: lambda grad, *qkv: tuple(
        _dense(*one) for one in qkv[:3]
    ),
    torch.ops.aten._scaled_mm_v2.default: _block_scaled,
}
"""Op -> function that describes the op's results, for ops without a CPU kernel: cuDNN's attention, and GEMMs in fp8
with one scale per block."""


class _UnknownLength(Exception):
    """Raised if a result has a length that does not correspond to an input length."""


def _run_on_cpu(func: OpOverload, args: Values, kwargs: dict[str, object]) -> Values | None:
    """Describe the results of an op by running torch's CPU kernel on tensors whose long dims are replaced with short
    dims. Return None if this fails.

    The meta device is not used, because torch then computes shapes in Python and imports its compiler. A result length
    that is a sum of input lengths could be mistaken for an input length, so the op runs with two sets of short lengths,
    and both descriptions must agree.
    """
    if func.overloadpacket is torch.ops.aten.arange:
        return (_described(func(*args, **{**kwargs, "device": "cpu"})),)
    if func in _ON_CUDA:
        return _ON_CUDA[func](*args)
    if not any(isinstance(value, _MetaTensor | tuple) for value in args):
        return None
    try:
        first, second = (_StandIns(*lengths).made(func, args, kwargs) for lengths in ((11, 2), (10, 5)))
    except (RuntimeError, NotImplementedError, IndexError, _UnknownLength):
        return None
    return first if first == second else None


class _StandIns:
    """Replaces each distinct long length with a short length: `begin`, `begin + step`, ..."""

    def __init__(self, begin: int, step: int) -> None:
        self._begin, self._step, self._short = begin, step, dict[int, int]()

    def made(self, func: OpOverload, args: Values, kwargs: dict[str, object]) -> Values:
        out = func(*map(self._small, args), **kwargs)
        self._long = {short: length for length, short in self._short.items()}
        return tuple(map(self._large, out if isinstance(out, tuple) else (out,)))

    def _less(self, length: int) -> int:
        return length if length <= 8 else self._short.setdefault(length, self._begin + self._step * len(self._short))

    def _small(self, value: object) -> object:
        if isinstance(value, _MetaTensor):
            order = sorted(range(len(value.shape)), key=lambda dim: -value.stride[dim])
            small_tensor = torch.zeros([self._less(value.shape[dim]) for dim in order], dtype=value.dtype)
            return small_tensor.permute([order.index(dim) for dim in range(len(order))])
        if isinstance(value, tuple):
            return [self._less(one) if isinstance(one, int) else self._small(one) for one in value]
        return value

    def _large(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if any(length > 8 and length not in self._long for length in value.shape):
            raise _UnknownLength
        return _dense(tuple(self._long.get(length, length) for length in value.shape), value.stride(), value.dtype)


class _Recorder:
    """Divides the live bytes of `live` into parts by unit, and the operations of `log` by unit."""

    def __init__(self, live: Live, log: OperationLog, units: int) -> None:
        self.live, self.log, self.units = live, log, units
        self.begin(0)

    def begin(self, unit: int) -> None:
        """Begin a pass in `unit`."""
        self._parts: list[list[Part]] = [[] for _ in range(self.units)]
        self._work: list[list[Operation]] = [[] for _ in range(self.units)]
        self._working = unit
        self.log.take()
        self._unit, self._begun = unit, self.live.live
        self.live.peak = self._begun
        self.backward = unit > 0

    def enter(self, unit: int) -> None:
        """Count bytes for `unit` from now on."""
        if unit != self._unit:
            self.cut()
            self._unit = unit

    def works(self, unit: int) -> None:
        """Count operations for `unit` from now on."""
        self._work[self._working] += self.log.take()
        self._working = unit

    def cut(self, weight: tuple[int, int] | None = None, opens: bool = False) -> None:
        live = self.live
        self._parts[self._unit].append(Part(live.peak - self._begun, live.live - self._begun, weight, opens))
        self._begun = live.peak = live.live

    def end(self) -> tuple[Parts, Units]:
        self.cut()
        self.works(self._unit)
        return tuple(map(tuple, self._parts)), tuple(map(tuple, self._work))


def trace(run: RunConfig, chunk: Chunk, *, composed: bool = False, shared: bool = False) -> Trace:
    """Trace one microbatch of a resolved `run` on a chunk.

    composed: assemble chunks of all lengths from the same two traces, even if blocks share memory, in which case the
    operations are exact but the peaks are not. shared: whether the passes of a step share fp8 casts of weights.
    The trace does not include these casts.
    """
    if chunk.kinds:
        return _mixed_kinds(run, chunk, composed, shared)
    parallel = run.parallel
    key = (
        *(run.model, run.precision, run.memory, run.masking.decoder_seq_length, run.data.reset_attention),
        *(run.runtime.device, run.runtime.ops, run.batch.seq_length, microbatch_rows(run), chunk),
        *(parallel.tp, parallel.cp, parallel.cp_comm, parallel.sequence_parallel, overlaps_exchanges(run)),
        *(parallel.zero if parallel.zero > 1 else 0, _splits(run), composed, shared),
    )
    if key not in _TRACES:
        _TRACES[key] = _traced_chunk(run, chunk, composed, shared)
    return _TRACES[key]


_TRACES: dict[object, Trace] = {}
"""Cached traces, keyed by all options of a run that affect a trace. Building the key is faster than calling
`reduced_run`."""


PerUnit = TypeVar("PerUnit")
"""The type of a value that each unit of a pass has."""


def _mixed_kinds(run: RunConfig, chunk: Chunk, composed: bool, shared: bool) -> Trace:
    """Assemble the trace of a chunk with several kinds of blocks. Each block comes from the trace of a chunk that has
    only this kind of block. The first and last unit come from the trace for the kind of the neighbouring block."""
    # Overlap is chosen for the whole model, not for each kind of block.
    run = variant(run, {"tp_overlap": overlaps_exchanges(run)})
    traces = {
        kind: trace(
            replace(run, model=of_kind(run.model, kind)), chunk._replace(kinds=()), composed=composed, shared=shared
        )
        for kind in dict.fromkeys(chunk.kinds)
    }
    units = [traces[kind] for kind in (chunk.kinds[0], *chunk.kinds, chunk.kinds[-1])]

    def each(whole: Callable[[Trace], tuple[PerUnit, ...]]) -> tuple[PerUnit, ...]:
        return tuple(whole(unit_trace)[number] for number, unit_trace in enumerate(units))

    return units[0]._replace(
        forward=each(lambda found: found.forward),
        backward=each(lambda found: found.backward),
        forward_work=each(lambda found: found.forward_work),
        backward_work=each(lambda found: found.backward_work),
        weight_work=each(lambda found: found.weight_work),
        given=units[-1].given,
    )


def _splits(run: RunConfig) -> bool:
    return bool(run.parallel.schedule and splits_backward(run.parallel.schedule))


def _traced_chunk(run: RunConfig, chunk: Chunk, composed: bool, shared: bool) -> Trace:
    if chunk.before is not None:
        return _traced(*reduced_run(run, chunk), microbatch_rows(run), shared)
    regimes, rows = [list(_regimes(run, count)) for count in chunk.stacks], microbatch_rows(run)
    alike = len(regimes) == 1 and regimes[0] == [(chunk.blocks, 1)] and not _last_is_special(run)
    if chunk.blocks < 2 or not alike or not (composed or _composable(run)):
        short = [[min(count, REPEATS * period + count % period) for count, period in stack] for stack in regimes]
        reduced, stage = reduced_run(run, chunk._replace(stacks=tuple(map(sum, short))))
        if run.memory.recompute_method == "block":
            singly = max(counts[0] for counts in short)
            reduced = variant(reduced, {"recompute_layers": singly})
        return _repeated(_traced(reduced, stage, rows, shared), regimes, short)
    # Any chunk can be assembled from two traces: one with both ends of the model, and one with neither end.
    with_ends, without_ends = (
        chunk._replace(names=names, stacks=(ENOUGH,)) for names in (tuple(shape(run.model).after), ())
    )
    begin, end = (
        _traced(*reduced_run(run, with_ends if name in chunk.names else without_ends), rows, shared)
        for name in (with_ends.names[0], with_ends.names[-1])
    )
    combined = begin._replace(
        forward=(*begin.forward[:-1], end.forward[-1]),
        backward=(*begin.backward[:-1], end.backward[-1]),
        forward_work=(*begin.forward_work[:-1], end.forward_work[-1]),
        backward_work=(*begin.backward_work[:-1], end.backward_work[-1]),
        weight_work=(*begin.weight_work[:-1], end.weight_work[-1]),
        given=end.given,
    )
    return _repeated(combined, regimes, [[ENOUGH]])


def _last_is_special(run: RunConfig) -> bool:
    """Whether the model's last block may run on fewer tokens than the other blocks (model/bert.py)."""
    return architecture(run.model).layers[-1].queries_alone


def _composable(run: RunConfig) -> bool:
    """Whether blocks share no memory, that is, no exchanged data is in flight and no tensor is held only by a block's
    caller."""
    plain = run.runtime.device == "cpu" or run.runtime.ops == "reference" or run.precision.dtype == "fp64"
    return not (plain or overlaps_exchanges(run) or run.parallel.cp > 1)


def reduced_run(run: RunConfig, chunk: Chunk) -> tuple[RunConfig, int]:
    """Return a small run in which one pipeline stage is `chunk`, and the index of this stage. A neighbouring stage has
    one block of each stack that it needs.

    The small run keeps all options that affect a microbatch, except its size. Layouts that differ only in other options
    therefore share a trace.
    """
    if chunk.before is not None:
        stages = [[chunk.before], list(chunk.stacks), [run.model.layers - chunk.before - chunk.blocks]]
        chunk_positions = stages[1]
        return _staged(
            run, run.model, [each for each in stages if sum(each) or each is chunk_positions], chunk.before > 0
        )
    after = shape(run.model).after
    # Positions in the model: the units after n stacks are at 2 n, and stack n is at 2 n + 1.
    chunk_positions = [2 * after[name] for name in chunk.names]
    chunk_positions += [2 * number + 1 for number, count in enumerate(chunk.stacks) if count]
    last = 2 * len(chunk.stacks)
    before = [
        int(min(chunk_positions) > 0 and 2 * number + 1 <= min(chunk_positions)) for number in range(len(chunk.stacks))
    ]
    following = [
        int(max(chunk_positions) < last and 2 * number + 1 >= max(chunk_positions))
        for number in range(len(chunk.stacks))
    ]
    stages = [*([before] if any(before) else []), list(chunk.stacks), *([following] if any(following) else [])]
    model = run.model.with_stacks(tuple(sum(counts) for counts in zip(*stages, strict=True)))
    if model.experts:  # a model with only dense layers has no experts (`of_kind`)
        model = replace(model, experts_from=0, experts_every=1, dense_layers=())
    return _staged(run, model, stages, any(before))


def _staged(
    run: RunConfig, model: ModelConfig, stages: Sequence[Sequence[int]], preceded: bool
) -> tuple[RunConfig, int]:
    """Return a run of `model` divided into `stages`, and the index of the stage to trace, which is 1 if `preceded`,
    otherwise 0."""
    parallel, layers = run.parallel, tuple(sum(stacks) for stacks in stages)
    options = Options(
        model=model,
        precision=run.precision,
        parallel=ParallelOptions(
            tp=parallel.tp,
            ep=parallel.ep,
            etp=parallel.etp,
            expert_dispatch=parallel.expert_dispatch,
            cp=parallel.cp,
            cp_comm=parallel.cp_comm,
            pp=len(layers),
            stage_layers=layers,
            sequence_parallel=parallel.sequence_parallel,
            # Given explicitly, because overlap would not be chosen for the small run's blocks.
            tp_overlap=overlaps_exchanges(run),
            zero=parallel.zero if parallel.zero > 1 else 0,
            schedule=parallel.schedule if _splits(run) else "1f1b",
        ),
        batch=BatchOptions(seq_length=run.batch.seq_length, micro_batch=1),  # the actual size is given to `_Rank.trace`
        memory=run.memory,
        data=DataConfig(reset_attention=run.data.reset_attention),
        masking=MaskingConfig(decoder_seq_length=run.masking.decoder_seq_length),
        runtime=RuntimeConfig(device=run.runtime.device, ops=run.runtime.ops),
    )
    return resolve(options, parallel.tp * parallel.cp * len(layers)), int(preceded)


def _regimes(run: RunConfig, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (number of blocks, period) of each group of blocks with one recomputation pattern, which repeats every
    period."""
    memory = run.memory
    if memory.recompute == "full" and memory.recompute_method == "block":
        singly = min(memory.recompute_layers or 0, blocks)
        yield singly, 1
        yield blocks - singly, 1
    else:
        yield blocks, (memory.recompute_layers or 1) if memory.recompute == "full" else 1


def _repeated(traced: Trace, regimes: Sequence[Sequence[tuple[int, int]]], short: Sequence[Sequence[int]]) -> Trace:
    """Extend a trace of few blocks (`short`) to all blocks, by repeating the third period of each regime of each stack.
    A regime is a group of blocks with one recomputation pattern."""
    # units[i]: the unit of the trace that is copied to unit i of the result. Example with four traced blocks and six
    # blocks in the result: 0 | 1 2 3 3 3 4 | 5.
    units, begin = [0], 1
    for stack, runs in zip(regimes, short, strict=True):
        for (count, period), run in zip(stack, runs, strict=True):
            third_period, end = begin + 2 * period, begin + min(count, run)
            units += range(begin, min(third_period, end))
            units += [*range(third_period, third_period + period)] * ((count - run) // period)
            units += range(third_period, end)
            begin += run
        units.append(begin)
        begin += 1
    if units == list(range(begin)):
        return traced
    new_position = {unit: at for at, unit in enumerate(units)}
    between = {0} | {sum(map(sum, short[: number + 1])) + number + 1 for number in range(len(short))}

    def moved(part: Part, by: int) -> Part:
        """Renumber the unit of a part's weight. A weight of a block is shifted by `by` units like its part. A unit
        between stacks is never repeated and has one new position."""
        if part.weight is None:
            return part
        unit, number = part.weight
        return part._replace(weight=(new_position[unit] if unit in between else unit + by, number))

    def whole(parts: Parts) -> Parts:
        return tuple(tuple(moved(part, at - unit) for part in parts[unit]) for at, unit in enumerate(units))

    def listed(work: Units) -> Units:
        return tuple(work[unit] for unit in units)

    return traced._replace(
        forward=whole(traced.forward),
        backward=whole(traced.backward),
        forward_work=listed(traced.forward_work),
        backward_work=listed(traced.backward_work),
        weight_work=listed(traced.weight_work),
    )


@lru_cache(maxsize=4096)
def _traced(run: RunConfig, stage: int, rows: int, shared: bool) -> Trace:
    """Trace a microbatch of `rows` samples on a stage of a run that `reduced_run` returned. shared: as in `trace`."""
    rank = _rank(run, stage)
    casts = WeightCasts([rank.chunk] if shared else ())
    with casts.shared():
        with Live(None):  # this mode's result is not used, so these buffers are not counted
            casts.renew()
        return rank.trace(rows)


@lru_cache(maxsize=1024)
def _rank(run: RunConfig, stage: int) -> _Rank:
    return _Rank(run, stage)


class _Rank:
    """A rank of a stage on the meta device: the last on the tensor axis and on the context axis."""

    def __init__(self, run: RunConfig, stage: int) -> None:
        self.run, parallel = run, run.parallel
        self.mesh, self.chunk = _built(run, stage)
        units = _units(self.chunk)
        unit_weights = _distinct_weights(units)
        self.grads = build_grads(variant(run, {"zero": 0}), self.mesh, [self.chunk])
        self.grads.start()
        zero_unwritten(self.grads)  # a microbatch adds to the gradients, unless it is the first of its step
        transport = self.chunk.region.transport
        self.exchanges = transport if isinstance(transport, MetaPeers) else None
        self.deferred = _splits(run)
        packed = PACKED if run.data.reset_attention else 1.0
        self.log = OperationLog(packed=packed)
        self.live = Live(None if run.runtime.device == "cpu" else WORKSPACES, self.log)
        for bucket in self.grads.buckets:
            self.live.ignore(bucket.weights, bucket.own_grads)
        self.live.ignore(*(weight.data for part in unit_weights for weight in part if not weight.requires_grad))
        unit_weights = [[weight for weight in part if weight.requires_grad] for part in unit_weights]
        if self.exchanges is not None:
            self.live.ignore(self.exchanges.memory)
        self.recorder = _Recorder(self.live, self.log, len(units))
        # A tied embedding occurs in two units. Its deferred gradient belongs to the last of these units, the output
        # layer.
        self.unit_of = {id(w): unit for unit, part in enumerate(units) for module in part for w in weights(module)}
        for unit, modules in enumerate(units):
            for module in modules:
                module.register_forward_pre_hook(partial(_unit_began, self.recorder, unit))
                module.register_forward_hook(partial(_unit_ended, self.recorder, unit))
            for number, weight in enumerate(unit_weights[unit] if parallel.zero >= 2 else ()):
                _record_gradient(self.recorder, weight, (unit, number))
        if parallel.zero >= 3:
            self.chunk.with_full_params = lambda unit, run, x: run(
                x
            )  # as under ZeRO 3: with this hook, each unit also adds its last branch to the residual stream

    def trace(self, rows: int) -> Trace:
        """Trace one microbatch of `rows` samples. With exchanges, the microbatch runs twice and only the second run is
        measured, because it starts with live buffers of the preceding microbatch."""
        batch = _batch(self.run.model, self.run.batch, self.run.masking, self.run.data, rows, self.mesh.cp.size)
        self.live.ignore(*batch.tensors().values())
        if self.exchanges is not None:
            self._passes(batch)
        return self._passes(batch)

    def _passes(self, batch: Batch) -> Trace:
        live, recorder, exchanges = self.live, self.recorder, self.exchanges
        before, shapes = live.live, self.chunk.cargo(batch)
        with live, observing(self.log):
            recorder.begin(0)
            cargo: tuple[torch.Tensor, ...] = ()
            if not self.mesh.pp.first:
                cargo = tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s, dtype in shapes)
            scales = torch.empty(len(self.chunk.terms), dtype=torch.float64, device="meta")
            out = self.chunk(batch, *cargo, scales=scales)
            sent = sum(tensor.nbytes for tensor in out.cargo)
            roots = (term.total if term.root is None else term.root for term in out.terms.values())
            outs = (*out.cargo, *roots)
            del out  # training does not keep this reference (nor those deleted below), and it would count as memory
            forward, forward_work = recorder.end()
            in_flight = exchanges.settle() if exchanges is not None else 0
            recorder.begin(recorder.units - 1)
            if self.deferred:
                self.grads.wgrad.defer()
            output_grads = tuple(torch.empty_like(tensor) for tensor in outs)
            run_backward(outs, output_grads)
            deferred = self.grads.wgrad.take() if self.deferred else []
            del cargo
            backward, backward_work = recorder.end()
            weight_work = self._put_off(deferred)
        del deferred, outs
        return Trace(
            forward,
            backward,
            before,
            in_flight,
            given=sum(tensor.nbytes for tensor in output_grads),
            cargo=max(sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes), sent),
            batch=sum(tensor.nbytes for tensor in batch.tensors().values()),
            mapped=exchanges.mapped if exchanges is not None else 0,
            forward_work=forward_work,
            backward_work=backward_work,
            weight_work=weight_work,
        )

    def _put_off(self, deferred: list[DeferredWgrad]) -> Units:
        """Run the deferred weight gradients, and return their operations, grouped by the unit of the weight."""
        work: list[list[Operation]] = [[] for _ in range(self.recorder.units)]
        for one in deferred:
            run_wgrad([one])
            work[self.unit_of[id(one[0])]] += self.log.take()
        return tuple(map(tuple, work))


@lru_cache(maxsize=512)
def _batch(
    model: ModelConfig, lengths: BatchConfig, masking: MaskingConfig, data: DataConfig, rows: int, shards: int
) -> Batch:
    """Return the shard of a microbatch that belongs to the last of `shards` context ranks."""
    run = resolve(Options(model=model, batch=lengths, masking=masking), 1)
    samples = torch.zeros(rows, dtype=torch.int64)
    batch: Any = synthetic_batch(run, samples, seed=0, documents=data.reset_attention)
    batch = batch.split(shards - 1, shards)
    like = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in batch.tensors().items()}
    return replace(batch, **like)  # type: ignore[no-any-return]


def unit_parameters(run: RunConfig, chunk: Chunk) -> list[list[ParameterSpec]]:
    """List the parameters of a chunk on its last rank, one list per unit. A tied parameter is listed only once."""
    return _unit_parameters(*reduced_run(run, chunk))


@lru_cache(maxsize=512)
def _unit_parameters(run: RunConfig, stage: int) -> list[list[ParameterSpec]]:
    units = _units(_built(run, stage)[1])
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    specs = [[parameter_spec(weight) for weight in weights_of_unit] for weights_of_unit in _distinct_weights(units)]
    return [[spec._replace(dtype=names[spec.dtype]) for spec in weights_of_unit] for weights_of_unit in specs]


def _built(run: RunConfig, stage: int) -> tuple[Mesh, Any]:
    """Build the last rank of a stage. Return its mesh and its only chunk."""
    parallel = run.parallel
    cells = parallel.tp * parallel.cp
    experts = parallel.ep * parallel.etp
    data = experts // gcd(cells, experts)  # the smallest data axis over which the experts can be divided
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.etp}
    mesh = Mesh.at((stage * data + data - 1) * cells + cells - 1, dp=data, **sizes)
    (chunk,) = build_stages(run, mesh, torch.device("meta"))
    return mesh, chunk


def _units(chunk: nn.Module) -> list[list[nn.Module]]:
    """The modules of a chunk by unit: the modules before a stack of blocks, every block, the modules after the stack,
    and so on."""
    units = list[list[nn.Module]]([[]])
    for child in chunk.children():
        if isinstance(child, nn.ModuleList):
            units += [[block] for block in child] + [[]]
        else:
            units[-1].append(child)
    return units


def _distinct_weights(units: Sequence[Sequence[nn.Module]]) -> list[list[Weight]]:
    """List the weights of each unit, without the weights that an earlier unit shares."""
    earlier_ids, weights_by_unit = set[int](), list[list[Weight]]()
    for modules in units:
        new_weights = [weight for module in modules for weight in weights(module) if id(weight) not in earlier_ids]
        earlier_ids.update(map(id, new_weights))
        weights_by_unit.append(new_weights)
    return weights_by_unit


def _unit_began(recorder: _Recorder, unit: int, *_: object) -> None:
    """Forward pre-hook: count the following bytes and operations for `unit`. Recomputation is counted as a part of the
    backward pass."""
    if not recorder.backward:
        recorder.enter(unit)
        recorder.works(unit)


def _unit_ended(recorder: _Recorder, unit: int, _: nn.Module, args: object, out: object) -> None:
    """Forward hook: count the following bytes and operations for the next unit, and register hooks for the backward
    pass.

    In the backward pass, bytes are attributed to `unit` once the gradient of the unit's first result exists, and
    operations once the gradient of any result exists.
    """
    if recorder.backward:
        return
    following = min(unit + 1, recorder.units - 1)
    recorder.enter(following)
    recorder.works(following)
    tensors = [tensor for tensor in _tensors((out,)) if tensor.requires_grad]
    for tensor in tensors:
        tensor.register_hook(lambda grad: recorder.works(unit))
    if tensors:
        tensors[0].register_hook(lambda grad: recorder.enter(unit))


def _tensors(values: Values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _record_gradient(recorder: _Recorder, weight: Weight, location: tuple[int, int]) -> None:
    """Cut the backward pass where a weight's gradient is first accumulated, and where it is complete."""
    main_grad, waiting = weight.main_grad, weight.uses
    weight.main_grad = None

    def opened(_: Weight) -> None:
        weight.main_grad = main_grad
        recorder.cut(location, opens=True)

    def ready(_: Weight) -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            waiting, weight.main_grad = weight.uses, None
            recorder.cut(location)

    weight.on_main_grad, weight.on_grad_ready = opened, ready
