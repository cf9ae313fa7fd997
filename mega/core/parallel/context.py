"""Context parallelism, in which each rank holds some columns of every row (sequence), and attention covers whole rows.

A row of s columns is split into 2n chunks, and rank i of n holds chunks i and 2n - 1 - i. Under a causal mask, early
columns attend to few keys and late columns attend to many, so this pairing gives all ranks equal work. With n = 2 and s
= 8:

    rank 0   0 1 . . . . 6 7
    rank 1   . . 2 3 4 5 . .

Everything except attention acts on single tokens. Attention has two implementations:

    ring        keys and values are passed once around the axis, and every rank's queries attend to each block (Liu et
                al. 2023); communication overlaps computation, and any number of heads is possible
    all-to-all  tokens are exchanged for heads, so that every rank has whole rows of some heads
                (Jacobs et al. 2023); two exchanges and no merging, but the number of ranks must divide the key/value
                heads

This module does not depend on the model. A layer uses ops with context parallelism in the same way as other suites of
ops.
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


# -- conversion between whole rows and the columns of each rank


def _join(parts: torch.Tensor) -> torch.Tensor:
    """Join the columns of all ranks [size, b, s / size, ...] into whole rows [b, s, ...].

    rank 0   a d        early chunks in order of ranks, late chunks in reverse order
    rank 1   b c   ->   a b c d
    """
    early, late = parts.chunk(2, dim=2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def _split(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `_join`."""
    early, late = rows.unflatten(1, (2 * size, -1)).movedim(1, 0).chunk(2)
    return torch.cat([early, late.flip(0)], dim=2)


# -- choosing an implementation


def with_context_parallel(ops: Ops, axis: Axis, comm: ContextComm) -> Ops:
    """Return `ops` with an attention op for rows that are sharded over the context axis.

    The new attention has the signature of `ops.attention`. q, k and v belong to this rank's columns; the mask covers
    the whole rows and is identical on all ranks.
    """
    if axis.size == 1:
        return ops

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        if comm == "ring" or (comm == "auto" and not divides(q.shape[2], k.shape[2], axis.size)):
            return _Ring.apply(q, k, v, RingState(axis, ops.partial_attention, mask))  # type: ignore[no-any-return, no-untyped-call]
        return _by_heads(ops, axis, q, k, v, mask)

    return replace(ops, attention=attention, row_shards=axis.size)


def divides(heads: int, kv_heads: int, size: int) -> bool:
    """Whether all-to-all can divide the heads of a rank over `size` ranks."""
    return heads % size == 0 and kv_heads % size == 0


# -- all-to-all


def _by_heads(
    ops: Ops, axis: Axis, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """Compute attention with two all-to-all exchanges.

    q [b, s / size, heads, d], k and v [b, t / size, kv_heads, d] -> [b, s / size, heads, d].
    """
    size = axis.size
    assert divides(q.shape[2], k.shape[2], size), (q.shape, k.shape, size)
    # 1 exchange this rank's columns of all heads for all columns of its heads, in one message if q, k, v have equal
    # length
    if q.shape[1] == k.shape[1]:
        q, k, v = _whole_rows(axis, q, k, v)
    else:
        (q,), (k, v) = _whole_rows(axis, q), _whole_rows(axis, k, v)
    # 2 attention as on one rank; dropout depends on the head's index, which must be the global index
    if mask.dropout is not None:
        first = mask.dropout.first_head + axis.index * q.shape[2]
        mask = replace(mask, dropout=replace(mask.dropout, first_head=first))
    outputs = ops.attention(q, k, v, mask)
    # 3 exchange back
    return all_to_all(_split(outputs, size), axis).movedim(0, 2).flatten(2, 3)


def _whole_rows(axis: Axis, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange this rank's columns of all heads, each [b, s / size, heads, d], for all columns of this rank's heads,
    each [b, s, heads / size, d]."""
    sent = torch.cat([x.unflatten(2, (axis.size, -1)) for x in parts], dim=3).movedim(2, 0)
    return _join(all_to_all(sent, axis)).split([x.shape[2] // axis.size for x in parts], dim=2)


# -- ring attention


class RingBlock(NamedTuple):
    """A block of scores to compute, for some queries of this rank and some keys of one rank."""

    queries: slice  # columns of this rank
    keys: slice  # columns of the rank that owns the keys
    mask: AttentionMask  # mask of this block


class RingState(NamedTuple):
    """One ring attention over an axis. mask: the mask of the whole rows."""

    axis: Axis
    op: PartialAttention
    mask: AttentionMask

    def blocks(self, source: int, s: int, t: int) -> list[RingBlock]:
        """Return the blocks of scores to compute between the s queries of this rank and the t keys of rank `source`.

        A rank holds an early and a late chunk of queries and of keys. Plain causal rows have three cases:
        - source is this rank: its queries attend to all its keys, causally.
        - source is an earlier rank: its early chunk precedes all of this rank's queries, and its late chunk follows
          them.
        - source is a later rank: both its chunks precede this rank's late chunk and follow this rank's early chunk.
        Every rank therefore computes half of every received block, without masked scores. With a window, or if queries
        and keys have different positions, each chunk of queries is paired with each chunk of keys, except pairs that
        are masked entirely.
        """
        mask, own_index = self._local_mask(source), self.axis.index
        queries, keys = _halves(s), _halves(t)
        if mask.window is None and mask.kind == "full":
            return [RingBlock(slice(0, s), slice(0, t), mask)]
        # With equal positions of queries and keys, each of the three cases above needs only one block.
        # One block makes GEMMs larger, and positions need to be compared only if `source` is this rank.
        if mask.window is None and mask.q_offset == 0 and s == t:
            if source == own_index:
                return [RingBlock(slice(0, s), slice(0, t), mask)]
            q_columns, k_columns = (slice(0, s), keys[0]) if source < own_index else (queries[1], slice(0, t))
            return [RingBlock(q_columns, k_columns, replace(mask.cut(q_columns, k_columns), kind="full", q_offset=0))]
        blocks = []
        for q_columns, q_chunk in zip(queries, self._chunks(own_index), strict=True):
            for k_columns, k_chunk in zip(keys, self._chunks(source), strict=True):
                offset = mask.q_offset + q_chunk * (s // 2) - k_chunk * (t // 2)
                block = replace(mask.cut(q_columns, k_columns), q_offset=offset)
                if not block.empty(s // 2, t // 2):
                    blocks.append(RingBlock(q_columns, k_columns, block))
        return blocks

    def _chunks(self, index: int) -> tuple[int, int]:
        """Return the indices of the two chunks that rank `index` holds."""
        return index, 2 * self.axis.size - 1 - index

    def _local_mask(self, source: int) -> AttentionMask:
        """Return the attention mask for the queries of this rank and the keys of rank `source`. Only the documents and
        the dropout of the mask are cut to these queries and keys; positions still count from the start of whole rows.
        """
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
            parts = (
                mask.dropout.cut(slice(None), slice(chunk_index * chunk, (chunk_index + 1) * chunk))
                for chunk_index in self._chunks(source)
            )
            columns = joined(run for part in parts for run in part.columns)
            mask = replace(mask, dropout=replace(mask.dropout, keys=keys, columns=columns))
        return mask


def _halves(length: int) -> tuple[slice, slice]:
    return slice(0, length // 2), slice(length // 2, length)


def _nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp of queries that have not attended to any key yet."""
    b, s, heads, _ = q.shape
    lse_dtype = accurate(q.dtype)
    return torch.zeros_like(q, dtype=lse_dtype), torch.full((b, heads, s), -math.inf, dtype=lse_dtype, device=q.device)


class _Ring(torch.autograd.Function):
    """Compute ring attention: q [b, s / size, heads, d], k and v [b, t / size, kv_heads, d] -> [b, s / size, heads, d].

    Forward, once for the keys of every rank, beginning with this rank's keys:
        1 start to send the current keys and values to the next rank
        2 attend to these keys with this rank's queries during the send; merge each block into the result by its
          log-sum-exp
        3 receive the keys and values of the previous rank

    Backward uses the same order. The gradients of keys and values move around the axis one step behind the keys and
    values:
        1 start to send keys and values
        2 compute the gradients of this step's blocks during the send; accumulate the gradient of q locally
        3 receive the gradients that other ranks computed for these keys and values, add this rank's, and send the sum
        4 after the last step the sum has reached the rank that owns the keys and values
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[RingState], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingState
    ) -> torch.Tensor:
        axis, op = ring.axis, ring.op
        kv, s, t = torch.stack([k, v]), q.shape[1], k.shape[1]
        result: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in range(axis.size):
            # 1
            shift = RingShift(kv, axis) if step < axis.size - 1 else None
            # 2
            for queries, keys, mask in ring.blocks((axis.index - step) % axis.size, s, t):
                block, block_lse = op.forward(q[:, queries], kv[0, :, keys], kv[1, :, keys], mask)
                if result is None and block.shape[1] == s:  # first block, which covers all queries: no merge
                    result = block.to(block_lse.dtype), block_lse
                else:
                    result = result or _nothing(q)
                    merge(result[0][:, queries], result[1][:, :, queries], block, block_lse)
            # 3
            kv = kv if shift is None else shift.wait()
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
        kv, s, t = torch.stack([k, v]), q.shape[1], k.shape[1]
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        grad_shift: RingShift | None = None
        for step in range(axis.size):
            # 1
            shift = RingShift(kv, axis) if step < axis.size - 1 else None
            # 2
            block_grads = []
            for queries, keys, mask in ring.blocks((axis.index - step) % axis.size, s, t):
                block_k, block_v = kv[:, :, keys]
                block_grad_q, block_grad_k, block_grad_v = op.backward(
                    grad[:, queries], q[:, queries], block_k, block_v, out[:, queries], lse[:, :, queries], mask
                )
                grad_q[:, queries] += block_grad_q
                block_grads.append((keys, block_grad_k, block_grad_v))
            # 3
            if grad_shift is not None:
                grad_kv = grad_shift.wait()
            for keys, block_grad_k, block_grad_v in block_grads:
                grad_kv[0, :, keys] += block_grad_k
                grad_kv[1, :, keys] += block_grad_v
            grad_shift = RingShift(grad_kv, axis)
            kv = kv if shift is None else shift.wait()
        # 4
        assert grad_shift is not None
        grad_k, grad_v = grad_shift.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None
