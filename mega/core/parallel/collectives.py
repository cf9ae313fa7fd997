"""Collectives along an axis, and their conjugate pairs for autograd.

Each pair consists of a collective in the forward pass and a collective for its gradient (Shoeybi et al. 2019;
Korthikanti et al. 2022):

    reduce_from_region   all-reduce     <->  identity      leave a region where each rank computes its own outputs
                         reduce-scatter <->  all-gather    leave such a region under sequence parallelism
    all_to_all           all-to-all     <->  all-to-all    from some tokens of all heads to all tokens of some heads

The collective at the entry of a region is part of the column-parallel layer (linear.py), which overlaps it with a GEMM.
All collectives act on dim 0 of [tokens, ...]. On an axis of one rank each collective is the identity, without a copy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from mega.core.activity import ACTIVITY, unqueued_time
from mega.core.ops import observe
from mega.core.ops.autograd import FunctionContext
from mega.core.parallel.mesh import Axis

# torch 2.13 renamed these functions; torch 2.11 has only the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Value = TypeVar("Value")

Collective = Callable[[torch.Tensor, Axis], torch.Tensor]


class CollectiveHandle(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block until the collective is done (CPU), or make the current stream wait for it (CUDA)."""


class Finished:
    """The handle of a collective that sends no data because the axis has one rank or the tensors are on the meta
    device.

    Meta tensors have no data, so no process group is needed. held: the tensor that the handle of a real collective
    would keep alive until the wait. waited: function that is called at the first wait.
    """

    def __init__(self, held: torch.Tensor | None = None, waited: Callable[[], None] | None = None):
        self._held, self._waited = held, waited

    def wait(self) -> None:
        self._held = None
        if self._waited is not None:
            self._waited()
            self._waited = None


def wait_for(work: CollectiveHandle) -> None:
    """Wait for a collective. On the main thread, add the time that the host blocks to `ACTIVITY.waited`."""
    if threading.current_thread() is not threading.main_thread():
        work.wait()
        return
    began = unqueued_time()
    work.wait()
    ACTIVITY.waited += unqueued_time() - began


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", *, wait: bool = True) -> CollectiveHandle:
    """Reduce `x` in place over the axis. Returns the handle."""
    if axis.size == 1:
        return Finished()
    if x.is_meta:
        handle = Finished(waited=observe.exchange("all-reduce", x.nbytes, axis.ranks))
        if wait:
            handle.wait()
        return handle
    kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    work = dist.all_reduce(x, kind, group=axis.group, async_op=True)
    if wait:
        wait_for(work)
    return work


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Concatenate the blocks of all ranks along dim 0: [n, ...] -> [n x size, ...]."""
    out, work = start_all_gather(x, axis)
    wait_for(work)
    return out


def start_all_gather(
    x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, CollectiveHandle]:
    if axis.size == 1:
        return x, Finished()
    if out is None:
        out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if x.is_meta:
        return out, Finished(x.contiguous(), observe.exchange("all-gather", out.nbytes, axis.ranks))
    return out, _gather_into(out, x.contiguous(), group=axis.group, async_op=True)


def gather_json(value: Value, axis: Axis, device: torch.device) -> list[Value]:
    """Gather a JSON value from every rank, in the order of ranks, on all ranks. Pickle is not used."""
    if axis.size == 1:
        return [value]
    text = json.dumps(value).encode()
    longest = torch.tensor(len(text), device=device)
    all_reduce(longest, axis, "max")
    row = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON ignores trailing spaces
    rows = all_gather(row[None].to(device), axis).cpu()
    return [json.loads(row.numpy().tobytes()) for row in rows]


def first_problem(problem: str | None, axis: Axis, device: torch.device) -> str | None:
    """Return the problem of the first rank that has a problem, or None if no rank has one. The result is identical on
    all ranks, so all ranks make the same decision."""
    return next(filter(None, gather_json(problem, axis, device)), None)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's block of the sum over ranks: [n x size, ...] -> [n, ...]."""
    out, work = start_reduce_scatter(x, axis)
    wait_for(work)
    return out


def start_reduce_scatter(
    x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, CollectiveHandle]:
    if axis.size == 1:
        return x, Finished()
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows over {axis.size} ranks"
    if out is None:
        out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if x.is_meta:
        return out, Finished(x.contiguous(), observe.exchange("reduce-scatter", x.nbytes, axis.ranks))
    return out, _scatter_sum(out, x.contiguous(), group=axis.group, async_op=True)


class RingShift:
    """A ring exchange in flight: it sends `x` to the next rank of the axis and receives the tensor of the previous
    rank.

    `wait` returns the received tensor. `x` must not change before `wait` returns.
    """

    def __init__(self, x: torch.Tensor, axis: Axis):
        self._sent = x.contiguous()
        self._arriving = torch.empty_like(self._sent)
        self._works: Sequence[CollectiveHandle] = []
        if x.is_meta:
            self._works = [Finished(waited=observe.exchange("shift", x.nbytes, axis.ranks))]
            return
        after, before = (axis.ranks[(axis.index + step) % axis.size] for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, axis.group),
                dist.P2POp(dist.irecv, self._arriving, before, axis.group),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self._works:
            wait_for(work)
        return self._arriving


def local_shard(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a view of this rank's shard, along dim 0, of a tensor that is replicated on every rank."""
    return x.chunk(axis.size, dim=0)[axis.index] if axis.size > 1 else x


def _exchange(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows over {axis.size} ranks"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x.contiguous()
    if x.is_meta:
        Finished(waited=observe.exchange("all-to-all", x.nbytes, axis.ranks)).wait()
    else:
        wait_for(dist.all_to_all_single(out, x, group=axis.group, async_op=True))
    return out


def exchange(x: torch.Tensor, axis: Axis, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> torch.Tensor:
    """All-to-all with a separate number of rows for each pair of ranks.

    The rows of `x`, [sum(send_sizes), ...], are ordered by destination rank; the rows of the result,
    [sum(receive_sizes), ...], are ordered by source rank.
    """
    if axis.size == 1:
        return x
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive_sizes), list(send_sizes), group=axis.group)
    return out


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over the ranks of an axis, as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce(out, axis)
    return out


def _unchanged(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    return grad


class _Conjugate(torch.autograd.Function):
    """A collective in the forward pass, with another collective for its gradient in the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[Axis, Collective]],
        x: torch.Tensor,
        axis: Axis,
        collective: Collective,
        grad_collective: Collective,
    ) -> torch.Tensor:
        ctx.state = axis, grad_collective
        return collective(x, axis)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[Axis, Collective]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        axis, grad_collective = ctx.state
        return grad_collective(grad, axis), None, None, None


def conjugate(x: torch.Tensor, axis: Axis, collective: Collective, grad_collective: Collective) -> torch.Tensor:
    """Return collective(x, axis). The backward pass applies `grad_collective` to the gradient."""
    return _Conjugate.apply(x, axis, collective, grad_collective)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Send block r of dim 0 to rank r. The received blocks are ordered by source rank."""
    return conjugate(x, axis, _exchange, _exchange)


def all_reduce_both_ways(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over ranks. The backward pass also sums the gradient over ranks, because ranks use the sum in
    different computations."""
    return x if axis.size == 1 else conjugate(x, axis, summed, summed)


def reduce_from_region(x: torch.Tensor, axis: Axis, sequence: bool) -> torch.Tensor:
    """Leave a tensor-parallel region by summing the partial results of all ranks.

    sequence: whether this rank gets the sum only for its own tokens.
    """
    if axis.size == 1:
        return x
    pair = (reduce_scatter, all_gather) if sequence else (summed, _unchanged)
    return conjugate(x, axis, *pair)


def _local_block(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's block of dim 0. All ranks have blocks of equal length."""
    return grad.chunk(axis.size)[axis.index].contiguous()


def gather_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gather along the last dim: [..., n] -> [..., n x size].

    Every rank computes the same values from the gathered tensor, so the gradient is not summed, and each rank takes its
    own block of the gradient.
    """
    if axis.size == 1:
        return x
    return conjugate(x.movedim(-1, 0), axis, all_gather, _local_block).movedim(0, -1)
