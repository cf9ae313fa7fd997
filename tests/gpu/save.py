"""What a save costs on real devices: GB/s at once, GB/s of a load, and how much a save behind the run slows the run.

    torchrun --nproc-per-node 4 tests/gpu/save.py --dir /tmp/saves --out rows.jsonl [--row w2]

One process group and one training state; each row is appended as it is known:

    steps   seconds of a step when nothing is saved
    async   a save behind the run, twice: how long the host stood still, the first steps while it was on its way, and
            when it was published
    load    the newest checkpoint into the same layout, every byte verified; where we may, the page cache is dropped
    sync    the state that was loaded, saved at once, and whether its bytes are those of the checkpoint that it came
            from (sha256 of every tensor)

The disk needs room for one checkpoint: each is removed before the next is written. GB are 10^9 bytes of all ranks.
Without a GPU, `--row tiny` shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mega.core.bench.rows import row
from mega.core.bench.training import random_batch
from mega.core.checkpoint.own.manifest import read_manifest
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.resolve import microbatches, resolve
from mega.core.config.run import Options, updated
from mega.core.parallel.collectives import all_reduce
from mega.core.processes.connect import connect, disconnect
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state

TINY = {
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "vocab": 1000,
    "seq_length": 32,
    "micro_batch": 1,
    "global_batch": 4,
    "zero": 1,
    "lr": 1e-4,
    "dtype": "bf16",
    "device": "cpu",
}


class Bench:
    """One state, its batches and what every row needs."""

    def __init__(self, options: argparse.Namespace):
        self.world, self.device, groups = connect("cpu" if options.row == "tiny" else "auto")
        size = self.world.size
        asked: Mapping[str, Any] = {"layers": options.layers, "global_batch": options.global_batch}
        flags = {flag: value for flag, value in asked.items() if value is not None}
        run = updated(Options(), {**TINY, **flags}) if options.row == "tiny" else row(options.row, flags, size)
        self.directory, self.out, self.commit = Path(options.dir), options.out, options.commit
        kept = replace(run.checkpoint, save=str(self.directory), save_interval=1, async_save=True, keep_last=1)
        self.run = resolve(replace(run, checkpoint=kept), size)
        self.mesh = build_mesh(self.run, self.world.rank, size, groups)
        self.state = build_state(self.run, self.mesh, self.device)
        self.batches = [
            random_batch(self.run, number * self.mesh.dp.size + self.mesh.dp.index, self.device.torch)
            for number in range(microbatches(self.run, size))
        ]
        self.store = CheckpointStore(self.directory)

    def step(self) -> float:
        """Seconds of one step, of the slowest rank."""
        return self.timed(lambda: train_step(self.state, self.batches, 1e-5, 0.1))

    def timed(self, act: Callable[[], Any]) -> float:
        self.device.synchronize()
        began = time.perf_counter()
        act()
        self.device.synchronize()
        return self.slowest(time.perf_counter() - began)

    def slowest(self, seconds: float) -> float:
        most = torch.tensor(seconds, dtype=torch.float64, device=self.device.torch)
        all_reduce(most, self.mesh.everyone, "max")
        return float(most)

    def row(self, name: str, **values: Any) -> None:
        if self.world.rank:
            return
        found = {
            "row": name,
            "world": self.world.size,
            "device": self.device.name,
            "torch": torch.__version__,
            **values,
            "commit": self.commit,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        print(json.dumps(found), flush=True)
        os.makedirs(os.path.dirname(os.path.abspath(self.out)), exist_ok=True)
        with open(self.out, "a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")

    def size(self, step: int) -> int:
        """Bytes of a checkpoint's tensors."""
        return self.store.open(step).bytes

    def remove(self, step: int) -> None:
        """Make room on the disk for the next one."""
        self.slowest(0)  # everybody has read it
        if not self.world.rank:
            shutil.rmtree(self.store.path(step))
        self.slowest(0)  # nobody writes before it is gone

    def digests(self, step: int) -> dict[tuple[Any, ...], str]:
        """Every stored rectangle's sha256, from the manifest."""
        manifest = read_manifest(self.store.path(step))
        return {
            (entry.key, entry.box): entry.digest
            for container in manifest.containers.values()
            for entry in container.entries
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--dir", required=True, help="an empty directory on the disk to measure; removed at the end")
    parser.add_argument("--row", default="w2", help="of mega bench, or tiny")
    parser.add_argument("--layers", type=int, help="fewer blocks, where disk or memory are short")
    parser.add_argument("--global-batch", type=int, help="sequences a step; else the row's")
    parser.add_argument("--steps", type=int, default=4, help="that are timed, alone and during each save")
    parser.add_argument("--commit", default=None, help="what the rows are marked with")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    state = bench.state
    behind = Saver(state)
    state.run = replace(bench.run, checkpoint=replace(bench.run.checkpoint, async_save=False))
    at_once = Saver(state)

    for _ in range(2):
        bench.step()
    times = [bench.step() for _ in range(options.steps)]
    usual = statistics.median(times)
    bench.row("steps", seconds=usual, times=times)

    for step in (1, 2):
        state.progress.step = step
        bench.device.synchronize()
        began = time.perf_counter()
        behind.save()
        stood = time.perf_counter() - began
        # The step that follows at once is timed with the call before it: this is what a run feels. Nothing may be read
        # from the device between them: it would come behind the state on its way to the host.
        train_step(state, bench.batches, 1e-5, 0.1)
        bench.device.synchronize()
        first, stood = bench.slowest(time.perf_counter() - began), bench.slowest(stood)
        during: list[float] = []
        while bench.slowest(float(behind.busy)) and len(during) < options.steps:
            during.append(bench.step())
        behind.wait()
        published = bench.slowest(time.perf_counter() - began)
        size = bench.size(step)
        bench.row(
            "async",
            save=step,
            bytes=size,
            sequences=bench.run.batch.global_batch,
            host_stood_still=stood,
            save_and_next_step=first,
            slower_percent=100 * (first / usual - 1),
            during=during,
            during_slower_percent=100 * (statistics.median(during) / usual - 1) if during else None,
            published_after=published,
            gb_per_s=size / published / 1e9,
        )

        if step == 1:
            bench.remove(step)

    before = bench.digests(2)
    dropped = bench.device.is_cuda and not bench.world.rank and _drop_page_cache()
    seconds = bench.timed(lambda: restore(state, ResumePoint(bench.store.open(2), weights_only=False)))
    bench.row("load", bytes=size, seconds=seconds, gb_per_s=size / seconds / 1e9, page_cache_dropped=dropped)

    bench.remove(2)
    state.progress.step = 3
    seconds = bench.timed(at_once.save)
    same = bench.digests(3) == before
    bench.row("sync", bytes=size, seconds=seconds, gb_per_s=size / seconds / 1e9, same_bytes_as_async=same)
    disconnect()
    if not bench.world.rank:
        shutil.rmtree(bench.directory)
    return 0 if same else 1


def _drop_page_cache() -> bool:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
