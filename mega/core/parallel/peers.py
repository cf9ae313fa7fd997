"""Exchanges that run beside the products they feed: blocks written straight into the memory of the other ranks.

NCCL moves data with the multiprocessors, and a product fills those to the last, so an exchange that should run beside
it waits for its end. Here copy engines write, and streams wait for marks in memory: neither takes a multiprocessor.

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
from mega.core.parallel.mesh import Axis
from mega.core.plan.pieces import SLOTS, together

Rows = slice


class Exchange(Protocol):
    """Blocks [rows, columns] on their way: `slot` [ranks, rows, columns] holds what comes, by rank. Our own block is
    neither sent nor waited for."""

    slot: torch.Tensor

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        """To each rank of the only turn its block of `blocks` [ranks x rows, columns], or to all ranks of all turns the
        only one; as the current stream leaves them. They are contiguous, and may be let go, but not written to."""

    def arrive(self, ranks: range) -> None:
        """What follows on the current stream finds the blocks of `ranks` in their places."""


class Peers(Protocol):
    """count: the number of the last exchange. One that is played again has the number that it was recorded with, and
    the next goes on from there."""

    axis: Axis
    count: int

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        """The next exchange; `like` has its dtype and device. At most two are under way, of one size."""

    def join(self) -> None:
        """What follows on the current stream finds all blocks of ours gone. A recording of exchanges ends with it."""

    def again(self, count: int) -> None:
        """Before a recording is played whose first exchange is number `count` + 1: nobody has seen a block of it."""


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
        self._whole = self._exchange.slot.flatten(0, 1)
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
            self._exchange.slot[self._axis.index].copy_(self._x)
            self._ours = True
        self._exchange.arrive(ranks)


class Scatter:
    """A sum over ranks of [ranks x rows, columns], of which each keeps its own rows."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor, through: Peers):
        self._rows, self._axis, self._like = rows, through.axis, like
        self._exchange = through.open(rows, columns, like)

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """(which rows of the whole, where to put them): sent when the next is asked for."""
        rows, slot, ours = self._rows, self._exchange.slot, self._axis.index
        for ranks in _order(self._axis, rows, ours_first=False):
            if ranks == range(ours, ours + 1):
                yield _rows(ranks, rows), slot[ours]
                continue
            part = self._like.new_empty((len(ranks) * rows, slot.shape[-1]))
            yield _rows(ranks, rows), part
            self._exchange.send(part, ranks)
            if ours in ranks:
                slot[ours].copy_(part[_rows(range(ranks.index(ours), ranks.index(ours) + 1), rows)])

    def blocks(self) -> torch.Tensor:
        """[ranks, rows, columns]: what every rank made of our rows, to be added up before the next exchange but one."""
        self._exchange.arrive(range(self._axis.size))
        return self._exchange.slot


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

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        self.count += 1
        return _Posted(self.axis, like.new_empty((self.axis.size, rows, columns)))

    def join(self) -> None:
        """Blocks have gone when theirs have come."""

    def again(self, count: int) -> None:
        """A message is of no number."""


class _Posted:
    def __init__(self, axis: Axis, slot: torch.Tensor):
        self.slot, self._axis = slot, axis
        self._coming = {
            rank: dist.irecv(slot[rank], axis.ranks[rank], axis.group)
            for rank in range(axis.size)
            if rank != axis.index
        }
        self._going: list[Any] = []

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        rows, ranks = self.slot.shape[1], [rank for ranks in turns for rank in ranks]
        each = blocks.split(rows) if len(blocks) > rows else [blocks] * len(ranks)
        for rank, block in zip(ranks, each, strict=True):
            if rank != self._axis.index:
                self._going.append((dist.isend(block, self._axis.ranks[rank], self._axis.group), block))

    def arrive(self, ranks: range) -> None:
        for rank in ranks:
            work = self._coming.pop(rank, None)
            if work is not None:
                work.wait()
        if not self._coming:
            for sent, _ in self._going:
                sent.wait()
            self._going.clear()


# -- through memory that all ranks map


class Mapped:
    """Exchanges by copies into memory of the other ranks, which is mapped here.

    The memory is SLOTS slots of one block a rank, and behind them a mark for each slot and rank: the number of the last
    exchange whose block has been written. It is made by the first exchange, and anew where a larger one comes. What an
    exchange needs but its number is kept for the next one that uses its slot: the host is what is short.
    """

    def __init__(self, axis: Axis):
        assert axis.group is not None
        self.axis, self.count, self._bytes = axis, 0, 0
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._begins: list[int] = []
        """Where every rank's memory is mapped here."""
        self._slots: dict[tuple[Any, ...], torch.Tensor] = {}
        self._ways: dict[tuple[Any, ...], list[CopyDescriptor]] = {}
        self._waits: dict[tuple[int, range], tuple[int, ...]] = {}
        self._sent: list[list[torch.UntypedStorage]] = [[] for _ in range(SLOTS)]
        """Memory of blocks by slot, kept until all ranks have them: they do when the slot's next exchange begins."""
        self._beside = CopyStream()

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        self._make(rows * columns * like.element_size(), like.device)
        self.count += 1
        self._sent[self.count % SLOTS].clear()
        return _Written(self, self.count, self._slot((rows, columns), like.dtype))

    def _slot(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """[ranks, rows, columns] of our memory for the exchange at hand."""
        number = self.count % SLOTS
        if (number, shape, dtype) not in self._slots:
            assert self._memory is not None
            begin, size = self._place(number, 0, 0), self.axis.size * prod(shape) * dtype.itemsize
            whole = self._memory[begin : begin + size].view(dtype).view(self.axis.size, *shape)
            self._slots[number, shape, dtype] = whole
        return self._slots[number, shape, dtype]

    def join(self) -> None:
        self._beside.join()

    def again(self, count: int) -> None:
        if self._memory is None:
            return
        # Our stream has waited for every block so far, so nobody writes here before all have met.
        marks = self._memory[self._mark(self.axis.index, 0, 0) - self._begins[self.axis.index] :].view(torch.int32)
        marks.fill_((count + 2**31) % 2**32 - 2**31)
        dist.all_reduce(self._meeting, group=self.axis.group)

    def write(self, blocks: torch.Tensor, turns: tuple[range, ...], number: int, size: int) -> None:
        """size: bytes of a block."""
        several = blocks.nbytes > size
        key = (number % SLOTS, turns, size, several)
        if key not in self._ways:
            self._ways[key] = [self._way(ranks, number, size, several) for ranks in turns]
        self._beside.copy(blocks, self._ways[key], number)
        self._sent[number % SLOTS].append(blocks.untyped_storage())  # not the tensor, which knows what it was made of

    def _way(self, ranks: range, number: int, size: int, several: bool) -> CopyDescriptor:
        to = [(place, rank, self._writer(rank)) for place, rank in enumerate(ranks) if rank != self.axis.index]
        return CopyDescriptor(
            tuple(
                (place * size if several else 0, self._begins[rank] + self._place(number, writer, size), size)
                for place, rank, writer in to
            ),
            tuple(self._mark(rank, number, writer) for _, rank, writer in to),
        )

    def wait(self, ranks: range, number: int) -> None:
        key = (number % SLOTS, ranks)
        if key not in self._waits:
            ours = self.axis.index
            self._waits[key] = tuple(self._mark(ours, number, rank) for rank in ranks if rank != ours)
        self._beside.wait(self._waits[key], number)

    def _writer(self, rank: int) -> int:
        """As whom we write to `rank`."""
        return self.axis.index

    def _place(self, number: int, writer: int, size: int) -> int:
        return number % SLOTS * self.axis.size * self._bytes + writer * size

    def _mark(self, rank: int, number: int, writer: int) -> int:
        marks = SLOTS * self.axis.size * self._bytes
        return self._begins[rank] + marks + 4 * (number % SLOTS * self.axis.size + writer)

    def _make(self, size: int, device: torch.device) -> None:
        """Room for blocks of `size` bytes."""
        if size <= self._bytes:
            return
        import torch.distributed._symmetric_memory as symmetric

        assert self.axis.group is not None
        self._bytes = -(-size // 512) * 512
        self._slots.clear()
        self._ways.clear()
        self._waits.clear()
        self._beside.settle()
        dist.barrier(self.axis.group)  # nobody reads or writes the old one any more
        self._handle = self._memory = None
        marks = SLOTS * self.axis.size
        self._memory = symmetric.empty(
            SLOTS * self.axis.size * self._bytes + 4 * marks, dtype=torch.uint8, device=device
        ).zero_()
        self._beside.settle()
        try:
            self._handle = symmetric.rendezvous(self._memory, self.axis.group)
        except RuntimeError as error:
            raise ValueError(
                f"--tp-overlap: ranks {self.axis.ranks} cannot map each other's memory ({error}); leave it out, or "
                "keep tensor ranks on one host whose devices reach each other"
            ) from None
        self._begins = [int(begin) for begin in self._handle.buffer_ptrs]
        self._meeting = torch.zeros(1, device=device)
        dist.barrier(self.axis.group)  # all marks are zero


class _Written:
    def __init__(self, through: Mapped, number: int, slot: torch.Tensor):
        self.slot, self._through, self._number = slot, through, number
        self._bytes = slot.nbytes // len(slot)

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._through.write(blocks, turns, self._number, self._bytes)

    def arrive(self, ranks: range) -> None:
        self._through.wait(ranks, self._number)


# -- on the meta device


class Imagined(Messages):
    """Exchanges of shapes alone, that take and keep what those of `Mapped` do.

    memory: what all ranks would map, so far as exchanges have asked for it; the allocator knows nothing of it.
    """

    def __init__(self, axis: Axis):
        super().__init__(axis)
        self.memory, self.mapped = torch.empty(1 << 50, dtype=torch.uint8, device="meta"), 0
        self._sent: list[list[torch.UntypedStorage]] = [[] for _ in range(SLOTS)]

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        self.count += 1
        size = self.axis.size * rows * columns * like.element_size()
        self.mapped = max(self.mapped, SLOTS * size)
        sent = self._sent[self.count % SLOTS]
        sent.clear()
        return _Imagined(self.memory[:size].view(like.dtype).view(self.axis.size, rows, columns), sent)

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
    def __init__(self, slot: torch.Tensor, sent: list[torch.UntypedStorage]):
        self.slot, self._sent = slot, sent

    def send(self, blocks: torch.Tensor, *turns: range) -> None:
        self._sent.append(blocks.untyped_storage())

    def arrive(self, ranks: range) -> None:
        """It has."""
