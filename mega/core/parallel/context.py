"""The sequence cut over the context axis, and attention across the cut.

A row of s columns is cut into 2n chunks, and rank i of n holds chunks i and 2n - 1 - i: one of the first, which see
little, and one of the last, which see much, so that all ranks have equal work. With n = 2 and s = 8

    rank 0   0 1 . . . . 6 7
    rank 1   . . 2 3 4 5 . .

Everything but attention acts on tokens one by one and never notices. Attention has two ways across:

    ring        keys and values travel once around the axis and every rank's queries look at each (Liu et al. 2023);
                the journey hides behind the computing, and any number of heads will do
    all-to-all  tokens are swapped for heads: every rank attends over whole rows with its share of the heads (Jacobs et
                al. 2023); two exchanges, one part, but the key/value heads must divide

It refuses to know the model: a suite of ops whose attention goes across the axis looks to a layer like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from mega.core.batch import zigzag
from mega.core.ops.attention import Drop
from mega.core.ops.partial_attention import PartialAttention, Sight, merge
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import HandOn, all_gather, swap
from mega.core.parallel.mesh import Axis

Way = Literal["auto", "ring", "all-to-all"]


# -- which columns a rank holds


def _join(parts: torch.Tensor) -> torch.Tensor:
    """What all ranks hold [size, b, s / size, ...] -> whole rows [b, s, ...]."""
    early, late = parts.chunk(2, dim=2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def _split(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `_join`."""
    early, late = rows.unflatten(1, (2 * size, -1)).movedim(1, 0).chunk(2)
    return torch.cat([early, late.flip(0)], dim=2)


# -- the choice between the two ways


def across(ops: Ops, axis: Axis, way: Way) -> Ops:
    """`ops` with an attention that goes across the context axis.

    It takes what `ops.attention` takes: q, k and v of our columns, `documents` of the whole rows.
    """
    if axis.size == 1:
        return ops

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None = None,
        drop: Drop | None = None,
    ) -> torch.Tensor:
        if way == "ring" or (way == "auto" and not divides(q.shape[2], k.shape[2], axis.size)):
            return _Ring.apply(q, k, v, Circle(axis, ops.partial_attention, documents, drop))  # type: ignore[no-any-return, no-untyped-call]
        return _by_heads(ops, axis, q, k, v, documents, drop)

    return replace(ops, attention=attention)


def divides(heads: int, kv_heads: int, size: int) -> bool:
    """Whether all-to-all can deal a rank's heads out over `size` ranks."""
    return heads % size == 0 and kv_heads % size == 0


# -- all-to-all


def _by_heads(
    ops: Ops,
    axis: Axis,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    drop: Drop | None,
) -> torch.Tensor:
    """q [b, s / size, heads, d], k and v alike -> [b, s / size, heads, d]."""
    size = axis.size
    assert divides(q.shape[2], k.shape[2], size), (q.shape, k.shape, size)
    # 1 swap our columns of all heads for all columns of our heads: one exchange for q, k and v
    dealt = torch.cat([x.unflatten(2, (size, -1)) for x in (q, k, v)], dim=3).movedim(2, 0)
    rows = _join(swap(dealt, axis))
    share, kv_share = q.shape[2] // size, k.shape[2] // size
    # 2 attention as on one rank
    mixed = ops.attention(*rows.split([share, kv_share, kv_share], dim=2), documents, _whole(drop, axis))
    # 3 swap back
    return swap(_split(mixed, size), axis).movedim(0, 2).flatten(2, 3)


def _whole(drop: Drop | None, axis: Axis) -> Drop | None:
    """The same dropout for all columns of our share of the heads."""
    if drop is None:
        return None
    keys = _join(all_gather(drop.keys, axis).unflatten(0, (axis.size, -1)))
    heads = drop.heads.chunk(axis.size)[axis.index]
    return Drop(keys, heads, torch.arange(keys.shape[1], device=keys.device), drop.probability)


# -- the ring


class Part(NamedTuple):
    """Which of our queries see which keys of one rank: slices of our columns and of theirs."""

    queries: slice
    keys: slice
    sight: Sight


class Circle(NamedTuple):
    """One attention on its way around the axis."""

    axis: Axis
    op: PartialAttention
    documents: torch.Tensor | None
    drop: Drop | None

    def part(self, source: int, length: int) -> Part:
        """What our queries see of the keys of rank `source`; both hold `length` columns, early and late ones.

        Keys of ourselves: all, causally. Of a rank before us: its early chunk is in front of all of ours, its late
        chunk behind. Of a rank behind us: both its chunks are in front of our late one and behind our early one.
        So every rank computes half of every arriving block, and nothing that is masked.
        """
        early, late, both = slice(0, length // 2), slice(length // 2, length), slice(0, length)
        ours = self.axis.index
        queries = late if source > ours else both
        keys = early if source < ours else both
        documents = drop = None
        if self.documents is not None:
            rows = self.documents
            documents = (
                zigzag(rows, ours, self.axis.size)[:, queries],
                zigzag(rows, source, self.axis.size)[:, keys],
            )
        if self.drop is not None:
            theirs = torch.arange(length * self.axis.size, device=self.drop.columns.device)
            drop = self.drop._replace(
                keys=self.drop.keys[:, queries], columns=zigzag(theirs[None], source, self.axis.size)[0, keys]
            )
        return Part(queries, keys, Sight(source == ours, documents, drop))


class _Ring(torch.autograd.Function):
    """q [b, s / size, heads, d], k and v [b, s / size, kv_heads, d] -> [b, s / size, heads, d].

    Forward, for every rank of the axis, ourselves first and then backwards around it:
        1 hand the keys and values that we have on to the next rank
        2 meanwhile our queries look at them; the part is merged into the result by its log-sum-exp
        3 take what the rank before handed on

    Backward travels the same way again, and the gradients of keys and values travel one step behind them:
        1 hand keys and values on
        2 meanwhile compute this part's gradients; ours of q add up here
        3 take the gradients that other ranks found for these keys and values, add ours, and hand them on
        4 after the last step they have arrived at the rank that owns the keys and values
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, circle: Circle) -> torch.Tensor:
        axis, op = circle.axis, circle.op
        here, length = torch.stack([k, v]), q.shape[1]
        out = lse = torch.empty(0)
        for step in range(axis.size):
            # 1
            leaving = HandOn(here, axis) if step < axis.size - 1 else None
            # 2
            queries, keys, sight = circle.part((axis.index - step) % axis.size, length)
            their_k, their_v = here[:, :, keys]
            found, found_lse = op.forward(q[:, queries], their_k, their_v, sight)
            if step == 0:
                out, lse = found.to(found_lse.dtype), found_lse
            else:
                merge(out[:, queries], lse[:, :, queries], found, found_lse)
            # 3
            here = here if leaving is None else leaving.wait()
        out = out.to(q.dtype)
        ctx.circle = circle
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        circle: Circle = ctx.circle
        axis, op = circle.axis, circle.op
        q, k, v, out, lse = ctx.saved_tensors
        here, length = torch.stack([k, v]), q.shape[1]
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_here = torch.zeros_like(here, dtype=lse.dtype)
        behind: HandOn | None = None
        for step in range(axis.size):
            # 1
            leaving = HandOn(here, axis) if step < axis.size - 1 else None
            # 2
            queries, keys, sight = circle.part((axis.index - step) % axis.size, length)
            their_k, their_v = here[:, :, keys]
            of_q, of_k, of_v = op.backward(
                grad[:, queries], q[:, queries], their_k, their_v, out[:, queries], lse[:, :, queries], sight
            )
            grad_q[:, queries] += of_q
            # 3
            if behind is not None:
                grad_here = behind.wait()
            grad_here[0, :, keys] += of_k
            grad_here[1, :, keys] += of_v
            behind = HandOn(grad_here, axis)
            here = here if leaving is None else leaving.wait()
        # 4
        assert behind is not None
        grad_k, grad_v = behind.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None
