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

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.device import CopyStream
from mega.core.parallel.mesh import Axis

FULL = 2048
"""Rows of a product that leave no multiprocessor without work: smaller blocks of several ranks go together."""

SLOTS = 4
"""Exchanges whose blocks are kept. A rank begins exchange k + 4 when its stream has waited for every block of k + 2, at
the least, since no more than two are under way. So all ranks have begun k + 2, and before that they used up k."""

Rows = slice


class Exchange(Protocol):
    """Blocks [rows, columns] on their way: `slot` [ranks, rows, columns] holds what comes, by rank."""

    slot: torch.Tensor

    def send(self, block: torch.Tensor, rank: int) -> None:
        """`block`, as the current stream leaves it; it may be let go, but not written to."""

    def arrive(self, rank: int) -> None:
        """What follows on the current stream finds the block of `rank` in its place."""


class Peers(Protocol):
    axis: Axis

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        """The next exchange; `like` has its dtype and device. At most two are under way, of one size."""


def peers(axis: Axis, device: torch.device) -> Peers:
    return Mapped(axis) if device.type == "cuda" else Messages(axis)


# -- what they are for


class Gather:
    """x [rows, columns] of every rank on its way to all. Parts first, if at all, then the whole."""

    def __init__(self, x: torch.Tensor, through: Peers):
        self._x, self._axis = x.contiguous(), through.axis
        self._exchange = through.open(*x.shape, x)  # type: ignore[call-arg]
        for ranks in _order(self._axis, x.shape[0], ours_first=True):
            for rank in ranks:
                if rank != self._axis.index:
                    self._exchange.send(self._x, rank)

    def parts(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """(which rows of the whole, these rows), each as soon as it is here."""
        for ranks in _order(self._axis, len(self._x), ours_first=True, coming=True):
            part = self._x
            if ranks != range(self._axis.index, self._axis.index + 1):
                self._fill(ranks)
                part = self._exchange.slot[ranks.start : ranks.stop].flatten(0, 1)
            yield _rows(ranks, len(self._x)), part

    def whole(self, *, keep: bool = False) -> torch.Tensor:
        """[ranks x rows, columns], good until the next exchange but one; keep: for longer."""
        self._fill(range(self._axis.size))
        whole = self._exchange.slot.flatten(0, 1)
        return whole.clone() if keep else whole

    def _fill(self, ranks: range) -> None:
        for rank in ranks:
            if rank == self._axis.index:
                self._exchange.slot[rank].copy_(self._x)
            else:
                self._exchange.arrive(rank)


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
            for rank, block in zip(ranks, part.split(rows), strict=True):
                if rank == ours:
                    slot[ours].copy_(block)
                else:
                    self._exchange.send(block, rank)

    def blocks(self) -> torch.Tensor:
        """[ranks, rows, columns]: what every rank made of our rows, to be added up before the next exchange but one."""
        for rank in range(self._axis.size):
            if rank != self._axis.index:
                self._exchange.arrive(rank)
        return self._exchange.slot


def _rows(ranks: range, rows: int) -> Rows:
    return Rows(ranks.start * rows, ranks.stop * rows)


def _order(axis: Axis, rows: int, *, ours_first: bool, coming: bool = False) -> Iterator[range]:
    """Ranks that go through one product together, in the order in which they are sent to, or in which theirs come.

    >>> axis = Axis("tp", tuple(range(4)), 1)
    >>> list(_order(axis, 2048, ours_first=True))
    [range(1, 2), range(2, 3), range(3, 4), range(0, 1)]
    >>> list(_order(axis, 2048, ours_first=True, coming=True))
    [range(1, 2), range(0, 1), range(3, 4), range(2, 3)]
    >>> list(_order(axis, 1024, ours_first=False))
    [range(2, 4), range(0, 2)]
    """
    together = 1
    while together < axis.size and axis.size % (2 * together) == 0 and together * rows < FULL:
        together *= 2
    groups = axis.size // together
    steps = range(groups) if ours_first else range(1, groups + 1)
    for step in steps:
        group = (axis.index // together + (-step if coming else step)) % groups
        yield range(group * together, (group + 1) * together)


# -- by messages


class Messages:
    """Exchanges by sends and receives of the group."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        return _Posted(self.axis, like.new_empty((self.axis.size, rows, columns)))


class _Posted:
    def __init__(self, axis: Axis, slot: torch.Tensor):
        self.slot, self._axis = slot, axis
        self._coming = {
            rank: dist.irecv(slot[rank], axis.ranks[rank], axis.group)
            for rank in range(axis.size)
            if rank != axis.index
        }
        self._going: list[Any] = []

    def send(self, block: torch.Tensor, rank: int) -> None:
        self._going.append((dist.isend(block, self._axis.ranks[rank], self._axis.group), block))

    def arrive(self, rank: int) -> None:
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
    exchange whose block has been written. It is made by the first exchange, and anew where a larger one comes.
    """

    def __init__(self, axis: Axis):
        assert axis.group is not None
        self.axis, self._count, self._bytes = axis, 0, 0
        self._memory: torch.Tensor | None = None
        self._handle: Any = None
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        self._beside = CopyStream()

    def open(self, rows: int, columns: int, like: torch.Tensor) -> Exchange:
        self._make(rows * columns * like.element_size(), like.device)
        self._count += 1
        return _Written(self, self._count, (rows, columns), like.dtype)

    def slot(self, rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[ranks, rows, columns] in the memory of `rank`: the blocks of this exchange that come to it."""
        key = (rank, number % SLOTS, shape, dtype)
        if key not in self._views:
            offset = number % SLOTS * self.axis.size * self._bytes // dtype.itemsize
            self._views[key] = self._handle.get_buffer(rank, (self.axis.size, *shape), dtype, offset)
        return self._views[key]

    def write(self, block: torch.Tensor, rank: int, number: int) -> None:
        ours = self.axis.index
        into = self.slot(rank, number, tuple(block.shape), block.dtype)[ours]
        self._beside.copy(block, into, self._mark(rank, number, ours), number)

    def wait(self, rank: int, number: int) -> None:
        self._beside.wait(self._mark(self.axis.index, number, rank), number)

    def _mark(self, rank: int, number: int, writer: int) -> int:
        marks = SLOTS * self.axis.size * self._bytes
        return int(self._handle.buffer_ptrs[rank]) + marks + 4 * (number % SLOTS * self.axis.size + writer)

    def _make(self, size: int, device: torch.device) -> None:
        """Room for blocks of `size` bytes."""
        if size <= self._bytes:
            return
        import torch.distributed._symmetric_memory as symmetric

        assert self.axis.group is not None
        self._bytes = -(-size // 512) * 512
        self._views.clear()
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
        dist.barrier(self.axis.group)  # all marks are zero


class _Written:
    def __init__(self, through: Mapped, number: int, shape: tuple[int, ...], dtype: torch.dtype):
        self._through, self._number = through, number
        self.slot = through.slot(through.axis.index, number, shape, dtype)

    def send(self, block: torch.Tensor, rank: int) -> None:
        self._through.write(block, rank, self._number)

    def arrive(self, rank: int) -> None:
        self._through.wait(rank, self._number)
