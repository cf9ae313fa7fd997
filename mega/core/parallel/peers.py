"""Exchanges that overlap the GEMMs they feed: blocks written straight into the memory of the other ranks.

NCCL moves data with the multiprocessors, and a GEMM fills all of those, so an exchange that should overlap it waits
for its end. Here copy engines write, and streams wait for marks in memory: neither takes a multiprocessor.

    gather   tokens of every rank, multiplied as they arrive, ours first       (all-gather, then a product)
    scatter  a product whose parts leave as they are made, ours last, and sum  (a product, then reduce-scatter)

Both are built of one thing, an exchange: every rank sends each other one block. `Mapped` exchanges through memory that
all ranks map (CUDA, one host), `Messages` by the group's sends, on any device; they differ in nothing else. Knows
neither weights nor layers. All ranks of an axis make the same exchanges in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.device import CopyDescriptor, CopyStream
from mega.core.ops import observe
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pieces import BUFFERS, together

Rows = slice


class BlockExchange(Protocol):
    """Blocks [rows, columns] on their way: `buffer` [ranks, rows, columns] holds what comes, by rank. Our own block is
    neither sent nor waited for."""

    buffer: torch.Tensor

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        """To each rank of the only turn its block of `blocks` [ranks x rows, columns], or to all ranks of all turns the
        only one; as the current stream leaves them. They are contiguous, and may be let go, but not written to."""

    def wait(self, ranks: range) -> None:
        """What follows on the current stream finds the blocks of `ranks` in their places."""


class Peers(Protocol):
    """count: the number of the last exchange. One that is played again has the number that it was recorded with, and
    the next continues from there."""

    axis: Axis
    count: int

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        """The next exchange; `like` has its dtype and device. At most two are under way, of one size."""

    def join(self) -> None:
        """What follows on the current stream finds all blocks of ours gone. A recording of exchanges ends with it."""

    def replay(self, count: int) -> None:
        """Before a recording is played whose first exchange is number `count` + 1: no rank has seen a block of it."""


def peers(axis: Axis, device: torch.device) -> Peers:
    if device.type == "meta":
        return Imagined(axis)
    return Mapped(axis) if device.type == "cuda" else Messages(axis)


# -- what they are for


class Gather:
    """x [rows, columns] of every rank on its way to all. Parts first, if at all, then the whole."""

    def __init__(self, x: torch.Tensor, through: Peers):
        self._x, self._axis = x.contiguous(), through.axis
        self._exchange = through.open(*x.shape, x)  # type: ignore[call-arg]
        self._whole = self._exchange.buffer.flatten(0, 1)
        self._ours = False
        self._exchange.send(self._x, *_order(self._axis, len(x), ours_first=True))

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """(which rows of the whole, these rows), each as soon as it is here."""
        for ranks in _order(self._axis, len(self._x), ours_first=True, coming=True):
            where = _rows(ranks, len(self._x))
            if ranks == range(self._axis.index, self._axis.index + 1):
                yield where, self._x
            else:
                self._fill(ranks)
                yield where, self._whole[where]

    def whole(self, *, keep: bool = False) -> torch.Tensor:
        """[ranks x rows, columns], good until the next exchange but one; keep: for longer."""
        self._fill(range(self._axis.size))
        return self._whole.clone() if keep else self._whole

    def _fill(self, ranks: range) -> None:
        if self._axis.index in ranks and not self._ours:
            self._exchange.buffer[self._axis.index].copy_(self._x)
            self._ours = True
        self._exchange.wait(ranks)


class Scatter:
    """A sum over ranks of [ranks x rows, columns], of which each keeps its own rows."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor, through: Peers):
        self._rows, self._axis, self._like = rows, through.axis, like
        self._exchange = through.open(rows, columns, like)

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """(which rows of the whole, where to put them): sent when the next is asked for."""
        rows, buffer, ours = self._rows, self._exchange.buffer, self._axis.index
        for ranks in _order(self._axis, rows, ours_first=False):
            if ranks == range(ours, ours + 1):
                yield _rows(ranks, rows), buffer[ours]
                continue
            part = self._like.new_empty((len(ranks) * rows, buffer.shape[-1]))
            yield _rows(ranks, rows), part
            self._exchange.send(part, ranks)
            if ours in ranks:
                buffer[ours].copy_(part[_rows(range(ranks.index(ours), ranks.index(ours) + 1), rows)])

    def blocks(self) -> torch.Tensor:
        """[ranks, rows, columns]: what every rank made of our rows, to be added up before the next exchange but one."""
        self._exchange.wait(range(self._axis.size))
        return self._exchange.buffer


def _rows(ranks: range, rows: int) -> Rows:
    return Rows(ranks.start * rows, ranks.stop * rows)


def _order(axis: Axis, rows: int, *, ours_first: bool, coming: bool = False) -> tuple[range, ...]:
    """Ranks that go through one product together, in the order in which they are sent to, or in which theirs come.

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
    """count: of ranks that go together."""
    groups = size // count
    steps = range(groups) if ours_first else range(1, groups + 1)
    begins = [(index // count + (-step if coming else step)) % groups * count for step in steps]
    return tuple(range(begin, begin + count) for begin in begins)


# -- by messages


class Messages:
    """Exchanges by sends and receives of the group."""

    def __init__(self, axis: Axis):
        self.axis, self.count = axis, 0

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        self.count += 1
        return _Posted(self.axis, like.new_empty((self.axis.size, rows, columns)))

    def join(self) -> None:
        """Blocks have gone when theirs have come."""

    def replay(self, count: int) -> None:
        """A message is of no number."""


class _Posted:
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


# -- through memory that all ranks map


class Mapped:
    """Exchanges by copies into memory of the other ranks, which is mapped here.

    The memory is BUFFERS buffers of one block a rank, followed by a mark for each buffer and rank: the number of the
    last exchange whose block has been written. It is allocated by the first exchange, and again by a larger one. What
    an exchange needs except its number is kept for the next one that uses its buffer: the host is the bottleneck.
    """

    def __init__(self, axis: Axis):
        assert axis.group is not None
        self.axis, self.count, self._bytes = axis, 0, 0
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._begins: list[int] = []
        """Where every rank's memory is mapped here."""
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}
        self._descriptors: dict[tuple[object, ...], list[CopyDescriptor]] = {}
        self._waits: dict[tuple[int, range], tuple[int, ...]] = {}
        self._sent: list[list[torch.UntypedStorage]] = [[] for _ in range(BUFFERS)]
        """Memory of blocks by buffer, kept until all ranks have them: when its next exchange begins."""
        self._copies = CopyStream()

    def open(self, rows: int, columns: int, like: torch.Tensor) -> BlockExchange:
        self._make(rows * columns * like.element_size(), like.device)
        self.count += 1
        self._sent[self.count % BUFFERS].clear()
        return _Written(self, self.count, self._buffer((rows, columns), like.dtype))

    def _buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """[ranks, rows, columns] of our memory for the exchange at hand."""
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
        # Our stream has waited for every block so far, so no rank writes here before all have met.
        marks = self._memory[self._mark(self.axis.index, 0, 0) - self._begins[self.axis.index] :].view(torch.int32)
        marks.fill_((count + 2**31) % 2**32 - 2**31)
        dist.all_reduce(self._meeting, group=self.axis.group)

    def write(self, blocks: torch.Tensor, turns: tuple[range, ...], number: int, size: int) -> None:
        """size: bytes of a block."""
        several = blocks.nbytes > size
        key = (number % BUFFERS, turns, size, several)
        if key not in self._descriptors:
            self._descriptors[key] = [self._descriptor(ranks, number, size, several) for ranks in turns]
        self._copies.copy(blocks, self._descriptors[key], number)
        self._sent[number % BUFFERS].append(blocks.untyped_storage())  # not the tensor, which knows what it was made of

    def _descriptor(self, ranks: range, number: int, size: int, several: bool) -> CopyDescriptor:
        ours = self.axis.index
        to = [(place, rank) for place, rank in enumerate(ranks) if rank != ours]
        return CopyDescriptor(
            tuple(
                (place * size if several else 0, self._begins[rank] + self._place(number, ours, size), size)
                for place, rank in to
            ),
            tuple(self._mark(rank, number, ours) for _, rank in to),
        )

    def wait(self, ranks: range, number: int) -> None:
        key = (number % BUFFERS, ranks)
        if key not in self._waits:
            ours = self.axis.index
            self._waits[key] = tuple(self._mark(ours, number, rank) for rank in ranks if rank != ours)
        self._copies.wait(self._waits[key], number)

    def _place(self, number: int, writer: int, size: int) -> int:
        return number % BUFFERS * self.axis.size * self._bytes + writer * size

    def _mark(self, rank: int, number: int, writer: int) -> int:
        marks = BUFFERS * self.axis.size * self._bytes
        return self._begins[rank] + marks + 4 * (number % BUFFERS * self.axis.size + writer)

    def _make(self, size: int, device: torch.device) -> None:
        """Room for blocks of `size` bytes."""
        if size <= self._bytes:
            return
        import torch.distributed._symmetric_memory as symmetric

        assert self.axis.group is not None
        self._bytes = -(-size // 512) * 512
        self._buffers.clear()
        self._descriptors.clear()
        self._waits.clear()
        self._copies.settle()
        _barrier(self.axis, device)  # no rank reads or writes the old one any more
        self._handle = self._memory = None
        marks = BUFFERS * self.axis.size
        self._memory = symmetric.empty(
            BUFFERS * self.axis.size * self._bytes + 4 * marks, dtype=torch.uint8, device=device
        ).zero_()
        self._copies.settle()
        try:
            self._handle = symmetric.rendezvous(self._memory, self.axis.group)
        except RuntimeError as error:
            raise ValueError(
                f"--tp-overlap: ranks {self.axis.ranks} cannot map each other's memory ({error}); leave it out, or "
                "keep tensor ranks on one host whose devices reach each other"
            ) from None
        self._begins = [int(begin) for begin in self._handle.buffer_ptrs]
        self._meeting = torch.zeros(1, device=device)
        _barrier(self.axis, device)  # all marks are zero


def _barrier(axis: Axis, device: torch.device) -> None:
    """The device is named: else torch warns that it has to take the current one."""
    dist.barrier(axis.group, device_ids=None if device.index is None else [device.index])


class _Written:
    def __init__(self, through: Mapped, number: int, buffer: torch.Tensor):
        self.buffer, self._through, self._number = buffer, through, number
        self._bytes = buffer.nbytes // len(buffer)

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._through.write(blocks, turns, self._number, self._bytes)

    def wait(self, ranks: range) -> None:
        self._through.wait(ranks, self._number)


# -- on the meta device


class Imagined(Messages):
    """Exchanges of shapes alone, that take and keep what those of `Mapped` do.

    memory: what all ranks would map, so far as exchanges have asked for it; the allocator knows nothing of it.
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
        return _Imagined(self.axis, self.count, buffer, sent)

    def settle(self) -> int:
        """Bytes of blocks that live for their exchanges alone; others stay in their place."""
        alone = 0
        for sent in self._sent:
            alive = [weakref.ref(storage) for storage in sent]
            sizes = [storage.nbytes() for storage in sent]
            sent.clear()
            for storage, size in zip(alive, sizes, strict=True):
                if storage() is None:
                    alone += size
                    sent.append(torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage())
        return alone


class _Imagined:
    def __init__(self, axis: Axis, number: int, buffer: torch.Tensor, sent: list[torch.UntypedStorage]):
        self.buffer, self._sent, self._axis, self._number = buffer, sent, axis, number
        self._coming = set(range(axis.size)) - {axis.index}

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._sent.append(blocks.untyped_storage())
        others = sum(rank != self._axis.index for ranks in turns for rank in ranks)
        observe.send(self._number, self.buffer.nbytes // len(self.buffer), others)

    def wait(self, ranks: range) -> None:
        """They have come."""
        if expected := self._coming & set(ranks):
            self._coming -= expected
            observe.receive(self._number, len(expected))
