"""Flat buckets of weights and gradients, and the collectives that reduce the gradients.

A bucket holds the weights of some neighbouring blocks whose gradients are reduced in the same way, as two flat tensors
with the same offsets:

    weights | decayed ....... | not decayed .... | padding |     the model's parameters are views of this
    grads   |                 |                  |         |     gradients accumulate into views of this
            |<- data rank 0 ->|<- data rank 1 ->|  ...           the span of each rank, of equal length (ZeRO)

The module `layout` plans the offsets of the parameters. A bucket's `reduction` determines its collectives. In this
table tp is the tensor axis, and data is the bucket's data axis, whose ranks hold copies of the weights and process
different tokens:

    none of the below        each tensor rank holds its own rows or columns           sum over data
    replicated               every tensor rank computed the same gradient             sum over data
    replicated and partial   each tensor rank had some of the tokens or heads         sum over data, then tp
    stages                   several pipeline stages hold the same tensor             sum over data, then these stages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import nn

from mega.core.ops.autograd import FunctionContext
from mega.core.parallel.collectives import (
    CollectiveHandle,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
    wait_for,
)
from mega.core.parallel.deferred import WgradQueue
from mega.core.parallel.layout import BucketRules, BucketSpec, ParameterSpec, plan_buckets
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.weight import Weight, weights
from mega.core.shard import Shard, span_rectangles


class Bucket:
    """A group of weights whose gradients are reduced in the same way.

    offsets: each weight with its offsets [begin, end) in the flat tensors.
    data: the data axis. span: the range [begin, end) that this rank owns and updates; the whole bucket without ZeRO.
    decay_end: weight decay applies to the weights before this offset. counted: whether norms include this rank's copy.
    axes: axes over which the gradients are summed after `data`. holders: the stages that hold the bucket, as an axis.
    own_weights, own_grads: this rank's span; gradients are valid after `GradBuffer.finish`.
    gathering: the handle of an all-gather of weights in flight, or None.
    """

    def __init__(self, spec: BucketSpec, candidates: Sequence[Weight], mesh: Mesh, *, zero: int, dtype: torch.dtype):
        self.reduction, self.decay_end, self.zero, self.dtype = spec.reduction, spec.decay_end, zero, dtype
        self.offsets = [
            (candidates[number], *offsets) for number, offsets in zip(spec.parameters, spec.offsets, strict=True)
        ]
        self.data = mesh.data_axes[spec.reduction.data]
        first = self.data.axis.index * spec.shard if zero else 0
        self.span = span = (first, first + spec.shard)
        self.holders = mesh.stages(self.reduction.stages)
        self.axes = (*(mesh.axis(name) for name in self.reduction.partial), self.holders)
        self.counted = (not self.replicated or self.data.tensor.first) and self.holders.first
        self.waiting = 0
        self.ready: Counter[int] = Counter()  # id of a weight -> number of gradients computed in this step
        self.works: list[tuple[CollectiveHandle, torch.Tensor]] = []
        self.gathering: CollectiveHandle | None = None
        like = self.offsets[0][0]
        self._weights = torch.zeros(spec.length, dtype=like.dtype, device=like.device)
        for weight, begin, stop in self.offsets:
            self._weights[begin:stop].copy_(weight.detach().flatten())
            weight.data = self._weights[begin:stop].view(weight.shape)
        self._own = self._weights[span[0] : span[1]].clone() if zero >= 3 else None
        self.grads: torch.Tensor | None = None
        self.own_grads: torch.Tensor
        # With ZeRO 0 and 1 the gradients of the whole bucket stay allocated; ZeRO 2 and 3 keep only this rank's span.
        if zero < 2:
            self.open()
            assert self.grads is not None
            self.own_grads = self.grads[span[0] : span[1]]
        else:
            self.own_grads = torch.zeros(span[1] - span[0], dtype=dtype, device=like.device)

    def tied_name(self) -> str:
        """Name of the tied tensor if several stages hold it, otherwise the empty string."""
        return self.offsets[0][0].segments[0].shard.name if self.reduction.stages else ""

    @property
    def replicated(self) -> bool:
        """Whether every tensor rank holds an equal copy of the bucket."""
        return bool(self.reduction.replicated)

    @property
    def weights(self) -> torch.Tensor:
        """All weights of the bucket as one flat tensor. Reading this property waits for an all-gather in flight."""
        self.wait_param_gather()
        return self._weights

    @property
    def own_weights(self) -> torch.Tensor:
        return self._weights[self.span[0] : self.span[1]] if self._own is None else self._own

    @property
    def uses(self) -> int:
        return sum(weight.uses for weight, _, _ in self.offsets)

    def runs(self) -> Iterator[tuple[Shard, slice]]:
        """Yield each logical tensor with the slice of this rank's span that contains the tensor's elements.

        A slice includes vocabulary padding, and may be empty. All ranks that hold the bucket yield the same tensors in
        the same order.
        """
        low, high = self.span
        for shard, first in self._logical():
            begin, end = (min(max(at, low), high) - low for at in (first, first + shard.elements))
            yield shard, slice(begin, end)

    def rectangles(self, flat: torch.Tensor, base: int) -> Iterator[tuple[Shard, tuple[int, ...], torch.Tensor]]:
        """Yield the rectangles of logical tensors in `flat`, whose first element is at offset `base` of the bucket.

        Each rectangle is (shard, start in the whole tensor, view of `flat`). Padding is excluded.

            a flat span of a matrix   . . . x x     first row: a rectangle of one row
                                      x x x x x     whole rows: one rectangle
                                      x x . . .     last row: a rectangle of one row
        """
        for shard, first in self._logical():
            row = prod(shard.local[1:])
            low, high = max(base, first), min(base + flat.numel(), first + shard.elements)
            for start, size in span_rectangles(shard.local, low - first, high - first):
                unpadded = tuple(max(0, min(n, have - at)) for at, n, have in zip(start, size, shard.size, strict=True))
                if not all(unpadded):
                    continue
                offset = first - base + start[0] * row + (start[1] if len(start) > 1 else 0)
                view = flat[offset : offset + prod(size)].view(size)
                for dim, length in enumerate(unpadded):
                    view = view.narrow(dim, 0, length)
                yield shard, tuple(a + b for a, b in zip(shard.start, start, strict=True)), view

    def _logical(self) -> Iterator[tuple[Shard, int]]:
        """Yield the shards of logical tensors in the bucket, each with the shard's offset."""
        for weight, begin, _ in self.offsets:
            for segment in weight.segments:
                yield segment.shard, begin + segment.offset * prod(weight.shape[1:])

    def open(self) -> None:
        """Allocate the gradients of all weights of the bucket."""
        self.grads = torch.zeros(self._weights.numel(), dtype=self.dtype, device=self._weights.device)
        for weight, begin, stop in self.offsets:
            weight.main_grad = self.grads[begin:stop].view(weight.shape)

    def close(self) -> torch.Tensor:
        """Detach the gradients from the weights and return them. The caller then holds the only reference."""
        grads, self.grads = self.grads, None
        assert grads is not None
        for weight, _, _ in self.offsets:
            weight.main_grad = None
        return grads

    def start_param_gather(self, axis: Axis) -> None:
        """Start the all-gather of updated weights, in which each rank sends its span. `wait_param_gather` completes it.

        axis: the ranks of `data`, possibly on a separate communicator.
        """
        own_span = self.own_weights
        # NCCL allows the input to be a view of the output tensor; gloo does not.
        _, self.gathering = start_all_gather(own_span if own_span.is_cuda else own_span.clone(), axis, self._weights)

    def wait_param_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gathering is not None:
            wait_for(self.gathering)
            self.gathering = None

    def start_unshard(self, axis: Axis) -> None:
        """Start the all-gather of the weights if they are sharded (ZeRO 3). axis: as in `start_param_gather`."""
        if self._own is None or self._weights.untyped_storage().size():
            return
        self._weights.untyped_storage().resize_(self._weights.nbytes)
        if axis.size == 1:
            self._weights.copy_(self._own)
        else:
            _, self.gathering = start_all_gather(self._own, axis, self._weights)

    def reshard(self) -> None:
        """Free the gathered weights except this rank's span (ZeRO 3)."""
        if self._own is not None:
            self.wait_param_gather()
            self._weights.untyped_storage().resize_(0)


class GradBuffer:
    """The gradients of one rank's stages, accumulated over microbatches and reduced as soon as they are complete.

    zero: the ZeRO stage, over each bucket's data axis (Rajbhandari et al. 2020):
        0  every rank holds all gradients and updates all weights
        1  each rank owns, and updates, its span of each bucket
        2  as 1, and gradients are reduced and freed after every microbatch, so only this rank's spans stay allocated
        3  as 2, and the weights of a unit are gathered while the previous unit runs, and freed after use

    shared: name of each tensor that several pipeline stages hold -> these stages (`shared_stages`). It must be
    identical on all ranks.
    matrices: whether matrices of layers get separate buckets, because the optimizer updates them as whole matrices.
    before_reduce: called with each bucket when its local gradients are complete, before they are reduced.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        sequence: bool = False,
        shared: Mapping[str, tuple[int, ...]] | None = None,
        zero: int = 0,
        matrices: bool = False,
        bucket_size: int = 40_000_000,
        overlap: bool = True,
        overlap_gather: bool = True,
    ):
        self.mesh, self.dtype, self.zero, self.overlap = mesh, dtype, zero, overlap
        self._claimed: set[int] = set()
        for stages in sorted(set((shared or {}).values())):
            mesh.stages(stages)  # all ranks must create every group, even ranks that do not hold these tensors
        shards = {name: data.axis.size for name, data in mesh.data_axes.items()} if zero else {}
        tensor, least = {axis.name: axis.size for axis in (mesh.tp, mesh.etp)}, bucket_size if zero < 3 else None
        rules = BucketRules(tensor, sequence, shards, least, shared or {}, matrices)
        self.buckets = [
            bucket
            for chunk in chunks
            for unit in (units_of(chunk) if zero >= 3 else [chunk])
            for bucket in self._buckets(unit, rules)
        ]
        self._bucket_of = {id(weight): bucket for bucket in self.buckets for weight, _, _ in bucket.offsets}
        # Stages that share several tensors must reduce them in the same order, or they deadlock.
        self._tied_last = sorted(self.buckets, key=Bucket.tied_name)
        self._final, self.before_reduce = False, _unobserved
        self._reducing: Bucket | None = None
        self.wgrad = WgradQueue(weight for bucket in self.buckets for weight, _, _ in bucket.offsets)
        for bucket in self.buckets:
            for weight, _, _ in bucket.offsets:
                weight.on_grad_ready = self._grad_ready
                weight.on_main_grad = self._open_main_grad if zero >= 2 else None
                weight.register_post_accumulate_grad_hook(_into_main_grad)
            bucket.reshard()
        self._gathered = [bucket for bucket in self.buckets if 0 < zero < 3 and bucket.data.axis.size > 1]
        self._gather_axes = {name: data.axis for name, data in mesh.data_axes.items()}
        self._overlap_gather, self._order = overlap_gather, _Order()
        if zero and overlap_gather and any(data.axis.size > 1 for data in mesh.data_axes.values()):
            # Collectives of one communicator run in order. Weights are gathered on a separate communicator, so that the
            # loss's all-reduce does not wait for all-gathers, and all-gathers do not wait for reductions.
            self._gather_axes = {name: mesh.own_data_axis(name) for name in self._gather_axes}
        if self._gathered and overlap_gather:
            for chunk in chunks:
                for unit in units_of(chunk):
                    unit.register_forward_pre_hook(partial(_wait_param_gather, self.buckets_of(unit)))

    # -- construction

    def _buckets(self, unit: nn.Module, rules: BucketRules) -> Iterator[Bucket]:
        """Yield the buckets of the trainable weights of `unit`, except tied weights that an earlier unit holds."""
        trainable = [weight for weight in weights(unit) if weight.requires_grad and id(weight) not in self._claimed]
        self._claimed.update(map(id, trainable))
        for spec in plan_buckets([parameter_spec(weight) for weight in trainable], rules):
            yield Bucket(spec, trainable, self.mesh, zero=self.zero, dtype=self.dtype)

    # -- the phases of one step

    def start(self) -> None:
        """Begin a step by setting all gradients to zero and marking them as not yet computed."""
        for bucket in self.buckets:
            _clear(bucket)
            bucket.waiting, bucket.works = bucket.uses, []
            bucket.ready.clear()
        if self.zero >= 3 and self._overlap_gather:
            self._order.begin()

    def final(self, last: bool) -> None:
        """Record whether the next backward pass is the last one of its chunk in this step."""
        self._final = last

    def _open_main_grad(self, weight: Weight) -> None:
        """Allocate a bucket's gradients when the first gradient of a microbatch is added (ZeRO 2 and 3)."""
        bucket = self._bucket_of[id(weight)]
        bucket.open()
        bucket.waiting = bucket.uses
        bucket.ready.clear()

    def _grad_ready(self, weight: Weight) -> None:
        if not self._final and self.zero < 2:
            return
        bucket = self._bucket_of[id(weight)]
        bucket.waiting -= 1
        bucket.ready[id(weight)] += 1
        assert bucket.waiting >= 0, f"{weight.segments[0].shard.name}: more gradients than uses"
        if bucket.waiting == 0 and (self.overlap or self.zero >= 2):
            self._launch_grad_reduce(bucket)

    def _launch_grad_reduce(self, bucket: Bucket) -> None:
        """Start the reduction over the bucket's data axis. It runs in parallel with the backward pass."""
        data = bucket.data.axis
        self.before_reduce(bucket)
        if self.zero >= 2:
            _settle(bucket)
            out, work = start_reduce_scatter(bucket.close(), data)
            bucket.works.append((work, out))
            bucket.reshard()
            # At most one reduction is in flight, because a reduction keeps the gradients of its whole bucket alive.
            before, self._reducing = self._reducing, bucket
            if before is not None and before is not bucket:
                _settle(before)
            return
        assert bucket.grads is not None
        if not self.zero:
            bucket.works.append((all_reduce(bucket.grads, data, wait=False), bucket.own_grads))
            return
        # NCCL allows the output to be a view of the input; gloo does not.
        out = bucket.own_grads if bucket.grads.is_cuda else torch.empty_like(bucket.own_grads)
        out, work = start_reduce_scatter(bucket.grads, data, out)
        bucket.works.append((work, out))

    def all_ready(self) -> None:
        """Mark all gradients of this step as complete. A replayed CUDA graph computes gradients without calling
        hooks."""
        for bucket in self.buckets:
            bucket.waiting = 0

    def finish(self) -> None:
        """Finish the step: wait for the reductions over data, then sum over the remaining axes of each bucket.

        Errors: RuntimeError with the names of weights that got no gradient.
        """
        for bucket in self.buckets:
            if bucket.waiting:
                silent = [w.segments[0].shard.name for w, _, _ in bucket.offsets if bucket.ready[id(w)] < w.uses]
                raise RuntimeError(f"{bucket.waiting} gradients never arrived: {', '.join(silent)}")
            if not bucket.works and bucket.grads is not None:
                self._launch_grad_reduce(bucket)
        self.wait_param_gather()
        self._order.end()
        for bucket in self.buckets:
            _settle(bucket)
            bucket.reshard()
        for bucket in self._tied_last:
            for axis in bucket.axes:
                all_reduce(bucket.own_grads, axis)
        self._final = False

    # -- gathering weights: updated spans after a step (ZeRO 1 and 2), whole units during a step (ZeRO 3)

    def start_param_gather(self) -> None:
        """Start the all-gather of the updated spans of all buckets.

        With overlap, the all-gather runs during the next forward pass, in which each unit waits for its own weights.
        Reading `Bucket.weights` also waits for it. Without overlap, this method waits for the all-gather.
        """
        for bucket in self._gathered:
            bucket.start_param_gather(self._gather_axes[bucket.data.name])
        if not self._overlap_gather:
            self.wait_param_gather()

    def wait_param_gather(self) -> None:
        """Wait for all gathers in flight.

        Call this method before dropping the buffer, too. NCCL's group keeps the tensors of a collective alive until a
        wait for that collective, or until the group's next collective.
        """
        for bucket in self.buckets:
            bucket.wait_param_gather()

    def buckets_of(self, unit: nn.Module) -> list[Bucket]:
        """Return the distinct buckets of a unit's trainable weights."""
        buckets = [self._bucket_of[id(weight)] for weight in weights(unit) if weight.requires_grad]
        return list({id(bucket): bucket for bucket in buckets}.values())

    def with_full_params(
        self, unit: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Return run(x), where `run` is the forward pass of `unit`. The unit's weights are gathered for both its
        forward and its backward pass."""
        if self.zero < 3:
            return run(x)
        buckets = self.buckets_of(unit)
        following = self._unshard(buckets)
        y = run(x)
        for bucket in buckets:
            if bucket not in following:
                bucket.reshard()
        return _Return.apply(y, partial(self._unshard, buckets)) if torch.is_grad_enabled() else y

    def _unshard(self, buckets: list[Bucket]) -> list[Bucket]:
        """Gather the weights of a unit, and start to prefetch the weights of the next unit. Return the next unit's
        buckets."""
        for bucket in buckets:
            bucket.start_unshard(self._gather_axes[bucket.data.name])
        for bucket in buckets:
            bucket.wait_param_gather()
        following = self._order.after(buckets)
        for bucket in following:
            bucket.start_unshard(self._gather_axes[bucket.data.name])
        return following

    @property
    def data_ranks(self) -> int:
        """Return the maximum number of ranks over which a gradient is summed."""
        return max(bucket.data.axis.size for bucket in self.buckets)


class _Order:
    """Predicts the order in which a step uses the weights of units, from the order in the previous step."""

    def __init__(self) -> None:
        self._before: list[list[Bucket]] = []
        self._now: list[list[Bucket]] = []
        self._follows = False

    def begin(self) -> None:
        """Begin a step."""
        self._before, self._now, self._follows = self._now, [], True

    def end(self) -> None:
        """End a step. Until the next step begins, for example during an evaluation, nothing is prefetched."""
        self._follows = False

    def after(self, used: list[Bucket]) -> list[Bucket]:
        """Return the buckets that the previous step used after `used`, or an empty list if this step has a different
        order."""
        if not self._follows:
            return []
        position = len(self._now)
        self._now.append(used)
        self._follows = position >= len(self._before) or self._before[position] == used
        return self._before[position + 1] if self._follows and position + 1 < len(self._before) else []


class _Return(torch.autograd.Function):
    """The identity function at the output of a unit. Its backward pass first gathers the unit's weights."""

    @staticmethod
    def forward(
        ctx: FunctionContext[Callable[[], object]], y: torch.Tensor, unshard: Callable[[], object]
    ) -> torch.Tensor:
        ctx.state = unshard
        return y.view_as(y)

    @staticmethod
    def backward(ctx: FunctionContext[Callable[[], object]], grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.state()
        return grad, None


def _wait_param_gather(buckets: list[Bucket], *_: object) -> None:
    """Forward pre-hook that waits for the weights of its unit."""
    for bucket in buckets:
        bucket.wait_param_gather()


def _unobserved(bucket: Bucket) -> None:
    """Do nothing. This function is the default of `before_reduce`."""


def _clear(bucket: Bucket) -> None:
    """Set the gradients to zero. Gradients that the first wgrad GEMM of the step overwrites are only marked."""
    if bucket.grads is None:
        bucket.own_grads.zero_()
        return
    begin = 0
    for weight, first, stop in sorted(bucket.offsets, key=lambda entry: entry[1]):
        weight.unwritten = weight.dim() == 2 and weight.ops.matmuls.overwrites
        if weight.unwritten:
            bucket.grads[begin:first].zero_()
            begin = stop
    bucket.grads[begin:].zero_()


def zero_unwritten(grads: GradBuffer) -> None:
    """Set the gradients to zero that `GradBuffer.start` only marked, because a replayed CUDA graph adds to them."""
    for bucket in grads.buckets:
        for weight, _, _ in bucket.offsets:
            if weight.unwritten:
                weight.open_main_grad()


def _settle(bucket: Bucket) -> None:
    """Wait for the bucket's reductions in flight. Copy their results to this rank's span or, with ZeRO 2 and 3, add the
    results to the span."""
    for work, out in bucket.works:
        wait_for(work)
        if bucket.zero >= 2:
            bucket.own_grads.add_(out)
        elif out.data_ptr() != bucket.own_grads.data_ptr():
            bucket.own_grads.copy_(out)
    bucket.works = []


def units_of(chunk: nn.Module) -> Iterator[nn.Module]:
    """Yield the units of a chunk: its blocks, its embedding and its head. The weights of a unit are gathered
    together."""
    for child in chunk.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def parameter_spec(weight: Weight) -> ParameterSpec:
    """Return the properties of `weight` that determine its bucket."""
    tensors = tuple(segment.shard.tensor for segment in weight.segments)
    return ParameterSpec(tensors, weight.numel(), str(weight.dtype))


def _into_main_grad(parameter: torch.Tensor) -> None:
    """Add the gradient that autograd accumulated (of norms, biases, learned positions) to the bucket's gradients.

    `parameter.grad` is None if a layer has already added the gradient to `main_grad`.
    """
    assert isinstance(parameter, Weight)
    if parameter.grad is None:
        return
    main_grad = parameter.open_main_grad()
    assert main_grad is not None
    main_grad.add_(parameter.grad)
    parameter.grad = None
    for _ in range(parameter.uses):  # autograd has already summed the gradients of all uses
        parameter.grad_ready()
