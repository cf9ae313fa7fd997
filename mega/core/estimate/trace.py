"""Live bytes of real stages on the meta device: what a microbatch keeps for its backward pass, what lives meanwhile.

A rank's stage is built as training builds it, with the ops of the run's own device, and runs forward and backward on
tensors without memory. Every storage that an op makes is counted until it is gone. So a model that trains is estimated,
and nothing here knows what it consists of, but that blocks repeat: a few of them are run, and the rest follow.

Knows one microbatch on one chunk of the model. Weights, gradients and the optimizer's state are not counted here.
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

from mega.core.architecture import shape
from mega.core.batch import Batch
from mega.core.config.resolve import microbatch_rows, resolve, variant
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
from mega.core.estimate.heard import Heard
from mega.core.family import synthetic_batch
from mega.core.ops.autograd import run_backward
from mega.core.ops.observe import observing
from mega.core.parallel.deferred import DeferredWgrad, run_wgrad
from mega.core.parallel.gradients import parameter_spec
from mega.core.parallel.layout import ParameterSpec
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.peers import Imagined
from mega.core.parallel.weight import Weight, weights
from mega.core.plan.kinds import splits_backward
from mega.core.training.wire import build_grads, build_stages

REPEATS, ENOUGH = 4, 3
"""Periods of equal blocks that are run: the first two and the last have other neighbours than the third, which stands
for all others. ENOUGH where what a block keeps is its own: then the last is as the third."""

WORKSPACES = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: lambda grad, query, *_: 4 * query.numel()
}
"""Bytes that an op's kernel takes from the allocator while it runs: cuDNN sums the query's gradient in fp32."""


PACKED = 0.33
"""Share of a row's causal pairs that packed documents leave: of 200 to 2,000 tokens in 4,096."""


class Part(NamedTuple):
    """A part of a pass, in bytes. peak: the most that lives besides what lived when it began. change: what lives more
    (or less) when it ends.

    weight: (unit, number there) of the weight whose gradient begins to be added when this part ends (`opens`), or is
    complete; None where a unit ends.
    """

    peak: int
    change: int
    weight: tuple[int, int] | None = None
    opens: bool = False


Parts = tuple[tuple[Part, ...], ...]
"""A pass by units: what precedes a stack of blocks, every block, what follows them, ... Backward goes from the last to
the first."""


class Trace(NamedTuple):
    """One microbatch on a chunk.

    forward_work, backward_work, weight_work: operations by units; the last of a schedule that splits the backward pass.
    before: bytes that earlier microbatches left. in_flight: of blocks of exchanges that are over, after the forward
    pass. given: gradients with which the backward pass begins. cargo: what comes from the stage before, or goes to the
    next. batch: the batch itself. mapped: outside the allocator.
    """

    forward: Parts
    backward: Parts
    before: int
    in_flight: int
    given: int
    cargo: int
    batch: int
    mapped: int
    forward_work: Units
    backward_work: Units
    weight_work: Units

    @property
    def held(self) -> int:
        """From the forward pass to the backward pass."""
        return self.before + _change(self.forward) - self.in_flight

    @property
    def deferred(self) -> int:
        """From the backward pass to the weights' act, where these are two."""
        return self.held + self.in_flight + _change(self.backward) - 2 * self.given - self.before


def _change(parts: Parts) -> int:
    return sum(part.change for unit in parts for part in unit)


Values = tuple[object, ...]
"""What an op is given, or what it makes."""


class Live(TorchDispatchMode):
    """Bytes of the storages that ops have made and that are still alive.

    workspaces: as in WORKSPACES. heard: every op is reported to it.
    """

    def __init__(self, workspaces: Mapping[OpOverload, Callable[..., int]] | None, heard: Heard | None = None) -> None:
        super().__init__()
        self._heard = heard or Heard()
        self.live = self.peak = 0
        self._workspaces = {id(func): workspace for func, workspace in (workspaces or {}).items()}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Tensors that are counted elsewhere."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, to leave us out of it

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Values = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        kind = _KINDS.get(id(func)) or _KINDS.setdefault(id(func), _kind(func))
        if kind == "written":
            written = kwargs["out"] if "out" in kwargs else args[0]
            self._heard.op(func, args, kwargs, written)
            return written
        if kind == "view":
            return func(*args, **kwargs)
        out = _made(func, args, kwargs)
        self._heard.op(func, args, kwargs, out)
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
"""By the op's id, as below: ops stay, and to hash them takes longer."""


def _kind(func: OpOverload) -> str:
    """What an op's result is: "written" into a tensor that it was given, a "view" of one, or "made"."""
    if func.is_view:
        return "view"
    schema = func._schema
    return "written" if schema.is_mutable and len(schema.returns) == 1 else "made"


class _Made(NamedTuple):
    """A tensor on the meta device, as a key and as a recipe."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_MADE: dict[object, Values] = {}
"""What ops made before: blocks repeat."""


def _made(func: OpOverload, args: Values, kwargs: dict[str, object]) -> object:
    """func(*args, **kwargs), all of it new."""
    key = (id(func), tuple(map(_described, args)), tuple(kwargs.items()))
    made = _MADE.get(key)
    if made is None:
        made = _shrunk(func, key[1], kwargs)
        if made is None:
            out = func(*args, **kwargs)
            made = tuple(map(_described, out if isinstance(out, tuple) else (out,)))
        _MADE[key] = made
    outs = tuple(value.empty() if isinstance(value, _Made) else value for value in made)
    return outs if len(outs) > 1 else outs[0]


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _Made(value.shape, value.stride(), value.dtype)
    return tuple(map(_described, value)) if isinstance(value, list) else value


def _dense(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Made:
    """Without gaps, its dims in the order that `stride` says."""
    dense, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        dense[dim], step = step, step * max(shape[dim], 1)
    return _Made(shape, tuple(dense), dtype)


def _attention(q: _Made, k: _Made, *_: object) -> Values:
    lse, state = (*q.shape[:-1], 1), _dense((), (), torch.int64)
    sums = _dense(lse, (0,) * len(lse), torch.float32)
    return _dense(*q), sums, None, None, q.shape[2], k.shape[2], state, state, None


_ATTENTION: dict[OpOverload, Callable[..., Values]] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: lambda grad, *qkv: tuple(
        _dense(*one) for one in qkv[:3]
    ),
}
"""cuDNN's, which has no kernel for a CPU."""


class _Unknown(Exception):
    """A length whose stand-in does not tell it."""


def _shrunk(func: OpOverload, args: Values, kwargs: dict[str, object]) -> Values | None:
    """What an op makes, by torch's kernels for a CPU, on tensors whose long dims are short; None where that fails.

    The shapes that torch computes for the meta device come out of Python, and import its compiler. A length that is a
    sum of others could be taken for one of them, so two sets of short lengths have to agree.
    """
    if func.overloadpacket is torch.ops.aten.arange:
        return (_described(func(*args, **{**kwargs, "device": "cpu"})),)
    if func in _ATTENTION:
        return _ATTENTION[func](*args)
    if not any(isinstance(value, _Made | tuple) for value in args):
        return None
    try:
        first, second = (_StandIns(*lengths).made(func, args, kwargs) for lengths in ((11, 2), (10, 5)))
    except (RuntimeError, NotImplementedError, IndexError, _Unknown):
        return None
    return first if first == second else None


class _StandIns:
    """Short lengths for long ones: `begin`, `begin + step`, ..."""

    def __init__(self, begin: int, step: int) -> None:
        self._begin, self._step, self._short = begin, step, dict[int, int]()

    def made(self, func: OpOverload, args: Values, kwargs: dict[str, object]) -> Values:
        out = func(*map(self._small, args), **kwargs)
        self._long = {short: length for length, short in self._short.items()}
        return tuple(map(self._large, out if isinstance(out, tuple) else (out,)))

    def _less(self, length: int) -> int:
        return length if length <= 8 else self._short.setdefault(length, self._begin + self._step * len(self._short))

    def _small(self, value: object) -> object:
        if isinstance(value, _Made):
            order = sorted(range(len(value.shape)), key=lambda dim: -value.stride[dim])
            made = torch.zeros([self._less(value.shape[dim]) for dim in order], dtype=value.dtype)
            return made.permute([order.index(dim) for dim in range(len(order))])
        if isinstance(value, tuple):
            return [self._less(one) if isinstance(one, int) else self._small(one) for one in value]
        return value

    def _large(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if any(length > 8 and length not in self._long for length in value.shape):
            raise _Unknown
        return _dense(tuple(self._long.get(length, length) for length in value.shape), value.stride(), value.dtype)


class _Recorder:
    """Cuts what `live` counts into the parts of units, and what `heard` lists into their operations."""

    def __init__(self, live: Live, heard: Heard, units: int) -> None:
        self.live, self.heard, self.units = live, heard, units
        self.begin(0)

    def begin(self, unit: int) -> None:
        """A pass begins, in `unit`."""
        self._parts: list[list[Part]] = [[] for _ in range(self.units)]
        self._work: list[list[Operation]] = [[] for _ in range(self.units)]
        self._working = unit
        self.heard.take()
        self._unit, self._begun = unit, self.live.live
        self.live.peak = self._begun
        self.backward = unit > 0

    def enter(self, unit: int) -> None:
        """What follows is of `unit`."""
        if unit != self._unit:
            self.cut()
            self._unit = unit

    def works(self, unit: int) -> None:
        """Operations that follow are of `unit`."""
        self._work[self._working] += self.heard.take()
        self._working = unit

    def cut(self, weight: tuple[int, int] | None = None, opens: bool = False) -> None:
        live = self.live
        self._parts[self._unit].append(Part(live.peak - self._begun, live.live - self._begun, weight, opens))
        self._begun = live.peak = live.live

    def end(self) -> tuple[Parts, Units]:
        self.cut()
        self.works(self._unit)
        return tuple(map(tuple, self._parts)), tuple(map(tuple, self._work))


def trace(run: RunConfig, chunk: Chunk) -> Trace:
    """One microbatch of a resolved `run` on a chunk."""
    if chunk.kinds:
        return _woven(run, chunk)
    parallel = run.parallel
    key = (
        *(run.model, run.precision, run.memory, run.masking.decoder_seq_length, run.data.reset_attention),
        *(run.runtime.device, run.runtime.ops, run.batch.seq_length, microbatch_rows(run), chunk),
        *(parallel.tp, parallel.cp, parallel.cp_comm, parallel.sequence_parallel, parallel.tp_overlap),
        *(parallel.zero if parallel.zero > 1 else 0, _splits(run)),
    )
    if key not in _FOUND:
        _FOUND[key] = _found(run, chunk)
    return _FOUND[key]


_FOUND: dict[object, Trace] = {}
"""Traces by all of a run that matters to them (`reduced_run`), which takes longer to reduce than to look up."""


PerUnit = TypeVar("PerUnit")
"""What a pass has of one unit."""


def _woven(run: RunConfig, chunk: Chunk) -> Trace:
    """Of blocks of several kinds: each as in a chunk of its kind alone, and so are the ends, with their neighbours."""
    alike = {
        kind: trace(replace(run, model=of_kind(run.model, kind)), chunk._replace(kinds=()))
        for kind in dict.fromkeys(chunk.kinds)
    }
    units = [alike[kind] for kind in (chunk.kinds[0], *chunk.kinds, chunk.kinds[-1])]

    def each(whole: Callable[[Trace], tuple[PerUnit, ...]]) -> tuple[PerUnit, ...]:
        return tuple(whole(found)[number] for number, found in enumerate(units))

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


def _found(run: RunConfig, chunk: Chunk) -> Trace:
    if chunk.before is not None:
        return _traced(*reduced_run(run, chunk), microbatch_rows(run))
    regimes, rows = [list(_regimes(run, count)) for count in chunk.stacks], microbatch_rows(run)
    if len(regimes) > 1 or chunk.blocks < 2 or regimes[0] != [(chunk.blocks, 1)] or not _composable(run):
        short = [[min(count, REPEATS * period + count % period) for count, period in stack] for stack in regimes]
        reduced, stage = reduced_run(run, chunk._replace(stacks=tuple(map(sum, short))))
        if run.memory.recompute_method == "block":
            singly = max(counts[0] for counts in short)
            reduced = variant(reduced, {"recompute_layers": singly})
        return _repeated(_traced(reduced, stage, rows), regimes, short)
    # A chunk with both ends and one with none have the parts of all others.
    whole, bare = (chunk._replace(names=names, stacks=(ENOUGH,)) for names in (tuple(shape(run.model).after), ()))
    begin, end = (
        _traced(*reduced_run(run, whole if name in chunk.names else bare), rows)
        for name in (whole.names[0], whole.names[-1])
    )
    ended = begin._replace(
        forward=(*begin.forward[:-1], end.forward[-1]),
        backward=(*begin.backward[:-1], end.backward[-1]),
        forward_work=(*begin.forward_work[:-1], end.forward_work[-1]),
        backward_work=(*begin.backward_work[:-1], end.backward_work[-1]),
        weight_work=(*begin.weight_work[:-1], end.weight_work[-1]),
        given=end.given,
    )
    return _repeated(ended, regimes, [[ENOUGH]])


def _composable(run: RunConfig) -> bool:
    """Whether what a block keeps is its own: neither blocks of exchanges in flight, nor what its callers hold alone."""
    plain = run.runtime.device == "cpu" or run.runtime.ops == "reference" or run.precision.dtype == "fp64"
    return not (plain or run.parallel.tp_overlap or run.parallel.cp > 1)


def reduced_run(run: RunConfig, chunk: Chunk) -> tuple[RunConfig, int]:
    """A run of which one stage is the chunk, and that stage; its neighbours have a block of each stack that they need.

    It has all that matters to a microbatch but its size, so that layouts which differ elsewhere share their answer.
    """
    if chunk.before is not None:
        stages = [[chunk.before], list(chunk.stacks), [run.model.layers - chunk.before - chunk.blocks]]
        own = stages[1]
        return _staged(run, run.model, [each for each in stages if sum(each) or each is own], chunk.before > 0)
    after = shape(run.model).after
    # The model in order: what follows so many stacks is at an even number, and a stack at an odd one.
    own = [2 * after[name] for name in chunk.names]
    own += [2 * number + 1 for number, count in enumerate(chunk.stacks) if count]
    last = 2 * len(chunk.stacks)
    before = [int(min(own) > 0 and 2 * number + 1 <= min(own)) for number in range(len(chunk.stacks))]
    following = [int(max(own) < last and 2 * number + 1 >= max(own)) for number in range(len(chunk.stacks))]
    stages = [*([before] if any(before) else []), list(chunk.stacks), *([following] if any(following) else [])]
    model = run.model.with_stacks(tuple(sum(counts) for counts in zip(*stages, strict=True)))
    if model.experts:  # of layers without any the model is dense (`of_kind`)
        model = replace(model, experts_from=0, experts_every=1, dense_layers=())
    return _staged(run, model, stages, any(before))


def _staged(
    run: RunConfig, model: ModelConfig, stages: Sequence[Sequence[int]], preceded: bool
) -> tuple[RunConfig, int]:
    """A run of a model in so many stages, of which the first or, where it is preceded, the second is meant."""
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
            tp_overlap=parallel.tp_overlap,
            zero=parallel.zero if parallel.zero > 1 else 0,
            schedule=parallel.schedule if _splits(run) else "1f1b",
        ),
        batch=BatchOptions(seq_length=run.batch.seq_length, micro_batch=1),
        memory=run.memory,
        data=DataConfig(reset_attention=run.data.reset_attention),
        masking=MaskingConfig(decoder_seq_length=run.masking.decoder_seq_length),
        runtime=RuntimeConfig(device=run.runtime.device, ops=run.runtime.ops),
    )
    return resolve(options, parallel.tp * parallel.cp * len(layers)), int(preceded)


def _regimes(run: RunConfig, blocks: int) -> Iterator[tuple[int, int]]:
    """Blocks that are treated alike: how many, and after how many the treatment repeats."""
    memory = run.memory
    if memory.recompute == "full" and memory.recompute_method == "block":
        singly = min(memory.recompute_layers or 0, blocks)
        yield singly, 1
        yield blocks - singly, 1
    else:
        yield blocks, (memory.recompute_layers or 1) if memory.recompute == "full" else 1


def _repeated(found: Trace, regimes: Sequence[Sequence[tuple[int, int]]], short: Sequence[Sequence[int]]) -> Trace:
    """As many blocks of each regime of each stack as it has, of the `short` that were run: the third period as often as
    it takes."""
    units, begin = [0], 1
    for stack, runs in zip(regimes, short, strict=True):
        for (count, period), run in zip(stack, runs, strict=True):
            third, end = begin + 2 * period, begin + min(count, run)
            units += range(begin, min(third, end))
            units += [*range(third, third + period)] * ((count - run) // period)
            units += range(third, end)
            begin += run
        units.append(begin)
        begin += 1
    if units == list(range(begin)):
        return found
    moved_to = {unit: at for at, unit in enumerate(units)}
    between = {0} | {sum(map(sum, short[: number + 1])) + number + 1 for number in range(len(short))}

    def moved(part: Part, by: int) -> Part:
        """A weight of a block is as far away as it was; what lies between stacks is there once."""
        if part.weight is None:
            return part
        unit, number = part.weight
        return part._replace(weight=(moved_to[unit] if unit in between else unit + by, number))

    def whole(parts: Parts) -> Parts:
        return tuple(tuple(moved(part, at - unit) for part in parts[unit]) for at, unit in enumerate(units))

    def listed(work: Units) -> Units:
        return tuple(work[unit] for unit in units)

    return found._replace(
        forward=whole(found.forward),
        backward=whole(found.backward),
        forward_work=listed(found.forward_work),
        backward_work=listed(found.backward_work),
        weight_work=listed(found.weight_work),
    )


@lru_cache(maxsize=1024)
def _traced(run: RunConfig, stage: int, rows: int) -> Trace:
    """Of a run as it is."""
    return _rank(run, stage).trace(rows)


@lru_cache(maxsize=128)
def _rank(run: RunConfig, stage: int) -> _Rank:
    return _Rank(run, stage)


class _Rank:
    """The last tensor and context rank of a stage, on the meta device."""

    def __init__(self, run: RunConfig, stage: int) -> None:
        self.run, parallel = run, run.parallel
        self.mesh, self.chunk = _built(run, stage)
        units = _units(self.chunk)
        own = _distinct_weights(units)
        self.grads = build_grads(variant(run, {"zero": 0}), self.mesh, [self.chunk])
        self.grads.start()
        transport = self.chunk.region.transport
        self.exchanges = transport if isinstance(transport, Imagined) else None
        self.deferred = _splits(run)
        packed = PACKED if run.data.reset_attention else 1.0
        self.heard = Heard(packed=packed)
        self.live = Live(None if run.runtime.device == "cpu" else WORKSPACES, self.heard)
        for bucket in self.grads.buckets:
            self.live.ignore(bucket.weights, bucket.own_grads)
        self.live.ignore(*(weight.data for part in own for weight in part if not weight.requires_grad))
        own = [[weight for weight in part if weight.requires_grad] for part in own]
        if self.exchanges is not None:
            self.live.ignore(self.exchanges.memory)
        self.recorder = _Recorder(self.live, self.heard, len(units))
        # A tied table is looked up first and multiplied with last.
        self.unit_of = {id(w): unit for unit, part in enumerate(units) for module in part for w in weights(module)}
        for unit, modules in enumerate(units):
            for module in modules:
                module.register_forward_pre_hook(partial(_entered, self.recorder, unit))
                module.register_forward_hook(partial(_left, self.recorder, unit))
            for number, weight in enumerate(own[unit] if parallel.zero >= 2 else ()):
                _record_gradient(self.recorder, weight, (unit, number))
        if parallel.zero >= 3:
            self.chunk.with_full_params = lambda unit, run, x: run(x)  # its units add their own last branch

    def trace(self, rows: int) -> Trace:
        """One microbatch. It finds what the one before left of its exchanges."""
        batch = _batch(self.run.model, self.run.batch, self.run.masking, self.run.data, rows, self.mesh.cp.size)
        self.live.ignore(*batch.tensors().values())
        if self.exchanges is not None:
            self._passes(batch)
        return self._passes(batch)

    def _passes(self, batch: Batch) -> Trace:
        live, recorder, exchanges = self.live, self.recorder, self.exchanges
        before, shapes = live.live, self.chunk.cargo(batch)
        with live, observing(self.heard):
            recorder.begin(0)
            cargo: tuple[torch.Tensor, ...] = ()
            if not self.mesh.pp.first:
                cargo = tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s, dtype in shapes)
            scales = torch.empty(len(self.chunk.terms), dtype=torch.float64, device="meta")
            out = self.chunk(batch, *cargo, scales=scales)
            sent = sum(tensor.nbytes for tensor in out.cargo)
            roots = (term.total if term.root is None else term.root for term in out.terms.values())
            outs = (*out.cargo, *roots)
            del out
            forward, forward_work = recorder.end()
            in_flight = exchanges.settle() if exchanges is not None else 0
            recorder.begin(recorder.units - 1)
            if self.deferred:
                self.grads.wgrad.defer()
            given = tuple(torch.empty_like(tensor) for tensor in outs)
            run_backward(outs, given)
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
            given=sum(tensor.nbytes for tensor in given),
            cargo=max(sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes), sent),
            batch=sum(tensor.nbytes for tensor in batch.tensors().values()),
            mapped=exchanges.mapped if exchanges is not None else 0,
            forward_work=forward_work,
            backward_work=backward_work,
            weight_work=weight_work,
        )

    def _put_off(self, deferred: list[DeferredWgrad]) -> Units:
        """Operations of gradients of weights that the backward pass has put off, by the units of the weights."""
        work: list[list[Operation]] = [[] for _ in range(self.recorder.units)]
        for one in deferred:
            run_wgrad([one])
            work[self.unit_of[id(one[0])]] += self.heard.take()
        return tuple(map(tuple, work))


@lru_cache(maxsize=64)
def _batch(
    model: ModelConfig, lengths: BatchConfig, masking: MaskingConfig, data: DataConfig, rows: int, shards: int
) -> Batch:
    """What the last rank of a context axis of `shards` ranks gets of a microbatch."""
    run = resolve(Options(model=model, batch=lengths, masking=masking), 1)
    samples = torch.zeros(rows, dtype=torch.int64)
    batch: Any = synthetic_batch(run, samples, seed=0, documents=data.reset_attention)
    batch = batch.split(shards - 1, shards)
    like = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in batch.tensors().items()}
    return replace(batch, **like)  # type: ignore[no-any-return]


def unit_parameters(run: RunConfig, chunk: Chunk) -> list[list[ParameterSpec]]:
    """The parameters of the last rank of a chunk by units; a tied one once."""
    return _unit_parameters(*reduced_run(run, chunk))


@lru_cache(maxsize=64)
def _unit_parameters(run: RunConfig, stage: int) -> list[list[ParameterSpec]]:
    units = _units(_built(run, stage)[1])
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    specs = [[parameter_spec(weight) for weight in own] for own in _distinct_weights(units)]
    return [[spec._replace(dtype=names[spec.dtype]) for spec in own] for own in specs]


def _built(run: RunConfig, stage: int) -> tuple[Mesh, Any]:
    """The only chunk of a stage's last rank."""
    parallel = run.parallel
    cells = parallel.tp * parallel.cp
    experts = parallel.ep * parallel.etp
    data = experts // gcd(cells, experts)  # the fewest on which the experts can be shared out
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.etp}
    mesh = Mesh.at((stage * data + data - 1) * cells + cells - 1, dp=data, **sizes)
    (chunk,) = build_stages(run, mesh, torch.device("meta"))
    return mesh, chunk


def _units(chunk: nn.Module) -> list[list[nn.Module]]:
    """The modules of a chunk: those before a stack of blocks, every block, those after it, and so on."""
    units = list[list[nn.Module]]([[]])
    for child in chunk.children():
        if isinstance(child, nn.ModuleList):
            units += [[block] for block in child] + [[]]
        else:
            units[-1].append(child)
    return units


def _distinct_weights(units: Sequence[Sequence[nn.Module]]) -> list[list[Weight]]:
    """Those of each unit that no unit before has."""
    seen, found = set[int](), list[list[Weight]]()
    for modules in units:
        own = [weight for module in modules for weight in weights(module) if id(weight) not in seen]
        seen.update(map(id, own))
        found.append(own)
    return found


def _entered(recorder: _Recorder, unit: int, *_: object) -> None:
    """The forward pass of a unit begins. (One that is run once more in a backward pass belongs to that.)"""
    if not recorder.backward:
        recorder.enter(unit)
        recorder.works(unit)


def _left(recorder: _Recorder, unit: int, _: nn.Module, args: object, out: object) -> None:
    """It ends. Its backward pass begins with the gradient of its result, its operations with that of any part of it."""
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


def _record_gradient(recorder: _Recorder, weight: Weight, where: tuple[int, int]) -> None:
    """Cut the backward pass where a weight's gradient begins to be added, and where it is complete."""
    main_grad, waiting = weight.main_grad, weight.uses
    weight.main_grad = None

    def opened(_: Weight) -> None:
        weight.main_grad = main_grad
        recorder.cut(where, opens=True)

    def ready(_: Weight) -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            waiting, weight.main_grad = weight.uses, None
            recorder.cut(where)

    weight.on_main_grad, weight.on_grad_ready = opened, ready
