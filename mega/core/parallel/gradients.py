"""Flat buckets of weights and their gradients, and the reductions that make a gradient whole.

A bucket holds the weights of some neighbouring blocks whose gradients reduce alike, as two flat tensors of the same
coordinates:

    weights | decayed ....... | not decayed .... | padding |     the model's parameters are views of this
    grads   |                 |                  |         |     gradients accumulate into views of this
            |<- rank 0 of data ->|<- rank 1 ->|  ...             own spans, equal for all (ZeRO)

What a bucket's gradients need, by kind (tp: the tensor axis; data: every rank that sees other tokens):

    cut      each tensor rank holds its own rows or columns           sum over data
    whole    every tensor rank computed the same gradient             sum over data
    partial  every tensor rank saw a part of the tokens or heads      sum over data, then tp
    tied     first and last stage hold the same tensor                sum over data, then the two ends

A tied tensor has a bucket of its own, of the same length and cut on both holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from mega.core.parallel.collectives import all_gather, all_reduce, start_all_gather, start_reduce_scatter
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.weight import Weight, weights
from mega.core.shard import Shard, span_rectangles

Kind = Literal["cut", "whole", "partial", "tied"]

Product = tuple[Weight, Any, torch.Tensor]
"""A weight's gradient that is still to be computed: the weight, the output's gradient as its products prepare it, the
input."""

ALIGNMENT = 64
"""Elements at which every weight starts, so that kernels read whole cache lines."""


class Bucket:
    """Some weights of one kind. `places` holds each weight's [begin, end) in the flat tensors.

    span: the part this rank owns and updates; the whole bucket where nothing is shared out.
    decay_end: weights before it decay, the rest do not. counted: whether this rank's copy enters norms.
    axes: along which reduced gradients are still to be added up.
    own_weights, own_grads: our span; gradients are valid after `GradBuffer.finish`.
    arriving: the handle of weights that are on their way from other ranks, if any are.
    """

    def __init__(
        self,
        kind: Kind,
        places: list[tuple[Weight, int, int]],
        length: int,
        span: tuple[int, int],
        decay_end: int,
        *,
        counted: bool,
        axes: tuple[Axis, ...],
        zero: int,
        dtype: torch.dtype,
    ):
        self.kind, self.places, self.span, self.decay_end = kind, places, span, decay_end
        self.counted, self.axes, self.zero, self.dtype = counted, axes, zero, dtype
        self.waiting = 0
        self.came: Counter[int] = Counter()  # id of a weight -> gradients of this step that arrived
        self.works: list[tuple[Any, torch.Tensor]] = []
        self.arriving: Any = None
        first = places[0][0]
        self._weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        for weight, begin, stop in places:
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
            self.own_grads = torch.zeros(span[1] - span[0], dtype=dtype, device=first.device)

    @property
    def weights(self) -> torch.Tensor:
        """All our weights; waits for those that are on their way."""
        self.arrive()
        return self._weights

    @property
    def own_weights(self) -> torch.Tensor:
        return self._weights[self.span[0] : self.span[1]] if self._own is None else self._own

    @property
    def uses(self) -> int:
        return sum(weight.uses for weight, _, _ in self.places)

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
        for weight, begin, _ in self.places:
            for slot in weight.slots:
                yield slot.shard, begin + slot.offset * prod(weight.shape[1:])

    def open(self) -> None:
        """Make room for the gradients of all our weights."""
        self.grads = torch.zeros(self._weights.numel(), dtype=self.dtype, device=self._weights.device)
        for weight, begin, stop in self.places:
            weight.sink = self.grads[begin:stop].view(weight.shape)

    def close(self) -> torch.Tensor:
        """Take the gradients out of the weights' sight; the memory goes when the caller lets go of them."""
        grads, self.grads = self.grads, None
        assert grads is not None
        for weight, _, _ in self.places:
            weight.sink = None
        return grads

    def share(self, axis: Axis) -> None:
        """Send our span of the weights to all ranks of the axis and take theirs, until `arrive`."""
        own = self.own_weights
        # NCCL may gather into the tensor that its own part is a view of; gloo may not.
        _, self.arriving = start_all_gather(own if own.is_cuda else own.clone(), axis, self._weights)

    def arrive(self) -> None:
        """Wait for the weights that are on their way."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None

    def gather(self, axis: Axis) -> None:
        """Bring back weights that only their owners keep."""
        if self._own is not None and not self._weights.untyped_storage().size():
            self._weights.untyped_storage().resize_(self._weights.numel() * self._weights.element_size())
            self._weights.copy_(all_gather(self._own, axis))

    def forget(self) -> None:
        """Keep our span of the weights only."""
        if self._own is not None:
            self._weights.untyped_storage().resize_(0)


class GradBuffer:
    """The gradients of one rank's stages, accumulated over microbatches and reduced as soon as they are complete.

    zero, over the data axis (Rajbhandari et al. 2020):
        0  every rank has everything
        1  a rank owns, and updates, its span of each bucket
        2  also: gradients are reduced and let go with every microbatch, so only spans accumulate
        3  also: weights are gathered when a unit of the model runs, and let go behind it
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        sequence: bool = False,
        zero: int = 0,
        bucket_size: int = 40_000_000,
        overlap: bool = True,
        overlap_gather: bool = True,
    ):
        self.mesh, self.dtype, self.zero, self.overlap = mesh, dtype, zero, overlap
        self.sequence = sequence and mesh.tp.size > 1
        self._claimed: set[int] = set()
        self.buckets = [
            self._bucket(kind, group)
            for chunk in chunks
            for unit in (_units(chunk) if zero >= 3 else [chunk])
            for kind, group in self._groups(unit, bucket_size)
        ]
        self._home = {id(weight): bucket for bucket in self.buckets for weight, _, _ in bucket.places}
        self._final = False
        self._leaving: Bucket | None = None
        self._held: list[Product] = []
        for bucket in self.buckets:
            for weight, _, _ in bucket.places:
                weight.on_arrival = self._arrived
                weight.on_need = self._need if zero >= 2 else None
                weight.register_post_accumulate_grad_hook(_into_sink)
            bucket.forget()
        self._shared, self._overlap_gather = 0 < zero < 3 and mesh.data.size > 1, overlap_gather
        self._road = mesh.data
        if self._shared and overlap_gather:
            # The loss's few numbers are added up meanwhile, and must not queue behind the weights.
            self._road = mesh.channel("weights", "cp", "dp")
            for chunk in chunks:
                for unit in _units(chunk):
                    unit.register_forward_pre_hook(partial(_arrive, self._homes(unit)))

    # -- construction

    def _kind(self, weight: Weight) -> Kind:
        tensor = weight.slots[0].shard.tensor
        if len(tensor.places) > 1 and self.mesh.pp.size > 1:
            return "tied"
        if self.mesh.tp.size == 1 or tensor.cut is not None:
            return "cut"
        if "tp" in tensor.partial or ("sequence" in tensor.partial and self.sequence):
            return "partial"
        return "whole"

    def _groups(self, unit: nn.Module, least: int) -> Iterator[tuple[Kind, list[Weight]]]:
        """Neighbouring weights of one kind and dtype, at least `least` elements where there are as many."""
        open_groups: dict[tuple[Kind, torch.dtype], list[Weight]] = {}
        for weight in weights(unit):
            if id(weight) in self._claimed:  # a tied tensor of two chunks or units of one rank
                continue
            self._claimed.add(id(weight))
            kind = self._kind(weight)
            group = open_groups.setdefault((kind, weight.dtype), [])
            group.append(weight)
            if kind == "tied" or (sum(w.numel() for w in group) >= least and self.zero < 3):
                yield kind, open_groups.pop((kind, weight.dtype))
        for (kind, _), group in open_groups.items():
            yield kind, group

    def _bucket(self, kind: Kind, group: list[Weight]) -> Bucket:
        decays = [w for w in group if w.slots[0].shard.tensor.decays]
        rest = [w for w in group if not w.slots[0].shard.tensor.decays]
        places, end, decay_end = [], 0, 0
        for weight in decays + rest:
            places.append((weight, end, end + weight.numel()))
            end = _up(end + weight.numel(), ALIGNMENT)
            if len(places) <= len(decays):
                decay_end = end
        shares = self.mesh.data.size if self.zero else 1
        length = _up(end, shares * ALIGNMENT)
        share = length // shares
        first = self.mesh.data.index * share if self.zero else 0
        tensor_rank = kind in ("cut", "tied") or self.mesh.tp.first
        holder = kind != "tied" or self.mesh.ends.first
        axes = {"partial": (self.mesh.tp,), "tied": (self.mesh.ends,)}.get(kind, ())
        return Bucket(
            kind,
            places,
            length,
            (first, first + share),
            decay_end,
            counted=tensor_rank and holder,
            axes=axes,
            zero=self.zero,
            dtype=self.dtype,
        )

    # -- one step

    def start(self) -> None:
        """Begin a step: no gradient has arrived."""
        for bucket in self.buckets:
            (bucket.own_grads if bucket.grads is None else bucket.grads).zero_()
            bucket.waiting, bucket.works = bucket.uses, []
            bucket.came.clear()

    def final(self, last: bool) -> None:
        """Say whether the backward pass that follows is the last of its chunk in this step."""
        self._final = last

    def hold(self) -> None:
        """From here on keep weight products instead of computing them (a backward pass for inputs only)."""
        self._held = []
        self._route(self._hold)

    def release(self) -> list[Product]:
        """The products kept since `hold`; products are computed at once again."""
        self._route(None)
        held, self._held = self._held, []
        return held

    def _route(self, products: Callable[[Weight, Any, torch.Tensor], None] | None) -> None:
        for bucket in self.buckets:
            for weight, _, _ in bucket.places:
                weight.on_product = products

    def _hold(self, weight: Weight, grad: Any, x: torch.Tensor) -> None:
        self._held.append((weight, grad, x))

    def compute(self, products: list[Product]) -> None:
        """Compute kept products, as the weight's act of a plan."""
        with torch.no_grad():
            for weight, grad, x in products:
                weight.add_product(grad, x)

    def _need(self, weight: Weight) -> None:
        """The first gradient of a microbatch finds no room."""
        bucket = self._home[id(weight)]
        bucket.open()
        bucket.waiting = bucket.uses
        bucket.came.clear()

    def _arrived(self, weight: Weight) -> None:
        if not self._final and self.zero < 2:
            return
        bucket = self._home[id(weight)]
        bucket.waiting -= 1
        bucket.came[id(weight)] += 1
        assert bucket.waiting >= 0, f"{weight.slots[0].shard.name}: more gradients than uses"
        if bucket.waiting == 0 and (self.overlap or self.zero >= 2):
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        """Start the sum over data; the backward pass goes on meanwhile."""
        data = self.mesh.data
        if self.zero >= 2:
            _settle(bucket)
            out, work = start_reduce_scatter(bucket.close(), data)
            bucket.works.append((work, out))
            bucket.forget()
            # A sum on its way holds the whole bucket's gradients, so only one is.
            before, self._leaving = self._leaving, bucket
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

    def all_arrived(self) -> None:
        """Every gradient of this step is in its place, though nobody told of each: the device did it by itself."""
        for bucket in self.buckets:
            bucket.waiting = 0

    def finish(self) -> None:
        """Wait for the sums over data, then add up what is still partial. Errors name a weight without gradient."""
        for bucket in self.buckets:
            if bucket.waiting:
                silent = [w.slots[0].shard.name for w, _, _ in bucket.places if bucket.came[id(w)] < w.uses]
                raise RuntimeError(f"{bucket.waiting} gradients never arrived: {', '.join(silent)}")
            if not bucket.works and bucket.grads is not None:
                self._leave(bucket)
        self.arrive()
        for bucket in self.buckets:
            _settle(bucket)
            for axis in bucket.axes:
                all_reduce(bucket.own_grads, axis)
        self._final = False

    # -- weights that travel: updated spans (zero 1 and 2), units that come and go (zero 3)

    def share_weights(self) -> None:
        """Send updated spans to every rank. With overlap they arrive while the next forward pass runs, where each unit
        of the model waits for its own; whoever asks a bucket for its weights waits too."""
        if not self._shared:
            return
        for bucket in self.buckets:
            bucket.share(self._road)
        if not self._overlap_gather:
            self.arrive()

    def arrive(self) -> None:
        """Wait for all weights that are on their way. Due before a buffer is thrown away, too: NCCL's group holds the
        tensors of an exchange that nobody waited for until the next one on the same group."""
        for bucket in self.buckets:
            bucket.arrive()

    def _homes(self, unit: nn.Module) -> list[Bucket]:
        """The distinct buckets of a unit's weights."""
        return list({id(home): home for home in (self._home[id(weight)] for weight in weights(unit))}.values())

    def around(self, unit: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """run(x), a unit of the model on tensors, with its weights here while it runs, forward and backward."""
        if self.zero < 3:
            return run(x)
        buckets = self._homes(unit)
        for bucket in buckets:
            bucket.gather(self.mesh.data)
        y = run(x)
        for bucket in buckets:
            bucket.forget()
        return _Return.apply(y, buckets, self.mesh.data) if torch.is_grad_enabled() else y

    def square_sum(self, *, weights: bool = False) -> torch.Tensor:
        """Sum of squares of this rank's counted gradients, or weights, in max(fp32, the gradients' dtype)."""
        wide = torch.promote_types(self.dtype, torch.float32)
        counted = [bucket.own_weights if weights else bucket.own_grads for bucket in self.buckets if bucket.counted]
        if not counted:
            return torch.zeros((), dtype=wide, device=self.buckets[0].own_grads.device)
        norms = [torch.linalg.vector_norm(grads, dtype=wide) for grads in counted]
        return torch.stack(norms).square().sum()

    def zeros(self) -> torch.Tensor:
        """[zeros, elements] among this rank's counted gradients, float64 [2]; padding is none of them."""
        counts = torch.zeros(2, dtype=torch.float64, device=self.buckets[0].own_grads.device)
        for bucket in self.buckets:
            if bucket.counted:
                for _, _, grads in bucket.rectangles(bucket.own_grads, bucket.span[0]):
                    counts += torch.stack([(grads == 0).sum(), counts.new_tensor(grads.numel())])
        return counts

    def whole_sums(self, bucket: Bucket, sums: torch.Tensor) -> torch.Tensor:
        """Sums over whole logical tensors, from what each rank of the stage has summed over its span of `bucket`.

        Where tensor ranks hold copies, the first one's count. Both ends of a tied tensor get the first end's bits.
        """
        whole = sums.to(bucket.own_weights.device)
        if bucket.kind not in ("cut", "tied") and not self.mesh.tp.first:
            whole = torch.zeros_like(whole)
        all_reduce(whole, self.mesh.stage if self.zero else self.mesh.tp)
        if bucket.kind == "tied":
            if not self.mesh.ends.first:
                whole = torch.zeros_like(whole)
            all_reduce(whole, self.mesh.ends)
        return whole.to(sums.device)

    @property
    def norm_axis(self) -> Axis:
        """The ranks whose square sums add up to the whole model's."""
        return self.mesh.everyone if self.zero else self.mesh.model


class _Return(torch.autograd.Function):
    """Behind a unit: when its backward pass begins, its weights are brought back."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, buckets: list[Bucket], axis: Axis) -> torch.Tensor:
        ctx.buckets, ctx.axis = buckets, axis
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        for bucket in ctx.buckets:
            bucket.gather(ctx.axis)
        return grad, None, None


def _arrive(buckets: list[Bucket], *_: Any) -> None:
    """In front of a unit's forward pass: its weights are here."""
    for bucket in buckets:
        bucket.arrive()


def _settle(bucket: Bucket) -> None:
    """Wait for sums on their way and bring them to the span; under zero 2 add them to what it has."""
    for work, out in bucket.works:
        work.wait()
        if bucket.zero >= 2:
            bucket.own_grads.add_(out)
        elif out.data_ptr() != bucket.own_grads.data_ptr():
            bucket.own_grads.copy_(out)
    bucket.works = []


def _units(chunk: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: every block by itself, the embedding, the head."""
    for child in chunk.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _into_sink(parameter: torch.Tensor) -> None:
    """Move what autograd accumulated (norms, biases, positions) into the bucket.

    The hook is called with no gradient where a layer has put it into the sink by itself.
    """
    assert isinstance(parameter, Weight)
    if parameter.grad is None:
        return
    sink = parameter.open_sink()
    assert sink is not None
    sink.add_(parameter.grad)
    parameter.grad = None
    for _ in range(parameter.uses):  # autograd has added them up
        parameter.arrived()
