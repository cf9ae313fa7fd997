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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from mega.core.parallel.collectives import all_reduce, start_reduce_scatter
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.weight import Weight, weights

Kind = Literal["cut", "whole", "partial", "tied"]

ALIGNMENT = 64
"""Elements at which every weight starts, so that kernels read whole cache lines."""


@dataclass
class Bucket:
    """Some weights of one kind. `places` holds each weight's [begin, end) in the flat tensors.

    span: the part this rank owns and updates; the whole bucket where nothing is shared out.
    decay_end: weights before it decay, the rest do not. counted: whether this rank's copy enters norms.
    own_grads: reduced gradients of the span, valid after `GradBuffer.finish`.
    """

    kind: Kind
    places: list[tuple[Weight, int, int]]
    weights: torch.Tensor
    grads: torch.Tensor
    span: tuple[int, int]
    decay_end: int
    counted: bool
    axes: tuple[Axis, ...]
    waiting: int = 0
    work: Any = None
    own_grads: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.own_grads = self.grads[self.span[0] : self.span[1]]

    @property
    def own_weights(self) -> torch.Tensor:
        return self.weights[self.span[0] : self.span[1]]

    @property
    def uses(self) -> int:
        return sum(weight.uses for weight, _, _ in self.places)


class GradBuffer:
    """The gradients of one rank's stages, accumulated over microbatches and reduced as soon as they are complete.

    zero: 0 leaves every rank all gradients; from 1 on a rank owns its span of each bucket only.
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
    ):
        self.mesh, self.dtype, self.zero, self.overlap = mesh, dtype, zero, overlap
        self.sequence = sequence and mesh.tp.size > 1
        self._claimed: set[int] = set()
        self.buckets = [
            self._bucket(kind, group) for chunk in chunks for kind, group in self._groups(chunk, bucket_size)
        ]
        self._home = {id(weight): bucket for bucket in self.buckets for weight, _, _ in bucket.places}
        self._final = False
        for bucket in self.buckets:
            for weight, _, _ in bucket.places:
                weight.on_arrival = self._arrived
                weight.register_post_accumulate_grad_hook(_into_sink)

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

    def _groups(self, chunk: nn.Module, least: int) -> Iterator[tuple[Kind, list[Weight]]]:
        """Neighbouring weights of one kind, at least `least` elements together where there are as many."""
        open_groups: dict[Kind, list[Weight]] = {}
        for weight in weights(chunk):
            if id(weight) in self._claimed:  # a tied tensor of two chunks of one rank
                continue
            self._claimed.add(id(weight))
            kind = self._kind(weight)
            group = open_groups.setdefault(kind, [])
            group.append(weight)
            if kind == "tied" or sum(w.numel() for w in group) >= least:
                yield kind, open_groups.pop(kind)
        yield from open_groups.items()

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
        device, dtype = group[0].device, group[0].dtype
        flat = torch.zeros(length, dtype=dtype, device=device)
        grads = torch.zeros(length, dtype=self.dtype, device=device)
        for weight, begin, stop in places:
            flat[begin:stop].copy_(weight.detach().flatten())
            weight.data = flat[begin:stop].view(weight.shape)
            weight.sink = grads[begin:stop].view(weight.shape)
        tensor_rank = kind in ("cut", "tied") or self.mesh.tp.first
        holder = kind != "tied" or self.mesh.ends.first
        axes = {"partial": (self.mesh.tp,), "tied": (self.mesh.ends,)}.get(kind, ())
        return Bucket(kind, places, flat, grads, (first, first + share), decay_end, tensor_rank and holder, axes)

    # -- one step

    def start(self) -> None:
        """Begin a step: no gradient has arrived."""
        for bucket in self.buckets:
            bucket.grads.zero_()
            bucket.waiting, bucket.work = bucket.uses, None

    def final(self, last: bool) -> None:
        """Say whether the backward pass that follows is the last of its chunk in this step."""
        self._final = last

    def _arrived(self, weight: Weight) -> None:
        if not self._final:
            return
        bucket = self._home[id(weight)]
        bucket.waiting -= 1
        assert bucket.waiting >= 0, f"{weight.slots[0].shard.name}: more gradients than uses"
        if bucket.waiting == 0 and self.overlap:
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        """Start the sum over data; the backward pass goes on meanwhile."""
        if not self.zero:
            bucket.work = all_reduce(bucket.grads, self.mesh.data, wait=False)
            return
        # NCCL may reduce into a part of its own input; gloo may not.
        out = bucket.own_grads if bucket.grads.is_cuda else torch.empty_like(bucket.own_grads)
        bucket.own_grads, bucket.work = start_reduce_scatter(bucket.grads, self.mesh.data, out)

    def finish(self) -> None:
        """Wait for the sums over data, then add up what is still partial. Errors name a weight without gradient."""
        for bucket in self.buckets:
            if bucket.waiting:
                names = [weight.slots[0].shard.name for weight, _, _ in bucket.places]
                raise RuntimeError(f"{bucket.waiting} gradients of {names[0]} ... {names[-1]} never arrived")
            if bucket.work is None:
                self._leave(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            for axis in bucket.axes:
                all_reduce(bucket.own_grads, axis)
        self._final = False

    def square_sum(self) -> torch.Tensor:
        """Sum of squares of this rank's counted gradients, in max(fp32, their dtype)."""
        wide = torch.promote_types(self.dtype, torch.float32)
        counted = [bucket.own_grads for bucket in self.buckets if bucket.counted]
        if not counted:
            return torch.zeros((), dtype=wide, device=self.buckets[0].grads.device)
        norms = [torch.linalg.vector_norm(grads, dtype=wide) for grads in counted]
        return torch.stack(norms).square().sum()

    @property
    def norm_axis(self) -> Axis:
        """The ranks whose square sums add up to the whole model's."""
        return self.mesh.everyone if self.zero else self.mesh.model


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _into_sink(parameter: torch.Tensor) -> None:
    """Move what autograd accumulated (norms, biases, positions) into the bucket.

    The hook is called with no gradient where a layer has put it into the sink by itself.
    """
    assert isinstance(parameter, Weight) and parameter.sink is not None
    if parameter.grad is None:
        return
    parameter.sink.add_(parameter.grad)
    parameter.grad = None
    parameter.arrived()


def bytes_held(buckets: Iterable[Bucket]) -> int:
    """Bytes of weights and gradients in these buckets."""
    return sum(t.numel() * t.element_size() for bucket in buckets for t in (bucket.weights, bucket.grads))
