"""What a step that only answers exchanges over an axis, through memory that all its ranks map.

A decoding step adds up 8 KB twice a block, and a collective of so little is nearly all latency. Here every rank writes
its tensor where each other one reads it, marks it there, waits for the marks of the others, and adds up all of them
itself, in the order of ranks: the same bits on every rank, every time.

    OneShot   CUDA ranks of one host on NCCL: one kernel (ops/kernels/mapped_sum.py), without NVLink multicast, which a
              graph can hold
    HostSum   ranks of one host on gloo, which gather logits by it too, and tensors of any size, piece by piece: what
              gloo's sockets take is more than what every rank's reading of all parts does

Every CUDA rank reads what all have, so larger tensors, which collectives share out, stay with these; between two ranks
there is nothing to share. All ranks of an axis add up the same tensors in the same order. Where a CUDA rank ends, the
others wait in the middle of a sum, without a timeout, until their launcher ends them.
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
"""A tensor is so many bytes, or a multiple: a thread reads as many at once."""

HOST_PIECE = 1 << 20
"""Bytes of a piece on a host."""

log = logging.getLogger(__name__)


class Sum(Protocol):
    """summed(x) adds up x over an axis, in place; summed(x, into) adds the sum to `into` instead, and leaves x open."""

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None: ...


def limit_of(ranks: int) -> int:
    """Bytes of the largest tensor that is added up in one exchange.

    >>> [limit_of(ranks) >> 10 for ranks in (2, 3, 4, 8)]
    [16384, 7232, 4096, 1024]
    """
    whole = 1 << 16  # of which every thread's part begins at a multiple of ALIGNMENT
    return max((1 << 26) // ranks**2 // whole * whole, 1 << 19)


def tried_sizes(limit: int) -> tuple[int, ...]:
    """Bytes of the tensors that are tried: sums of less than a warp, of one block of threads, of some, and the largest;
    each several times, as both buffers take turns."""
    return (ALIGNMENT, 8 * 2**10, 40 * 2**10 + ALIGNMENT, limit) * 3


class OneShot:
    """All ranks of the axis open it together. limit: bytes of the largest tensor.

    Errors: RuntimeError where memory cannot be mapped.
    """

    def __init__(self, axis: Axis, device: torch.device, limit: int):
        import torch.distributed._symmetric_memory as symmetric

        from mega.core.ops.kernels import mapped_sum

        assert axis.group is not None
        self._run, self._rank, self._limit = mapped_sum.mapped_sum, axis.index, limit
        # Of its own, not by `symmetric.empty`, which takes it from a pool that another engine may use.
        memory: Any = symmetric._SymmetricMemory
        size = mapped_sum.memory_bytes(axis.size, limit)[1]
        self._buffer: torch.Tensor = memory.empty_strided_p2p((size,), (1,), torch.uint8, device).zero_()
        self._counts = torch.zeros(mapped_sum.LANES, dtype=torch.int64, device=device)
        handle = symmetric.rendezvous(self._buffer, axis.group)
        self._memories = torch.tensor([int(begin) for begin in handle.buffer_ptrs], device=device)
        all_reduce(self._counts, axis)  # all marks are zero before the first sum
        self._memories.tolist()

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._run(x, into, self._memories, self._counts, self._rank, self._limit)


class HostSum:
    """The same on a host, of contiguous tensors in dtype of any size. piece: bytes of which at a time."""

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
        """The first two parts and then the others, whatever it adds them to: the same bits on every rank."""
        first, second, *others = self._parts(x)
        total = torch.add(first, second, out=x if into is None else None)
        for part in others:
            total += part
        if into is not None:
            into += total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank, as [ranks, ...]."""
        out = x.new_empty((self._axis.size, x.numel()))
        for begin in range(0, x.numel(), self._most):
            here = x.view(-1)[begin : begin + self._most]
            for row, part in zip(out, self._parts(here), strict=True):
                row[begin : begin + len(here)] = part
        return out.view(-1, *x.shape)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [n] of every rank, good until the next call but one."""
        self._number += 1
        key = self._number % 2, len(x)
        if key not in self._views:
            self._views[key] = [buffer[: len(x)] for buffer in self._buffers[key[0]]]
        parts, own = self._views[key], self._axis.index
        parts[own].copy_(x)
        self._memory.mark(self._number)
        for rank in range(self._axis.size):
            if rank != own:
                self._memory.wait(rank, self._number)
        return parts


def takes(x: torch.Tensor, dtype: torch.dtype, limit: int | None) -> bool:
    """Whether a tensor is added up in one exchange; its place in memory aside, which may differ between ranks. limit:
    as of `tried`.

    >>> [takes(torch.empty(count), torch.float32, 1 << 18) for count in (1, 4, 65536, 65540)]
    [False, True, True, False]
    """
    fits = limit is None or (x.nbytes <= limit and x.nbytes % ALIGNMENT == 0)
    return fits and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0


def by_group(axis: Axis) -> Sum:
    """Sums by the group's collective."""

    def summed(x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        all_reduce(x, axis)
        if into is not None:
            into.add_(x)

    return summed


@dataclass(frozen=True)
class RankExchange:
    """What ranks of an axis do with tensors of a step. gather: x [...] of every rank, as [ranks, ...]."""

    sum: Sum
    gather: Callable[[torch.Tensor], torch.Tensor]


def exchange_over(axis: Axis, device: torch.device, dtype: torch.dtype) -> RankExchange:
    """How tensors are exchanged over the axis in a step of a model that only answers. All its ranks call this together.

    dtype: of most of them.
    """

    def by_collective(x: torch.Tensor) -> torch.Tensor:
        return all_gather(x[None], axis)

    def gather(x: torch.Tensor) -> torch.Tensor:
        return small.gather(x) if isinstance(small, HostSum) and takes(x, dtype, None) else by_collective(x)

    if axis.size == 1 or (device.type != "cpu" and dist.get_backend(axis.group) != "nccl"):
        return RankExchange(by_group(axis), by_collective)
    limit = None if device.type == "cpu" else limit_of(axis.size)

    def opened() -> Sum:
        return HostSum(axis, dtype, HOST_PIECE) if limit is None else OneShot(axis, device, limit)

    small = tried(axis, device, dtype, opened, limit)
    return RankExchange(by_size(axis, small, dtype, limit), gather)


def by_size(axis: Axis, small: Sum | None, dtype: torch.dtype, limit: int | None) -> Sum:
    """Sums by `small` of what it takes, of others by the group."""
    large = by_group(axis)
    if small is None:
        return large

    def summed_by_size(x: torch.Tensor, into: torch.Tensor | None = None) -> None:
        (small if takes(x, dtype, limit) else large)(x, into)

    return summed_by_size


def tried(
    axis: Axis, device: torch.device, dtype: torch.dtype, open_small: Callable[[], Sum], limit: int | None
) -> Sum | None:
    """`open_small()`, which adds up tensors of at most `limit` bytes (None: of any size), where it is right.

        1 see that the ranks are on one host        else some would wait for memory that others cannot send them
        2 map memory                                on every rank, or on none
        3 compare with the group's sums

    After each all ranks agree whether they continue. Where they do not, a line says why.
    """
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
        problem = problem_of(lambda: _off(small, axis, device, dtype, limit or HOST_PIECE + ALIGNMENT), dtype)
        problem = first_problem(problem, axis, device)
    if problem is None:
        return small
    if axis.first:
        log.warning("small tensors are added up over ranks as large ones: in one exchange fails (%s)", problem)
    return None


def _off(small: Sum, axis: Axis, device: torch.device, dtype: torch.dtype, limit: int) -> float:
    """The error against the group's sums. Errors: RuntimeError where ranks find different bits."""
    generator = torch.Generator(device).manual_seed(axis.index)
    sizes = tried_sizes(limit)
    found = [torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype) for size in sizes]
    plain = [x.clone() for x in found]
    added = [torch.ones_like(x) for x in found]
    for x, into in zip(found, added, strict=True):  # one after the other, so that one's memory is the next one's
        small(x.clone(), into)
        small(x)
    for x in plain:
        all_reduce(x, axis)
    for x in found:
        everywhere = all_gather(x[None], axis)
        if isinstance(small, HostSum) and not torch.equal(small.gather(x), everywhere):
            raise RuntimeError("ranks gather other values")
        if not torch.equal(everywhere, x.expand_as(everywhere)):
            raise RuntimeError("ranks find different sums")
    return error_of([*found, *added], [*plain, *(x + 1 for x in plain)])
