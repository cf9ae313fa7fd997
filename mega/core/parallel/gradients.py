"""Flat buckets of weights and their gradients, and the reductions that make a gradient whole.

A bucket holds the weights of some neighbouring blocks whose gradients reduce alike, as two flat tensors of the same
coordinates:

    weights | decayed ....... | not decayed .... | padding |     the model's parameters are views of this
    grads   |                 |                  |         |     gradients accumulate into views of this
            |<- rank 0 of data ->|<- rank 1 ->|  ...             own spans, equal for all (ZeRO)

Which parameters lie where is planned as data (layout.py). What a bucket's gradients need, by its reduction (tp: the
tensor axis; data: the bucket's data axis, ranks that hold copies of its weights and see other tokens):

    nothing more             each tensor rank holds its own rows or columns           sum over data
    replicated               every tensor rank computed the same gradient             sum over data
    replicated and partial   every tensor rank saw a part of the tokens or heads      sum over data, then tp
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
    """Some weights whose gradients reduce alike. `offsets` holds each weight's [begin, end) in the flat tensors.

    data: its data axis. span: the part this rank owns and updates; the whole bucket where nothing is shared out.
    decay_end: weights before it decay, the rest do not. counted: whether this rank's copy enters norms.
    axes: along which reduced gradients are still to be added up. holders: the stages of our pipeline that hold it.
    own_weights, own_grads: our span; gradients are valid after `GradBuffer.finish`.
    gathering: the handle of weights that are on their way from other ranks, if any are.
    """

    def __init__(self, spec: BucketSpec, held: Sequence[Weight], mesh: Mesh, *, zero: int, dtype: torch.dtype):
        self.reduction, self.decay_end, self.zero, self.dtype = spec.reduction, spec.decay_end, zero, dtype
        self.offsets = [(held[number], *at) for number, at in zip(spec.parameters, spec.offsets, strict=True)]
        self.data = mesh.data_axes[spec.reduction.data]
        first = self.data.axis.index * spec.shard if zero else 0
        self.span = span = (first, first + spec.shard)
        self.holders = mesh.stages(self.reduction.stages)
        self.axes = (*(mesh.axis(name) for name in self.reduction.partial), self.holders)
        self.counted = (not self.replicated or self.data.tensor.first) and self.holders.first
        self.waiting = 0
        self.ready: Counter[int] = Counter()  # id of a weight -> gradients of this step that arrived
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
        if zero < 2:
            self.open()
            assert self.grads is not None
            self.own_grads = self.grads[span[0] : span[1]]
        else:
            self.own_grads = torch.zeros(span[1] - span[0], dtype=dtype, device=like.device)

    def tied_name(self) -> str:
        """Name of the tensor, if several stages hold it, else nothing."""
        return self.offsets[0][0].segments[0].shard.name if self.reduction.stages else ""

    @property
    def replicated(self) -> bool:
        """Whether every tensor rank holds an equal copy."""
        return bool(self.reduction.replicated)

    @property
    def weights(self) -> torch.Tensor:
        """All our weights; waits for those that are on their way."""
        self.wait_param_gather()
        return self._weights

    @property
    def own_weights(self) -> torch.Tensor:
        return self._weights[self.span[0] : self.span[1]] if self._own is None else self._own

    @property
    def uses(self) -> int:
        return sum(weight.uses for weight, _, _ in self.offsets)

    def runs(self) -> Iterator[tuple[Shard, slice]]:
        """Every logical tensor's elements in our span, as a slice of it (vocabulary padding included, may be empty).

        All ranks that hold the bucket name the same tensors in the same order.
        """
        low, high = self.span
        for shard, first in self._logical():
            begin, end = (min(max(at, low), high) - low for at in (first, first + shard.elements))
            yield shard, slice(begin, end)

    def rectangles(self, flat: torch.Tensor, base: int) -> Iterator[tuple[Shard, tuple[int, ...], torch.Tensor]]:
        """What `flat`, whose first element is number `base` of the bucket, holds of logical tensors.

        Rectangles as (shard, where it starts in the whole, view of `flat`); padding is left out.
        """
        for shard, first in self._logical():
            row = prod(shard.local[1:])
            low, high = max(base, first), min(base + flat.numel(), first + shard.elements)
            for start, size in span_rectangles(shard.local, low - first, high - first):
                real = tuple(max(0, min(n, have - at)) for at, n, have in zip(start, size, shard.size, strict=True))
                if not all(real):
                    continue
                offset = first - base + start[0] * row + (start[1] if len(start) > 1 else 0)
                view = flat[offset : offset + prod(size)].view(size)
                for dim, length in enumerate(real):
                    view = view.narrow(dim, 0, length)
                yield shard, tuple(a + b for a, b in zip(shard.start, start, strict=True)), view

    def _logical(self) -> Iterator[tuple[Shard, int]]:
        """The blocks of logical tensors that weights hold, and where in the bucket each begins."""
        for weight, begin, _ in self.offsets:
            for segment in weight.segments:
                yield segment.shard, begin + segment.offset * prod(weight.shape[1:])

    def open(self) -> None:
        """Make room for the gradients of all our weights."""
        self.grads = torch.zeros(self._weights.numel(), dtype=self.dtype, device=self._weights.device)
        for weight, begin, stop in self.offsets:
            weight.main_grad = self.grads[begin:stop].view(weight.shape)

    def close(self) -> torch.Tensor:
        """Take the gradients out of the weights' sight; the memory goes when the caller lets go of them."""
        grads, self.grads = self.grads, None
        assert grads is not None
        for weight, _, _ in self.offsets:
            weight.main_grad = None
        return grads

    def start_param_gather(self, axis: Axis) -> None:
        """Send our span of the weights to all ranks of the axis, which is that of `data` on a communicator of its own
        or not, and take theirs, until `wait_param_gather`."""
        own = self.own_weights
        # NCCL may gather into the tensor that its own part is a view of; gloo may not.
        _, self.gathering = start_all_gather(own if own.is_cuda else own.clone(), axis, self._weights)

    def wait_param_gather(self) -> None:
        """Wait for the weights that are on their way."""
        if self.gathering is not None:
            wait_for(self.gathering)
            self.gathering = None

    def start_unshard(self, axis: Axis) -> None:
        """Send for weights that only their owners keep, unless they are here; axis: as of `start_param_gather`."""
        if self._own is None or self._weights.untyped_storage().size():
            return
        self._weights.untyped_storage().resize_(self._weights.nbytes)
        if axis.size == 1:
            self._weights.copy_(self._own)
        else:
            _, self.gathering = start_all_gather(self._own, axis, self._weights)

    def reshard(self) -> None:
        """Keep our span of the weights only."""
        if self._own is not None:
            self.wait_param_gather()
            self._weights.untyped_storage().resize_(0)


class GradBuffer:
    """The gradients of one rank's stages, accumulated over microbatches and reduced as soon as they are complete.

    zero, over each bucket's data axis (Rajbhandari et al. 2020):
        0  every rank has everything
        1  a rank owns, and updates, its span of each bucket
        2  also: gradients are reduced and let go with every microbatch, so only spans accumulate
        3  also: weights are gathered for a unit of the model, while the one before it runs, and let go after it

    shared: name of every tensor that several pipeline stages hold -> these stages (`shared_stages`); all ranks give the
    same. matrices: those of layers lie in buckets of their own, as they are updated whole. before_reduce: is called
    with a bucket whose gradients are complete here, and not yet added up.
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
            mesh.stages(stages)  # groups are made by all ranks, those that hold none of these tensors too
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
        # Stages that share several tensors must add them up in one order.
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
            # The loss's few numbers are added up meanwhile, and must not queue after the weights; nor may the weights
            # of a unit queue after the gradients of another one.
            self._gather_axes = {name: mesh.own_data_axis(name) for name in self._gather_axes}
        if self._gathered and overlap_gather:
            for chunk in chunks:
                for unit in units_of(chunk):
                    unit.register_forward_pre_hook(partial(_wait_param_gather, self.buckets_of(unit)))

    # -- construction

    def _buckets(self, unit: nn.Module, rules: BucketRules) -> Iterator[Bucket]:
        """Those of the trainable weights of `unit` that no other unit of this rank has had before (tied ones)."""
        held = [weight for weight in weights(unit) if weight.requires_grad and id(weight) not in self._claimed]
        self._claimed.update(map(id, held))
        for spec in plan_buckets([parameter_spec(weight) for weight in held], rules):
            yield Bucket(spec, held, self.mesh, zero=self.zero, dtype=self.dtype)

    # -- one step

    def start(self) -> None:
        """Begin a step: no gradient has arrived."""
        for bucket in self.buckets:
            (bucket.own_grads if bucket.grads is None else bucket.grads).zero_()
            bucket.waiting, bucket.works = bucket.uses, []
            bucket.ready.clear()
        if self.zero >= 3 and self._overlap_gather:
            self._order.begin()

    def final(self, last: bool) -> None:
        """Say whether the backward pass that follows is the last of its chunk in this step."""
        self._final = last

    def _open_main_grad(self, weight: Weight) -> None:
        """The first gradient of a microbatch finds no room."""
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
        """Start the sum over the bucket's data axis; the backward pass continues meanwhile."""
        data = bucket.data.axis
        self.before_reduce(bucket)
        if self.zero >= 2:
            _settle(bucket)
            out, work = start_reduce_scatter(bucket.close(), data)
            bucket.works.append((work, out))
            bucket.reshard()
            # A sum on its way holds the whole bucket's gradients, so only one is.
            before, self._reducing = self._reducing, bucket
            if before is not None and before is not bucket:
                _settle(before)
            return
        assert bucket.grads is not None
        if not self.zero:
            bucket.works.append((all_reduce(bucket.grads, data, wait=False), bucket.own_grads))
            return
        # NCCL may reduce into a part of its own input; gloo may not.
        out = bucket.own_grads if bucket.grads.is_cuda else torch.empty_like(bucket.own_grads)
        out, work = start_reduce_scatter(bucket.grads, data, out)
        bucket.works.append((work, out))

    def all_ready(self) -> None:
        """Every gradient of this step is in its place, though none was reported: the device did it on its own."""
        for bucket in self.buckets:
            bucket.waiting = 0

    def finish(self) -> None:
        """Wait for the sums over data, then add up what is still partial. Errors name a weight without gradient."""
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

    # -- weights that travel: updated spans (zero 1 and 2), units that come and go (zero 3)

    def start_param_gather(self) -> None:
        """Send updated spans to every rank. With overlap they arrive while the next forward pass runs, where each unit
        of the model waits for its own; reading a bucket's weights waits too."""
        for bucket in self._gathered:
            bucket.start_param_gather(self._gather_axes[bucket.data.name])
        if not self._overlap_gather:
            self.wait_param_gather()

    def wait_param_gather(self) -> None:
        """Wait for all weights that are on their way. Due before a buffer is thrown away, too: NCCL's group holds the
        tensors of an exchange that was not waited for until the next one on the same group."""
        for bucket in self.buckets:
            bucket.wait_param_gather()

    def buckets_of(self, unit: nn.Module) -> list[Bucket]:
        """The distinct buckets of a unit's trainable weights."""
        held = [self._bucket_of[id(weight)] for weight in weights(unit) if weight.requires_grad]
        return list({id(home): home for home in held}.values())

    def with_full_params(
        self, unit: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """run(x), a unit of the model on tensors, with its weights here while it runs, forward and backward."""
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
        """Bring the weights of a unit here, and send for those that are wanted next, which are returned."""
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
        """The most ranks over which any gradient is summed."""
        return max(bucket.data.axis.size for bucket in self.buckets)


class _Order:
    """In which order a step wants the weights of units. Whatever the schedule, the step before has shown it."""

    def __init__(self) -> None:
        self._before: list[list[Bucket]] = []
        self._now: list[list[Bucket]] = []
        self._follows = False

    def begin(self) -> None:
        """A step begins."""
        self._before, self._now, self._follows = self._now, [], True

    def end(self) -> None:
        """What is used until the next step, as by an evaluation, has no order."""
        self._follows = False

    def after(self, used: list[Bucket]) -> list[Bucket]:
        """The buckets of the unit that the step before used after this one; none where it went another way."""
        if not self._follows:
            return []
        at = len(self._now)
        self._now.append(used)
        self._follows = at >= len(self._before) or self._before[at] == used
        return self._before[at + 1] if self._follows and at + 1 < len(self._before) else []


class _Return(torch.autograd.Function):
    """After a unit: when its backward pass begins, its weights are gathered again."""

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
    """In front of a unit's forward pass: its weights are here."""
    for bucket in buckets:
        bucket.wait_param_gather()


def _unobserved(bucket: Bucket) -> None:
    """Nobody looks at gradients before they are reduced."""


def _settle(bucket: Bucket) -> None:
    """Wait for sums on their way and bring them to the span; under zero 2 add them to what it has."""
    for work, out in bucket.works:
        wait_for(work)
        if bucket.zero >= 2:
            bucket.own_grads.add_(out)
        elif out.data_ptr() != bucket.own_grads.data_ptr():
            bucket.own_grads.copy_(out)
    bucket.works = []


def units_of(chunk: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: every block on its own, the embedding, the head."""
    for child in chunk.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def parameter_spec(weight: Weight) -> ParameterSpec:
    """What decides where `weight` lies."""
    tensors = tuple(segment.shard.tensor for segment in weight.segments)
    return ParameterSpec(tensors, weight.numel(), str(weight.dtype))


def _into_main_grad(parameter: torch.Tensor) -> None:
    """Move what autograd accumulated (norms, biases, positions) into the bucket.

    The hook is called with no gradient where a layer has added it to `main_grad` itself.
    """
    assert isinstance(parameter, Weight)
    if parameter.grad is None:
        return
    main_grad = parameter.open_main_grad()
    assert main_grad is not None
    main_grad.add_(parameter.grad)
    parameter.grad = None
    for _ in range(parameter.uses):  # autograd has added them up
        parameter.grad_ready()
