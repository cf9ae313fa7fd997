"""Exchanges that overlap GEMMs: tokens and sums arrive as by the group's own collectives, two exchanges under way.

By messages as they are; by mapped memory with a stand-in for the device: memory is a file that all ranks map, and what
a device does on its own, its copies and marks, a thread does late, at random.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.device import CopyDescriptor
from mega.core.parallel.collectives import all_gather, first_problem, reduce_scatter
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.peers import Gather, MappedPeers, Peers, Scatter, peers, peers_if_mapped
from mega.core.parallel.pieces import FULL
from mega.core.processes.pool import Pool
from mega.core.training import wire

CPU = torch.device("cpu")
PAIRS = 2
"""So many rows are gathered and scattered in pairs alone, where ranks wait for each other the least."""
DELAYS = (0.0, 0.0, 0.0, 0.001, 0.005)
"""Seconds; drawn for each copy and each wait."""


def exchanges(groups: Groups, rank: int, size: int, rows: int) -> None:
    axis = Mesh(rank, tp=size, groups=groups).tp
    compare(peers(axis, CPU), [rows] * 3)


def compare(through: Peers, many: list[int]) -> None:
    """Exchanges of each kind for each number of rows, in which ranks meet nowhere else."""
    axis = through.axis
    size = axis.size
    generator = torch.Generator().manual_seed(axis.index)
    ours = [[torch.randn(count, 3, generator=generator) for count in (rows, rows * size)] for rows in many]
    expected = [(all_gather(x, axis), reduce_scatter(full, axis)) for x, full in ours]
    for turn, (rows, (x, full), (gathered, scattered)) in enumerate(zip(many, ours, expected, strict=True)):
        gather, scatter = Gather(x, through), Scatter(rows, 3, x, through)
        if rows != PAIRS:
            parts = dict.fromkeys(range(rows * size), 0)
            for where, part in gather.parts():
                assert torch.equal(part, gathered[where])
                parts.update(dict.fromkeys(range(where.start, where.stop), 1))
            assert all(parts.values())
        for where, out in scatter.parts():
            out.copy_(full[where])
        if rows == PAIRS and turn % size == axis.index:
            time.sleep(0.03)  # the others continue as far as they may
        assert torch.equal(gather.whole(), gathered)
        torch.testing.assert_close(scatter.blocks().sum(0), scattered)
        if rows != PAIRS:
            kept = Gather(x, through).whole(keep=True)
            assert torch.equal(kept, gathered)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("share", [0, 1 / 2, 1])
def test_exchanges(pool: Pool, size: int, share: float) -> None:
    """Blocks of which all, two or one make a whole piece."""
    pool.run(exchanges, size, max(1, int(share * size * FULL)), world=size)


class LateCopies:
    """What CopyStream does, by a thread that takes its time."""

    def __init__(self, seed: int) -> None:
        self._asked: queue.Queue[tuple[torch.Tensor, Sequence[CopyDescriptor], int]] = queue.Queue()
        self._delays = random.Random(seed)
        threading.Thread(target=self._work, daemon=True).start()

    def copy(self, x: torch.Tensor, ways: Sequence[CopyDescriptor], value: int) -> None:
        assert x.is_contiguous()
        self._asked.put((x, ways, value))

    def wait(self, marks: tuple[int, ...], value: int) -> None:
        time.sleep(self._delays.choice(DELAYS))
        until = time.monotonic() + 60
        while any(ctypes.c_uint32.from_address(mark).value < value for mark in marks):
            assert time.monotonic() < until, "a mark never came"
            time.sleep(1e-4)  # without a core, which those that are waited for need

    def settle(self) -> None:
        self._asked.join()

    def _work(self) -> None:
        while True:
            x, ways, value = self._asked.get()
            for way in ways:
                for first, target, size in way.pieces:
                    time.sleep(self._delays.choice(DELAYS))
                    ctypes.memmove(target, x.data_ptr() + first, size)
                for mark in way.marks:
                    ctypes.c_uint32.from_address(mark).value = value
            del x
            self._asked.task_done()


class SharedFiles:
    """What a handle of symmetric memory knows: where every rank's memory, here a file, is mapped."""

    def __init__(self, files: Sequence[Path], ours: torch.Tensor):
        size = len(ours)
        self._memory = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files]
        self.buffer_ptrs = [memory.data_ptr() for memory in self._memory]


def mapped_exchanges(groups: Groups, rank: int, size: int, directory: Path) -> None:
    axis, copies = Mesh(rank, tp=size, groups=groups).tp, LateCopies(rank)
    with mapped_files(rank, size, directory, copies):
        through = MappedPeers(axis)
        compare(through, [4, 1, 3, 4, size * FULL, 5, 7, *[PAIRS] * 16])
        count = through.count
        for _ in range(3):  # as a recording plays them: under the same numbers, and others after
            through.replay(count)
            through.count = count
            compare(through, [4, *[PAIRS] * 3])
            played = through.count
            compare(through, [PAIRS] * 2)
            assert through.count > played
        weight = torch.ones(3, requires_grad=True)
        block, made_of = weight * torch.ones(PAIRS, 3), weakref.ref(weight)
        with torch.no_grad():
            whole = Gather(block, through).whole()
        copies.settle()  # before memory of others is let go
        assert float(whole.sum()) == 3 * PAIRS * size
        del weight, block
        assert made_of() is None, "a block on its way kept what it was made of"


@contextlib.contextmanager
def mapped_files(rank: int, size: int, directory: Path, copies: LateCopies, fails: bool = False) -> Iterator[None]:
    """Symmetric memory in files. fails: this rank cannot map the files of others."""

    def empty(count: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.from_file(str(directory / f"{rank}-{count}"), shared=True, size=count, dtype=dtype)

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> SharedFiles:
        dist.barrier(group)  # each has made its own
        if fails:
            raise RuntimeError("no permission\nto map")
        return SharedFiles([directory / f"{rank}-{len(memory)}" for rank in range(size)], memory)

    with (
        mock.patch("mega.core.parallel.peers.CopyStream", lambda: copies),
        mock.patch("torch.distributed._symmetric_memory.empty", empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        yield


@pytest.mark.parametrize("size", [2, 4, 8])
def test_exchanges_through_mapped_memory(pool: Pool, tmp_path: Path, size: int) -> None:
    """Memory is used again and again, is reallocated for a larger block, and no block is lost or read too early."""
    pool.run(mapped_exchanges, size, tmp_path, world=size)


def chosen(groups: Groups, rank: int, directory: Path, failing: int | None, host: str) -> str | None:
    """The transport that a default gets on 2 x 2 ranks. failing: a rank that cannot map. host: the name of rank 3's."""
    mesh, copies = Mesh(rank, tp=2, dp=2, groups=groups), LateCopies(rank)
    with (
        mapped_files(mesh.tp.index, 2, directory / str(mesh.dp.index), copies, fails=rank == failing),
        mock.patch("socket.gethostname", lambda: host if rank == 3 else "here"),
        mock.patch("torch.distributed.get_backend", lambda group: "nccl"),
    ):
        through = peers_if_mapped(mesh.tp, mesh.everyone, CPU)
        if through is None:
            return None
        compare(through, [4, 2])
        copies.settle()
        dist.barrier(mesh.everyone.group)  # before files are unmapped
    return type(through).__name__


@pytest.mark.parametrize(("failing", "host"), [(None, "here"), (1, "here"), (None, "there")])
def test_mapped_memory_by_default_on_all_ranks_or_on_none(
    pool: Pool, tmp_path: Path, failing: int | None, host: str
) -> None:
    """Ranks whose axis could map memory also go without, because another axis cannot."""
    for axis in ("0", "1"):
        (tmp_path / axis).mkdir()
    expected = "MappedPeers" if failing is None and host == "here" else None
    assert pool.run(chosen, tmp_path, failing, host, world=4) == [expected] * 4


def chosen_on(groups: Groups, rank: int, peaks: tuple[float, float]) -> Peers | None:
    """The transport of a run on a card with these TFLOP/s a rank, without such cards."""
    flags = {"tp": 2, "sequence_parallel": True, "micro_batch": 2}
    run, mesh = resolve(compose("gpt-22b", flags=flags), 2), Mesh(rank, tp=2, groups=groups)
    with (
        mock.patch.object(wire, "tflops16", lambda device: peaks[rank]),
        mock.patch.object(wire, "first_problem", lambda problem, axis, device: first_problem(problem, axis, CPU)),
        mock.patch.object(wire, "peers_if_mapped", lambda axis, everyone, device: axis.name),
    ):
        return wire._transport(run, mesh, torch.device("cuda"), None)


@pytest.mark.parametrize(
    ("peaks", "expected"), [((989.0, 989.0), "tp"), ((2250.0, 2250.0), None), ((989.0, 2250.0), None)]
)
def test_ranks_on_different_cards_make_one_choice(pool: Pool, peaks: tuple[float, float], expected: str | None) -> None:
    assert pool.run(chosen_on, peaks, world=2) == [expected] * 2


def refused(groups: Groups, rank: int, directory: Path) -> None:
    axis, copies = Mesh(rank, tp=2, groups=groups).tp, LateCopies(rank)
    with (
        mapped_files(rank, 2, directory, copies, fails=rank == 1),
        pytest.raises(ValueError, match=r"map each other's memory \(no permission\); give --no-tp-overlap, or keep"),
    ):
        Gather(torch.ones(2, 3), MappedPeers(axis))


def test_memory_that_one_rank_cannot_map_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(refused, tmp_path, world=2)
