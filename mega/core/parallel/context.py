"""The sequence cut over the context axis, and attention over whole rows.

A row of s columns is cut into 2n chunks, and rank i of n holds chunks i and 2n - 1 - i: one of the first, which see
little, and one of the last, which see much, so that all ranks have equal work. With n = 2 and s = 8

    rank 0   0 1 . . . . 6 7
    rank 1   . . 2 3 4 5 . .

Everything but attention acts on tokens one by one. Attention has two forms:

    ring        keys and values travel once around the axis and every rank's queries look at each (Liu et al. 2023);
                communication overlaps computation, and any number of heads is possible
    all-to-all  tokens are exchanged for heads: every rank attends over whole rows with its share of the heads (Jacobs
                et al. 2023); two exchanges and no merging, but the key/value heads must divide

It refuses to know the model: to a layer, a suite of ops with context parallelism looks like any other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from mega.core.batch import zigzag
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.dropout import joined
from mega.core.ops.mask import AttentionMask
from mega.core.ops.norm import accurate
from mega.core.ops.partial_attention import PartialAttention, merge
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import RingShift, all_to_all
from mega.core.parallel.mesh import Axis

ContextComm = Literal["auto", "ring", "all-to-all"]


# -- from the columns that ranks hold to whole rows


def _join(parts: torch.Tensor) -> torch.Tensor:
    """What all ranks hold [size, b, s / size, ...] -> whole rows [b, s, ...]."""
    early, late = parts.chunk(2, dim=2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def _split(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `_join`."""
    early, late = rows.unflatten(1, (2 * size, -1)).movedim(1, 0).chunk(2)
    return torch.cat([early, late.flip(0)], dim=2)


# -- the choice between the two forms


def with_context_parallel(ops: Ops, axis: Axis, comm: ContextComm) -> Ops:
    """`ops` with an attention over rows that are cut over the context axis.

    It takes what `ops.attention` takes: q, k and v of our columns, but the mask of the whole rows, equal on all ranks.
    """
    if axis.size == 1:
        return ops

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        if comm == "ring" or (comm == "auto" and not divides(q.shape[2], k.shape[2], axis.size)):
            return _Ring.apply(q, k, v, RingState(axis, ops.partial_attention, mask))  # type: ignore[no-any-return, no-untyped-call]
        return _by_heads(ops, axis, q, k, v, mask)

    return replace(ops, attention=attention, row_shards=axis.size)


def divides(heads: int, kv_heads: int, size: int) -> bool:
    """Whether all-to-all can share a rank's heads out over `size` ranks."""
    return heads % size == 0 and kv_heads % size == 0


# -- all-to-all


def _by_heads(
    ops: Ops, axis: Axis, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """q [b, s / size, heads, d], k and v [b, t / size, kv_heads, d] -> [b, s / size, heads, d]."""
    size = axis.size
    assert divides(q.shape[2], k.shape[2], size), (q.shape, k.shape, size)
    # 1 exchange our columns of all heads for all columns of our heads: at once for q, k and v of equal length
    if q.shape[1] == k.shape[1]:
        q, k, v = _whole_rows(axis, q, k, v)
    else:
        (q,), (k, v) = _whole_rows(axis, q), _whole_rows(axis, k, v)
    # 2 attention as on one rank, which drops by the numbers of our heads
    if mask.dropout is not None:
        first = mask.dropout.first_head + axis.index * q.shape[2]
        mask = replace(mask, dropout=replace(mask.dropout, first_head=first))
    mixed = ops.attention(q, k, v, mask)
    # 3 exchange back
    return all_to_all(_split(mixed, size), axis).movedim(0, 2).flatten(2, 3)


def _whole_rows(axis: Axis, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Our columns of all heads, each [b, s / size, heads, d] -> all columns of our heads, [b, s, heads / size, d]."""
    sent = torch.cat([x.unflatten(2, (axis.size, -1)) for x in parts], dim=3).movedim(2, 0)
    return _join(all_to_all(sent, axis)).split([x.shape[2] // axis.size for x in parts], dim=2)


# -- the ring


class RingBlock(NamedTuple):
    """Which of our queries see which keys of one rank, and how: slices of our columns and of theirs."""

    queries: slice
    keys: slice
    mask: AttentionMask


class RingState(NamedTuple):
    """One attention around the axis. mask: of the whole rows."""

    axis: Axis
    op: PartialAttention
    mask: AttentionMask

    def blocks(self, source: int, s: int, t: int) -> list[RingBlock]:
        """What our s queries see of the t keys of rank `source`; a rank holds an early and a late chunk of each.

        Of plain causal rows: all keys of ourselves, causally. Of a rank before us: its early chunk precedes all of
        ours, its late chunk follows. Of a rank after us: both its chunks precede our late one and follow our early
        one. So every rank computes half of every arriving block, and nothing that is masked. Of a window, or where
        queries and keys differ in position: each chunk by each, but for pairs that see nothing.
        """
        mask, ours = self._of(source), self.axis.index
        queries, keys = _halves(s), _halves(t)
        if mask.window is None and mask.kind == "full":
            return [RingBlock(slice(0, s), slice(0, t), mask)]
        if mask.window is None and mask.q_offset == 0 and s == t:
            if source == ours:
                return [RingBlock(slice(0, s), slice(0, t), mask)]
            of, to = (slice(0, s), keys[0]) if source < ours else (queries[1], slice(0, t))
            return [RingBlock(of, to, replace(mask.cut(of, to), kind="full", q_offset=0))]
        found = []
        for of, q_chunk in zip(queries, self._chunks(ours), strict=True):
            for to, k_chunk in zip(keys, self._chunks(source), strict=True):
                offset = mask.q_offset + q_chunk * (s // 2) - k_chunk * (t // 2)
                block = replace(mask.cut(of, to), q_offset=offset)
                if not block.empty(s // 2, t // 2):
                    found.append(RingBlock(of, to, block))
        return found

    def _chunks(self, index: int) -> tuple[int, int]:
        """Which chunks of a row rank `index` holds."""
        return index, 2 * self.axis.size - 1 - index

    def _of(self, source: int) -> AttentionMask:
        """Documents and dropout of our queries and the keys of rank `source`; positions are those of the rows."""
        axis, mask = self.axis, self.mask
        if mask.q_documents is not None and mask.k_documents is not None:
            q_documents, k_documents = (
                zigzag(mask.q_documents, axis.index, axis.size),
                zigzag(mask.k_documents, source, axis.size),
            )
            mask = replace(mask, q_documents=q_documents, k_documents=k_documents)
        if mask.dropout is not None:
            keys = zigzag(mask.dropout.keys, axis.index, axis.size)
            chunk = sum(map(len, mask.dropout.columns)) // (2 * axis.size)
            parts = (mask.dropout.cut(slice(None), slice(at * chunk, (at + 1) * chunk)) for at in self._chunks(source))
            columns = joined(run for part in parts for run in part.columns)
            mask = replace(mask, dropout=replace(mask.dropout, keys=keys, columns=columns))
        return mask


def _halves(length: int) -> tuple[slice, slice]:
    return slice(0, length // 2), slice(length // 2, length)


def _nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of queries that have seen no key."""
    b, s, heads, _ = q.shape
    wide = accurate(q.dtype)
    return torch.zeros_like(q, dtype=wide), torch.full((b, heads, s), -math.inf, dtype=wide, device=q.device)


class _Ring(torch.autograd.Function):
    """q [b, s / size, heads, d], k and v [b, t / size, kv_heads, d] -> [b, s / size, heads, d].

    Forward, for every rank of the axis, ourselves first and then backwards around it:
        1 send the keys and values that we have to the next rank
        2 meanwhile our queries look at them; each block is merged into the result by its log-sum-exp
        3 receive those of the rank before

    Backward goes around the same way, and the gradients of keys and values follow one step after them:
        1 send keys and values
        2 meanwhile compute the gradients of these blocks; ours of q add up here
        3 receive the gradients that other ranks found for these keys and values, add ours, and send them on
        4 after the last step they have arrived at the rank that owns the keys and values
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[RingState], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingState
    ) -> torch.Tensor:
        axis, op = ring.axis, ring.op
        here, s, t = torch.stack([k, v]), q.shape[1], k.shape[1]
        result: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in range(axis.size):
            # 1
            shift = RingShift(here, axis) if step < axis.size - 1 else None
            # 2
            for queries, keys, mask in ring.blocks((axis.index - step) % axis.size, s, t):
                block, block_lse = op.forward(q[:, queries], here[0, :, keys], here[1, :, keys], mask)
                if result is None and block.shape[1] == s:
                    result = block.to(block_lse.dtype), block_lse
                else:
                    result = result or _nothing(q)
                    merge(result[0][:, queries], result[1][:, :, queries], block, block_lse)
            # 3
            here = here if shift is None else shift.wait()
        out, lse = result or _nothing(q)
        out = out.to(q.dtype)
        ctx.state = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(
        ctx: FunctionContext[RingState], grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        ring = ctx.state
        axis, op = ring.axis, ring.op
        q, k, v, out, lse = ctx.saved_tensors
        here, s, t = torch.stack([k, v]), q.shape[1], k.shape[1]
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_here = torch.zeros_like(here, dtype=lse.dtype)
        grad_shift: RingShift | None = None
        for step in range(axis.size):
            # 1
            shift = RingShift(here, axis) if step < axis.size - 1 else None
            # 2
            found = []
            for queries, keys, mask in ring.blocks((axis.index - step) % axis.size, s, t):
                their_k, their_v = here[:, :, keys]
                of_q, of_k, of_v = op.backward(
                    grad[:, queries], q[:, queries], their_k, their_v, out[:, queries], lse[:, :, queries], mask
                )
                grad_q[:, queries] += of_q
                found.append((keys, of_k, of_v))
            # 3
            if grad_shift is not None:
                grad_here = grad_shift.wait()
            for keys, of_k, of_v in found:
                grad_here[0, :, keys] += of_k
                grad_here[1, :, keys] += of_v
            grad_shift = RingShift(grad_here, axis)
            here = here if shift is None else shift.wait()
        # 4
        assert grad_shift is not None
        grad_k, grad_v = grad_shift.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None
