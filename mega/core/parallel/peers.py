"""Exchanges that overlap GEMMs, in which ranks write blocks directly into each other's memory.

NCCL moves data with the GPU's multiprocessors, all of which a GEMM occupies, so an NCCL exchange that is started during
a GEMM runs only after the GEMM. In this module, copy engines write the data, and streams wait for marks in memory;
neither needs a multiprocessor.

    gather   multiply the tokens of each rank as they arrive, this rank's first          (all-gather, then a GEMM)
    scatter  send each part of a GEMM's output when it is done, this rank's last; sum    (a GEMM, then a reduce-scatter)

Both use the same exchange, in which every rank sends one block to every other rank. `MappedPeers` uses memory that all
ranks map (CUDA, one host). `MessagePeers` uses sends and receives of the process group, on any device. This module does
not depend on weights or layers. All ranks of an axis must make the same exchanges in the same order.
"""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.device import CopyDescriptor, CopyStream
from mega.core.ops import observe
from mega.core.ops.trial import first_line
from mega.core.parallel.collectives import first_problem, gather_json
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pieces import BUFFERS, together

Rows = slice

log = logging.getLogger(__name__)


class BlockExchange(Protocol):
    """One exchange of blocks [rows, columns] between all ranks, except for a rank's own block."""

    buffer: torch.Tensor
    """[ranks, rows, columns]: the received blocks, by source rank."""

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        """Send blocks, with their values at this point of the current stream.

        turns: groups of receiving ranks, in the order of sending. `blocks` [ranks x rows, columns] holds either one
        block for each rank of a single turn, or one block for all ranks of all turns. `blocks` must be contiguous. The
        caller may drop `blocks`, but must not write to it.
        """

    def wait(self, ranks: range) -> None:
        """Make the current stream wait until the blocks of `ranks` are in `buffer`."""


class Peers(Protocol):
    """A transport of blocks between the ranks of an axis."""

    axis: Axis
    count: int
    """The number of the last exchange. A replayed CUDA graph reuses the numbers of its capture; the next exchange
    continues from them."""

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        """Begin the next exchange, with the dtype and device of `like`. At most two exchanges may be in flight, and
        both must have the same size."""

    def join(self) -> None:
        """Make the current stream wait until all blocks of this rank are sent. The capture of a CUDA graph must end
        with this call."""

    def replay(self, count: int) -> None:
        """Prepare the replay of a graph whose first exchange has the number `count` + 1, by resetting the marks of all
        ranks."""


def peers(axis: Axis, device: torch.device) -> Peers:
    """Return the transport for a device."""
    if device.type == "meta":
        return MetaPeers(axis)
    return MappedPeers(axis) if device.type == "cuda" else MessagePeers(axis)


def peers_if_mapped(axis: Axis, everyone: Axis, device: torch.device) -> Peers | None:
    """Return the transport for a CUDA device, or None if on any axis a rank cannot map the other ranks' memory. All
    ranks of `everyone` must call this function together, and all get the same result."""
    one_host = len(set(gather_json(socket.gethostname(), axis, device))) == 1
    problem = None if one_host and dist.get_backend(axis.group) == "nccl" else "several hosts, or no NCCL"
    if first_problem(problem, everyone, device) is not None:
        return None
    through = MappedPeers(axis)
    problem = first_problem(through.map(1, device), everyone, device)
    if problem is None:
        return through
    if everyone.first:
        log.warning("tensor ranks exchange tokens without overlap: mapping memory fails (%s)", problem)
    return None


# -- gather and scatter


class Gather:
    """An all-gather, in flight, of x [rows, columns]. Call `parts` (if needed) before `whole`."""

    def __init__(self, x: torch.Tensor, through: Peers):
        self._x, self._axis = x.contiguous(), through.axis
        self._exchange = through.open(*x.shape, x)  # type: ignore[call-arg]
        self._whole = self._exchange.buffer.flatten(0, 1)
        self._ours = False
        self._exchange.send(self._x, *_order(self._axis, len(x), ours_first=True))

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Yield (slice of the gathered rows, tensor of these rows) as soon as these rows have arrived."""
        for ranks in _order(self._axis, len(self._x), ours_first=True, coming=True):
            rows = _rows(ranks, len(self._x))
            if ranks == range(self._axis.index, self._axis.index + 1):
                yield rows, self._x
            else:
                self._fill(ranks)
                yield rows, self._whole[rows]

    def whole(self, *, keep: bool = False) -> torch.Tensor:
        """Return the gathered tensor [ranks x rows, columns]. The second exchange after this one overwrites the tensor.
        keep: whether to return a copy, which is not overwritten."""
        self._fill(range(self._axis.size))
        return self._whole.clone() if keep else self._whole

    def _fill(self, ranks: range) -> None:
        if self._axis.index in ranks and not self._ours:
            self._exchange.buffer[self._axis.index].copy_(self._x)
            self._ours = True
        self._exchange.wait(ranks)


class Scatter:
    """A reduce-scatter of [ranks x rows, columns], from which each rank gets its own rows, summed over ranks."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor, through: Peers):
        self._rows, self._axis, self._like = rows, through.axis, like
        self._exchange = through.open(rows, columns, like)

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Yield (slice of all rows, tensor to which the caller must write these rows). The rows of a slice are sent
        when the caller requests the next slice."""
        rows, buffer, own_index = self._rows, self._exchange.buffer, self._axis.index
        for ranks in _order(self._axis, rows, ours_first=False):
            if ranks == range(own_index, own_index + 1):
                yield _rows(ranks, rows), buffer[own_index]
                continue
            part = self._like.new_empty((len(ranks) * rows, buffer.shape[-1]))
            yield _rows(ranks, rows), part
            self._exchange.send(part, ranks)
            if own_index in ranks:
                buffer[own_index].copy_(part[_rows(range(ranks.index(own_index), ranks.index(own_index) + 1), rows)])

    def blocks(self) -> torch.Tensor:
        """Return this rank's rows as computed by every rank, [ranks, rows, columns]; the caller sums over ranks.

        The second exchange after this one overwrites these rows.
        """
        self._exchange.wait(range(self._axis.size))
        return self._exchange.buffer


def _rows(ranks: range, rows: int) -> Rows:
    return Rows(ranks.start * rows, ranks.stop * rows)


def _order(axis: Axis, rows: int, *, ours_first: bool, coming: bool = False) -> tuple[range, ...]:
    """Return the groups of ranks whose blocks are multiplied together, in the order of sending.

    ours_first: whether this rank's group is first instead of last. coming: whether to return the order in which blocks
    arrive instead.

    >>> axis = Axis("tp", tuple(range(4)), 1)
    >>> _order(axis, 2048, ours_first=True)
    (range(1, 2), range(2, 3), range(3, 4), range(0, 1))
    >>> _order(axis, 2048, ours_first=True, coming=True)
    (range(1, 2), range(0, 1), range(3, 4), range(2, 3))
    >>> _order(axis, 1024, ours_first=False)
    (range(2, 4), range(0, 2))
    """
    return _turns(axis.size, axis.index, together(axis.size, rows), ours_first, coming)


@cache
def _turns(size: int, index: int, count: int, ours_first: bool, coming: bool) -> tuple[range, ...]:
    """Compute `_order`, with cached results. count: number of ranks in a group."""
    groups = size // count
    steps = range(groups) if ours_first else range(1, groups + 1)
    begins = [(index // count + (-step if coming else step)) % groups * count for step in steps]
    return tuple(range(begin, begin + count) for begin in begins)


# -- the transport by messages


class MessagePeers:
    """A transport that uses sends and receives of the process group."""

    def __init__(self, axis: Axis):
        self.axis, self.count = axis, 0

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        self.count += 1
        return _MessageExchange(self.axis, like.new_empty((self.axis.size, rows, columns)))

    def join(self) -> None:
        """Do nothing, because sends are complete when the receives of the other ranks are complete."""

    def replay(self, count: int) -> None:
        """Do nothing, because this transport does not use marks."""


class _MessageExchange:
    def __init__(self, axis: Axis, buffer: torch.Tensor):
        self.buffer, self._axis = buffer, axis
        self._coming = {
            rank: dist.irecv(buffer[rank], axis.ranks[rank], axis.group)
            for rank in range(axis.size)
            if rank != axis.index
        }
        self._going: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        rows, ranks = self.buffer.shape[1], [rank for ranks in turns for rank in ranks]
        each = blocks.split(rows) if len(blocks) > rows else [blocks] * len(ranks)
        for rank, block in zip(ranks, each, strict=True):
            if rank != self._axis.index:
                self._going.append((dist.isend(block, self._axis.ranks[rank], self._axis.group), block))

    def wait(self, ranks: range) -> None:
        for rank in ranks:
            work = self._coming.pop(rank, None)
            if work is not None:
                work.wait()
        if not self._coming:
            for sent, _ in self._going:
                if sent is not None:
                    sent.wait()
            self._going.clear()


# -- the transport through memory that all ranks map


class MappedPeers:
    """A transport that copies blocks into the memory of the other ranks, which this process maps.

    The memory of each rank, with n ranks:

        buffer 0: n blocks | buffer 1: n blocks | ... BUFFERS in all | marks [BUFFERS, n], int32

    Each buffer has one mark per source rank, which is the number of the last exchange for which this source wrote its
    block to the buffer. The first exchange allocates the memory, and a larger exchange reallocates the memory. Because
    the host is the bottleneck, all arguments of an exchange except its number are cached and reused by the next
    exchange with the same buffer.
    """

    def __init__(self, axis: Axis):
        assert axis.group is not None
        self.axis, self.count, self._bytes = axis, 0, 0
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._begins: list[int] = []
        """The addresses at which this process maps the memory of every rank."""
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}
        self._descriptors: dict[tuple[object, ...], list[CopyDescriptor]] = {}
        self._waits: dict[tuple[int, range], tuple[int, ...]] = {}
        self._sent: list[list[torch.UntypedStorage]] = [[] for _ in range(BUFFERS)]
        """Storage of sent blocks, by buffer. The storage is released when the next exchange with the buffer begins."""
        self._copies = CopyStream()

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        self._make(rows * columns * like.element_size(), like.device)
        self.count += 1
        self._sent[self.count % BUFFERS].clear()
        return _MappedExchange(self, self.count, self._buffer((rows, columns), like.dtype))

    def _buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's buffer for the current exchange, as [ranks, rows, columns]."""
        number = self.count % BUFFERS
        if (number, shape, dtype) not in self._buffers:
            assert self._memory is not None
            begin, size = self._place(number, 0, 0), self.axis.size * prod(shape) * dtype.itemsize
            whole = self._memory[begin : begin + size].view(dtype).view(self.axis.size, *shape)
            self._buffers[number, shape, dtype] = whole
        return self._buffers[number, shape, dtype]

    def join(self) -> None:
        self._copies.join()

    def replay(self, count: int) -> None:
        if self._memory is None:
            return
        # The marks can be reset, because this rank's stream has waited for every block, and no rank writes before the
        # all-reduce below. Marks are int32, so the count wraps around.
        marks = self._memory[self._mark(self.axis.index, 0, 0) - self._begins[self.axis.index] :].view(torch.int32)
        marks.fill_((count + 2**31) % 2**32 - 2**31)
        dist.all_reduce(self._meeting, group=self.axis.group)

    def write(self, blocks: torch.Tensor, turns: tuple[range, ...], number: int, size: int) -> None:
        """Copy `blocks` to the ranks of `turns`, and set this rank's marks on those ranks. size: number of bytes in a
        block."""
        per_rank = blocks.nbytes > size
        key = (number % BUFFERS, turns, size, per_rank)
        if key not in self._descriptors:
            self._descriptors[key] = [self._descriptor(ranks, number, size, per_rank) for ranks in turns]
        self._copies.copy(blocks, self._descriptors[key], number)
        self._sent[number % BUFFERS].append(blocks.untyped_storage())  # a tensor would keep its autograd graph alive

    def _descriptor(self, ranks: range, number: int, size: int, per_rank: bool) -> CopyDescriptor:
        own_index = self.axis.index
        targets = [(position, rank) for position, rank in enumerate(ranks) if rank != own_index]
        return CopyDescriptor(
            tuple(
                (position * size if per_rank else 0, self._begins[rank] + self._place(number, own_index, size), size)
                for position, rank in targets
            ),
            tuple(self._mark(rank, number, own_index) for _, rank in targets),
        )

    def wait(self, ranks: range, number: int) -> None:
        key = (number % BUFFERS, ranks)
        if key not in self._waits:
            own_index = self.axis.index
            self._waits[key] = tuple(self._mark(own_index, number, rank) for rank in ranks if rank != own_index)
        self._copies.wait(self._waits[key], number)

    def _place(self, number: int, writer: int, size: int) -> int:
        return number % BUFFERS * self.axis.size * self._bytes + writer * size

    def _mark(self, rank: int, number: int, writer: int) -> int:
        marks = BUFFERS * self.axis.size * self._bytes
        return self._begins[rank] + marks + 4 * (number % BUFFERS * self.axis.size + writer)

    def _make(self, size: int, device: torch.device) -> None:
        """Allocate and map memory for blocks of `size` bytes, unless the current memory is large enough."""
        if size <= self._bytes:
            return
        if (problem := self.map(size, device)) is not None:
            raise ValueError(
                f"--tp-overlap: ranks {self.axis.ranks} cannot map each other's memory ({problem}); give "
                "--no-tp-overlap, or keep tensor ranks on one host whose devices reach each other"
            )

    def map(self, size: int, device: torch.device) -> str | None:
        """Allocate and map memory for blocks of `size` bytes, on all ranks of the axis together. Return the reason if
        this fails on any rank, otherwise None."""
        import torch.distributed._symmetric_memory as symmetric

        assert self.axis.group is not None
        self._bytes = -(-size // 512) * 512
        self._buffers.clear()
        self._descriptors.clear()
        self._waits.clear()
        self._copies.settle()
        _barrier(self.axis, device)  # no rank reads or writes the old memory any more
        self._handle = self._memory = None
        marks = BUFFERS * self.axis.size
        size, problem = BUFFERS * self.axis.size * self._bytes + 4 * marks, None
        try:
            self._memory = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
            self._copies.settle()
            self._handle = symmetric.rendezvous(self._memory, self.axis.group)
        except RuntimeError as error:
            problem = first_line(error)
        problem = first_problem(problem, self.axis, device)  # also a barrier: now the marks of all ranks are zero
        if problem is None:
            self._begins = [int(begin) for begin in self._handle.buffer_ptrs]
            self._meeting = torch.zeros(1, device=device)
        return problem


def _barrier(axis: Axis, device: torch.device) -> None:
    """A barrier on `device`. Without a device argument torch warns that it uses the current device."""
    dist.barrier(axis.group, device_ids=None if device.index is None else [device.index])


class _MappedExchange:
    def __init__(self, through: MappedPeers, number: int, buffer: torch.Tensor):
        self.buffer, self._through, self._number = buffer, through, number
        self._bytes = buffer.nbytes // len(buffer)

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._through.write(blocks, turns, self._number, self._bytes)

    def wait(self, ranks: range) -> None:
        self._through.wait(ranks, self._number)


# -- the transport for the meta device


class MetaPeers(MessagePeers):
    """A transport for meta tensors that allocates and keeps alive the same tensors as `MappedPeers`.

    memory: represents the memory that ranks map, which torch's allocator does not count. mapped: maximum number of
    bytes that a rank has mapped so far.
    """

    def __init__(self, axis: Axis):
        super().__init__(axis)
        self.memory, self.mapped = torch.empty(1 << 50, dtype=torch.uint8, device="meta"), 0
        self._sent: list[list[torch.UntypedStorage]] = [[] for _ in range(BUFFERS)]

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        self.count += 1
        size = self.axis.size * rows * columns * like.element_size()
        self.mapped = max(self.mapped, BUFFERS * size)
        sent = self._sent[self.count % BUFFERS]
        sent.clear()
        buffer = self.memory[:size].view(like.dtype).view(self.axis.size, rows, columns)
        return _MetaExchange(self.axis, self.count, buffer, sent)

    def settle(self) -> int:
        """Return the number of bytes in sent blocks that only their exchanges keep alive, and replace these blocks with
        storages of equal size."""
        freed_bytes = 0
        for sent in self._sent:
            alive = [weakref.ref(storage) for storage in sent]
            sizes = [storage.nbytes() for storage in sent]
            sent.clear()
            for storage, size in zip(alive, sizes, strict=True):
                if storage() is None:
                    freed_bytes += size
                    sent.append(torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage())
        return freed_bytes


class _MetaExchange:
    def __init__(self, axis: Axis, number: int, buffer: torch.Tensor, sent: list[torch.UntypedStorage]):
        self.buffer, self._sent, self._axis, self._number = buffer, sent, axis, number
        self._coming = set(range(axis.size)) - {axis.index}

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._sent.append(blocks.untyped_storage())
        receivers = sum(rank != self._axis.index for ranks in turns for rank in ranks)
        observe.send(self._number, self.buffer.nbytes // len(self.buffer), receivers)

    def wait(self, ranks: range) -> None:
        """Report the blocks of `ranks` as received."""
        if expected := self._coming & set(ranks):
            self._coming -= expected
            observe.receive(self._number, len(expected))
