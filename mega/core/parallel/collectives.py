"""Collectives along an axis, and their conjugate pairs for autograd.

A pair is the same exchange seen from forward and backward (Shoeybi et al. 2019; Korthikanti et al. 2022):

    reduce_from_region   all-reduce     <->  identity      out of a region where each rank computes its own outputs
                         reduce-scatter <->  all-gather    the same, where tokens are shared out over the axis
    all_to_all           all-to-all     <->  all-to-all    from some tokens of all heads to all tokens of some heads

Entering a region belongs to the column GEMM (linear.py), which its exchanges overlap.
All act on dim 0 of [tokens, ...]. On an axis of one rank each is the identity and copies nothing.
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

# torch 2.13 renamed these; 2.11 knows the old names only.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Value = TypeVar("Value")

Collective = Callable[[torch.Tensor, Axis], torch.Tensor]


class CollectiveHandle(Protocol):
    """What is being sent or computed."""

    def wait(self) -> object:
        """Until it is done, or until the stream of this thread waits for it."""


class Finished:
    """The handle of a collective that had nothing to do: along an axis of one rank, or of tensors on the meta device.

    Those have shapes alone, and no group need exist. `held`: what a collective's own handle would hold until the wait.
    `waited`: called at the first wait.
    """

    def __init__(self, held: torch.Tensor | None = None, waited: Callable[[], None] | None = None):
        self._held, self._waited = held, waited

    def wait(self) -> None:
        self._held = None
        if self._waited is not None:
            self._waited()
            self._waited = None


def wait_for(work: CollectiveHandle) -> None:
    """Wait for a collective. A host that waits itself adds it to what the main thread has waited for others."""
    if threading.current_thread() is not threading.main_thread():
        work.wait()
        return
    began = unqueued_time()
    work.wait()
    ACTIVITY.waited += unqueued_time() - began


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", *, wait: bool = True) -> CollectiveHandle:
    """Reduce `x` in place over the axis; returns the handle."""
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
    """Blocks of every rank concatenated along dim 0: [n, ...] -> [n x size, ...]."""
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
    """The plain JSON value that each rank gives, in the order of ranks, on all of them; nothing is pickled."""
    if axis.size == 1:
        return [value]
    text = json.dumps(value).encode()
    longest = torch.tensor(len(text), device=device)
    all_reduce(longest, axis, "max")
    row = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # spaces after JSON mean nothing
    rows = all_gather(row[None].to(device), axis).cpu()
    return [json.loads(row.numpy().tobytes()) for row in rows]


def first_problem(problem: str | None, axis: Axis, device: torch.device) -> str | None:
    """The problem of the first rank that has one, the same on all of them, so that all take the same path."""
    return next(filter(None, gather_json(problem, axis, device)), None)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Our block of the sum over ranks: [n x size, ...] -> [n, ...]."""
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
    """An exchange around the axis in flight: `x` goes to the next rank, while the rank before sends us its own.

    `wait` gives what arrived. `x` must not change until then.
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
    """Our run of dim 0 of a tensor that every rank holds whole."""
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


def exchange(x: torch.Tensor, axis: Axis, to: Sequence[int], of: Sequence[int]) -> torch.Tensor:
    """Rows of `x`, [sum(to), ...], lie in the order of the ranks that they go to; what comes, [sum(of), ...], in the
    order of those that it is from."""
    if axis.size == 1:
        return x
    out = x.new_empty(sum(of), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(of), list(to), group=axis.group)
    return out


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A new tensor, the sum over the ranks of an axis."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce(out, axis)
    return out


def _unchanged(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    return grad


class _Conjugate(torch.autograd.Function):
    """A collective, and the one that its gradient goes back by."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[Axis, Collective]], x: torch.Tensor, axis: Axis, there: Collective, back: Collective
    ) -> torch.Tensor:
        ctx.state = axis, back
        return there(x, axis)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[Axis, Collective]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        axis, back = ctx.state
        return back(grad, axis), None, None, None


def conjugate(x: torch.Tensor, axis: Axis, there: Collective, back: Collective) -> torch.Tensor:
    """there(x, axis), whose gradient goes back by `back`."""
    return _Conjugate.apply(x, axis, there, back)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Block r of dim 0 goes to rank r; the blocks that come here lie in the order of the ranks they come from."""
    return conjugate(x, axis, _exchange, _exchange)


def all_reduce_both_ways(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks that each of them computes with, so that the gradients of all of them add up too."""
    return x if axis.size == 1 else conjugate(x, axis, summed, summed)


def reduce_from_region(x: torch.Tensor, axis: Axis, sequence: bool) -> torch.Tensor:
    """Out of a tensor-parallel region: parts of all ranks add up; under sequence our tokens of the sum stay."""
    if axis.size == 1:
        return x
    pair = (reduce_scatter, all_gather) if sequence else (summed, _unchanged)
    return conjugate(x, axis, *pair)


def _local_block(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's block of dim 0, which is equally long on all ranks."""
    return grad.chunk(axis.size)[axis.index].contiguous()


def gather_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Blocks of all ranks along the last dim: [..., n] -> [..., n x size]. Every rank computes the same from the whole,
    so that the gradient of a block is the block of the gradient."""
    if axis.size == 1:
        return x
    return conjugate(x.movedim(-1, 0), axis, all_gather, _local_block).movedim(0, -1)
