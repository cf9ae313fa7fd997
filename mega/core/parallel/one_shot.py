"""Sums and gathers the tensors of an inference step over an axis, through memory that all ranks of the axis map.

A decoding step sums 8 KB twice per block, and nearly all the time of a collective of this size is latency. In this
module, every rank writes its tensor into memory that the other ranks read, sets a mark, waits for the marks of the
other ranks, and sums all tensors in the order of ranks. The result is bitwise identical on all ranks and in every call.

    OneShot   CUDA ranks of one host on NCCL: one kernel (ops/kernels/mapped_sum.py) without NVLink multicast, which can
              be captured in a CUDA graph
    HostSum   ranks of one host on gloo: sums tensors and gathers logits of any size, in pieces. Each rank
              reads the tensors of all ranks, which is still faster than gloo's sockets

With `OneShot`, every rank reads the whole tensors of all ranks. Larger tensors use NCCL's collectives, which divide the
work over ranks (no gain with two ranks). All ranks of an axis must sum the same tensors in the same order. If a CUDA
rank exits, the other ranks wait in the middle of a sum, without a timeout, until the launcher stops them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.ops.trial import error_of, first_line, problem_of
from mega.core.parallel.collectives import all_gather, all_reduce, first_problem, gather_json
from mega.core.parallel.mesh import Axis
from mega.core.parallel.shared_memory import SharedMemory

ALIGNMENT = 16
"""The size of a tensor in bytes must be a multiple of this number, because a thread reads 16 bytes at a time."""

HOST_PIECE = 1 << 20
"""Size of a piece in `HostSum`, in bytes."""

log = logging.getLogger(__name__)


class Sum(Protocol):
    """A sum over an axis. summed(x) sums x in place; summed(x, into) adds the sum to `into` and leaves x undefined."""

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None: ...


def limit_of(ranks: int) -> int:
    """Return the size of the largest tensor that is summed in one exchange, in bytes.

    >>> [limit_of(ranks) >> 10 for ranks in (2, 3, 4, 8)]
    [16384, 7232, 4096, 1024]
    """
    whole = 1 << 16  # with a multiple of this size, every thread's share begins at a multiple of ALIGNMENT
    return max((1 << 26) // ranks**2 // whole * whole, 1 << 19)


def trial_sizes(limit: int) -> tuple[int, ...]:
    """Return the sizes, in bytes, of the tensors on which sums are tested: less than a warp, one block of threads, a
    few blocks, and the largest tensor.

    Each size is used several times, because the two buffers alternate.
    """
    return (ALIGNMENT, 8 * 2**10, 40 * 2**10 + ALIGNMENT, limit) * 3


class OneShot:
    """Sums across CUDA ranks on one host. All ranks of the axis must construct the object together. limit: maximum size
    of a tensor in bytes.

    Errors: RuntimeError if memory cannot be mapped.
    """

    def __init__(self, axis: Axis, device: torch.device, limit: int):
        import torch.distributed._symmetric_memory as symmetric

        from mega.core.ops.kernels import mapped_sum

        assert axis.group is not None
        self._run, self._rank, self._limit = mapped_sum.mapped_sum, axis.index, limit
        # `symmetric.empty` is not used, because it allocates from a pool that another engine may use.
        memory: Any = symmetric._SymmetricMemory
        size = mapped_sum.memory_bytes(axis.size, limit)[1]
        self._buffer: torch.Tensor = memory.empty_strided_p2p((size,), (1,), torch.uint8, device).zero_()
        self._counts = torch.zeros(mapped_sum.LANES, dtype=torch.int64, device=device)
        handle = symmetric.rendezvous(self._buffer, axis.group)
        self._memories = torch.tensor([int(begin) for begin in handle.buffer_ptrs], device=device)
        all_reduce(self._counts, axis)  # a barrier, so that the marks of all ranks are zero before the first sum
        self._memories.tolist()

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._run(x, into, self._memories, self._counts, self._rank, self._limit)


class HostSum:
    """Sums contiguous tensors of one dtype, of any size, across CPU ranks on one host. piece: bytes per exchange."""

    def __init__(self, axis: Axis, dtype: torch.dtype, piece: int):
        self._memory = SharedMemory(axis, 2 * axis.size * piece, torch.device("cpu"))
        whole = torch.frombuffer(self._memory.bytes, dtype=dtype)
        self._buffers = whole.view(2, axis.size, -1)
        self._axis, self._number, self._most = axis, 0, piece // dtype.itemsize
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        if x.numel() <= self._most:
            self._add(x.view(-1), None if into is None else into.view(-1))
            return
        parts = x.view(-1).split(self._most)
        sums = [None] * len(parts) if into is None else into.view(-1).split(self._most)
        for part, total in zip(parts, sums, strict=True):
            self._add(part, total)

    def _add(self, x: torch.Tensor, into: torch.Tensor | None) -> None:
        # The order of summation is the same on all ranks, so the result is bitwise identical on all ranks.
        first, second, *rest = self._parts(x)
        total = torch.add(first, second, out=x if into is None else None)
        for part in rest:
            total += part
        if into is not None:
            into += total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather x [...] of every rank as [ranks, ...]."""
        out = x.new_empty((self._axis.size, x.numel()))
        for begin in range(0, x.numel(), self._most):
            piece = x.view(-1)[begin : begin + self._most]
            for row, part in zip(out, self._parts(piece), strict=True):
                row[begin : begin + len(piece)] = part
        return out.view(-1, *x.shape)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the tensors x [n] of all ranks. The views stay valid during the next call; the call after
        that overwrites them."""
        self._number += 1
        key = self._number % 2, len(x)
        if key not in self._views:
            self._views[key] = [buffer[: len(x)] for buffer in self._buffers[key[0]]]
        parts, own_index = self._views[key], self._axis.index
        parts[own_index].copy_(x)
        self._memory.mark(self._number)
        for rank in range(self._axis.size):
            if rank != own_index:
                self._memory.wait(rank, self._number)
        return parts


def takes(x: torch.Tensor, dtype: torch.dtype, limit: int | None) -> bool:
    """Whether to exchange a tensor through mapped memory. limit: as in `verified`.

    The decision does not depend on the tensor's address, which may differ between ranks.

    >>> [takes(torch.empty(count), torch.float32, 1 << 18) for count in (1, 4, 65536, 65540)]
    [False, True, True, False]
    """
    fits = limit is None or (x.nbytes <= limit and x.nbytes % ALIGNMENT == 0)
    return fits and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0


def by_group(axis: Axis) -> Sum:
    """Return a `Sum` that uses the group's collective."""

    def summed(x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        all_reduce(x, axis)
        if into is not None:
            into.add_(x)

    return summed


@dataclass(frozen=True)
class RankExchange:
    """The exchanges of an inference step over an axis."""

    sum: Sum
    gather: Callable[[torch.Tensor], torch.Tensor]
    """Function that gathers x [...] from every rank as [ranks, ...]."""


def exchange_over(axis: Axis, device: torch.device, dtype: torch.dtype) -> RankExchange:
    """Choose how the tensors of an inference step are exchanged. All ranks of the axis must call this together.

    dtype: dtype of most tensors; tensors of other dtypes use collectives.
    """

    def by_collective(x: torch.Tensor) -> torch.Tensor:
        return all_gather(x[None], axis)

    def gather(x: torch.Tensor) -> torch.Tensor:
        return small.gather(x) if isinstance(small, HostSum) and takes(x, dtype, None) else by_collective(x)

    if axis.size == 1 or (device.type != "cpu" and dist.get_backend(axis.group) != "nccl"):
        return RankExchange(by_group(axis), by_collective)
    limit = None if device.type == "cpu" else limit_of(axis.size)

    def open_small() -> Sum:
        return HostSum(axis, dtype, HOST_PIECE) if limit is None else OneShot(axis, device, limit)

    small = verified(axis, device, dtype, open_small, limit)
    return RankExchange(by_size(axis, small, dtype, limit), gather)


def by_size(axis: Axis, small: Sum | None, dtype: torch.dtype, limit: int | None) -> Sum:
    """Return a `Sum` that uses `small` for the tensors that `small` accepts, otherwise the group's collective."""
    large = by_group(axis)
    if small is None:
        return large

    def summed_by_size(x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        (small if takes(x, dtype, limit) else large)(x, into)

    return summed_by_size


def verified(
    axis: Axis, device: torch.device, dtype: torch.dtype, open_small: Callable[[], Sum], limit: int | None
) -> Sum | None:
    """Return `open_small()` if it works and computes correct sums, otherwise None.

    limit: size of the largest tensor that this `Sum` accepts, in bytes; None for any size.

        1 check that the ranks are on one host      because ranks on other hosts cannot share the memory
        2 map memory                                on all ranks or on none
        3 compare its sums with those of the group's collective

    After each phase all ranks agree whether to continue. If they do not continue, a warning with the reason is logged.
    """
    # Every rank takes part in every agreement below, even a rank that has failed, because the other ranks would
    # otherwise hang.
    small, problem = by_group(axis), None
    if len(set(gather_json(socket.gethostname(), axis, device))) > 1:
        problem = "the ranks are on several hosts"
    if problem is None:
        try:
            small = open_small()
        except Exception as error:
            problem = first_line(error)
        problem = first_problem(problem, axis, device)
    if problem is None:
        problem = problem_of(lambda: _trial_error(small, axis, device, dtype, limit or HOST_PIECE + ALIGNMENT), dtype)
        problem = first_problem(problem, axis, device)
    if problem is None:
        return small
    if axis.first:
        log.warning("small tensors are added up over ranks as large ones: in one exchange fails (%s)", problem)
    return None


def _trial_error(small: Sum, axis: Axis, device: torch.device, dtype: torch.dtype, limit: int) -> float:
    """Return the error of `small` relative to the group's sums. Errors: RuntimeError if the sums differ between
    ranks."""
    generator = torch.Generator(device).manual_seed(axis.index)
    sizes = trial_sizes(limit)
    values = [torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype) for size in sizes]
    plain = [x.clone() for x in values]
    accumulated = [torch.ones_like(x) for x in values]
    for x, into in zip(values, accumulated, strict=True):  # sums reuse the buffers without synchronisation
        small(x.clone(), into)
        small(x)
    for x in plain:
        all_reduce(x, axis)
    for x in values:
        gathered = all_gather(x[None], axis)
        if isinstance(small, HostSum) and not torch.equal(small.gather(x), gathered):
            raise RuntimeError("ranks gather other values")
        if not torch.equal(gathered, x.expand_as(gathered)):
            raise RuntimeError("ranks find different sums")
    return error_of([*values, *accumulated], [*plain, *(x + 1 for x in plain)])
