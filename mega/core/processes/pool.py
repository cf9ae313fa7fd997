"""Local gloo ranks that run many jobs, for tests and for comparing many layouts."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from mega.core.parallel.mesh import Groups
from mega.core.processes.connect import connect, disconnect, threads
from mega.core.processes.launch import end_ranks, fork_server, rank_environment
from mega.core.processes.one_device import gloo_on_one_device
from mega.core.processes.signals import STOPPING, restore_signals
from mega.core.processes.world import MEETING_FILE

Result = TypeVar("Result")


class Pool:
    """Up to `size` local gloo ranks that run until `close`.

    Jobs are functions `job(groups, rank, *args)`, importable by name; a job on `world` ranks has a process group of
    exactly these ranks. If a job fails on any rank, all ranks end, because other ranks may be blocked in a collective.
    The next job starts new ranks.
    """

    def __init__(self, size: int):
        self.size = size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._meetings = 0
        self._world = 0

    def run(
        self, job: Callable[..., Result], *args: object, world: int | None = None, timeout: float = 300.0
    ) -> list[Result]:
        """Run `job` on ranks 0 to world - 1, and return the ranks' results in order.

        Errors: RuntimeError with the traceback of the first rank that failed, or the ranks that did not answer.
        """
        world = self.size if world is None else world
        assert 1 <= world <= self.size, (world, self.size)
        if not self._ranks:
            self._start()
        if world != self._world:
            self._world, self._meetings = world, self._meetings + 1
        for rank, pipe in enumerate(self._pipes[:world]):
            pipe.send((self._environment(rank), job, args))
        results: dict[int, Result] = {}
        deadline = time.monotonic() + timeout
        while len(results) < world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world]) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RuntimeError(f"no answer from ranks {sorted(waiting.values())} within {timeout:.0f} s")
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended without a word"
                if not ok:
                    self.close()
                    raise RuntimeError(f"rank {rank} of {world}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End the ranks. The pool may be used again afterwards."""
        end_ranks(self._ranks, patience=0.0)
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes, self._world = [], [], 0
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _environment(self, rank: int) -> dict[str, str]:
        assert self._directory is not None
        return rank_environment(rank, self._world, self._directory.name, f"meeting-{self._meetings}")

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mega-pool-")
        for rank in range(self.size):
            parent_end, child_end = multiprocessing.Pipe()
            process = fork_server().Process(
                target=_pool_rank, args=(child_end, self.size), name=f"pool rank {rank}", daemon=True
            )
            process.start()
            child_end.close()  # otherwise the parent would not read an end-of-file when the rank dies
            self._ranks.append(process)
            self._pipes.append(parent_end)


def _pool_rank(pipe: Connection[Any, Any], size: int) -> None:
    """Run jobs until the pipe closes; join a new process group when the world size of jobs changes."""
    restore_signals(STOPPING)
    meeting, groups = "", Groups()
    while True:
        try:
            environment, job, args = pipe.recv()
        except EOFError:
            return
        try:
            if meeting != environment[MEETING_FILE]:
                disconnect()
                os.environ.update(environment)
                _, _, groups = connect("cpu")
                groups.gloo = gloo_on_one_device()
                # Limit threads even for one rank, because threads that spin are very slow on a busy machine.
                torch.set_num_threads(threads(size))
                meeting = environment[MEETING_FILE]
            pipe.send((True, job(groups, int(environment["RANK"]), *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
