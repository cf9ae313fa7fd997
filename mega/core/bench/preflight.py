"""Whether the hosts of a fleet are alike and fast, before a run is put on them: each rank is held against the median.

    1 figures of a rank       matrix products, copies on the device and to it, writing and reading in --save
    2 links                   each rank to the next of its host, all at once; every pair of hosts, as many at once as
                              there are (a tournament: each host meets one other in a round)
    3 facts                   device, driver, versions, clock
    4 the verdict             a figure below --least of the fleet's median, a fact that most ranks do not share, a clock
                              that is off by more than CLOCK seconds

It knows no model, and changes nothing: the file that is written in --save is removed.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mega
from mega.core.bench.options import PreflightOptions
from mega.core.device import Device
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.processes.world import World

CLOCK = 1.0
"""Seconds by which a clock may differ from the median of all."""

REPEATS = 5

FIGURES = {"matmul": "TFLOP/s", "copy": "GB/s", "upload": "GB/s", "link": "GB/s", "write": "GB/s", "read": "GB/s"}
"""Figures of a rank -> unit. upload: from the host's memory to a GPU's. link: to the next rank of its host."""


def preflight(options: PreflightOptions) -> int:
    """Measure as one rank of the world that the environment describes; rank 0 prints. 1 if something is off."""
    world, device, groups = connect(options.device, options.backend, options.timeout_minutes)
    axis = Mesh(world.rank, dp=world.size, groups=groups).everyone
    found = {"rank": world.rank, "host": socket.gethostname(), "facts": _machine(device)}
    found["figures"] = dict(_figures(device, world, options))
    rows = gather_json(found, axis, device.torch)
    pairs = _pairs(_first_ranks(rows), axis, device)
    clocks = gather_json(time.time(), axis, device.torch)
    faults = list(judged(rows, pairs, clocks, options.least))
    if world.rank == 0:
        _show(rows, pairs, faults, as_json=options.json)
        sys.stdout.flush()
    gather_json(None, axis, device.torch)  # a rank that fails ends the others, so all wait until rank 0 has printed
    disconnect()
    return int(bool(faults))


def _machine(device: Device) -> dict[str, str]:
    versions = {"mega": mega.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    return {"device": device.name, "cores": str(os.cpu_count()), **versions, **device.library_versions()}


def _figures(device: Device, world: World, options: PreflightOptions) -> Iterator[tuple[str, float]]:
    """Phases 1 and 2, but for pairs of hosts. All ranks measure the same at once, as a run loads them."""
    size = 4096 if device.is_cuda else 512
    one = torch.randn(size, size, device=device.torch, dtype=torch.bfloat16 if device.is_cuda else torch.float32)
    yield "matmul", 2 * size**3 / _seconds(device, lambda: one @ one) / 1e12
    large = torch.zeros(256 << 20 if device.is_cuda else 16 << 20, dtype=torch.uint8, device=device.torch)
    other = torch.empty_like(large)
    yield "copy", 2 * large.nbytes / _seconds(device, lambda: other.copy_(large)) / 1e9
    if device.is_cuda:
        there = torch.zeros(large.nbytes, dtype=torch.uint8).pin_memory()
        yield "upload", large.nbytes / _seconds(device, lambda: large.copy_(there, non_blocking=True)) / 1e9
    if world.local_size > 1:
        first = world.rank - world.local_rank
        after = first + (world.local_rank + 1) % world.local_size
        before = first + (world.local_rank - 1) % world.local_size
        part, into = large[: large.nbytes // 4], other[: large.nbytes // 4]
        yield "link", part.nbytes / _seconds(device, lambda: _exchange(part, after, into, before)) / 1e9
    if options.save is not None and world.local_rank == 0:
        yield from _disk(Path(options.save), options.megabytes)


def _seconds(device: Device, act: Callable[[], object]) -> float:
    """The median of some turns, after one that counts nothing."""
    act()
    found = []
    for _ in range(REPEATS):
        device.synchronize()
        began = time.perf_counter()
        act()
        device.synchronize()
        found.append(time.perf_counter() - began)
    return max(statistics.median(found), 1e-9)


def _exchange(out: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)])
    for work in works:
        work.wait()


def _disk(folder: Path, megabytes: int) -> Iterator[tuple[str, float]]:
    """Rates of a file that is on the disk when it counts as written. Errors: OSError."""
    path, block = folder / f".preflight-{uuid.uuid4().hex}", os.urandom(1 << 20)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        began = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(megabytes):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield "write", megabytes * len(block) / (time.perf_counter() - began) / 1e9
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or else memory is read
            began = time.perf_counter()
            while file.read(len(block)):
                pass
        yield "read", megabytes * len(block) / (time.perf_counter() - began) / 1e9
    finally:
        path.unlink(missing_ok=True)


def _first_ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Host -> its first rank."""
    return {row["host"]: row["rank"] for row in reversed(rows)}


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """A tournament in which each of `count` meets each other once, and all that can at the same time.

    >>> list(rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> list(rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    even = count + count % 2
    seats = list(range(even))
    for _ in range(even - 1):
        met = [(seats[at], seats[even - 1 - at]) for at in range(even // 2)]
        yield sorted((min(pair), max(pair)) for pair in met if max(pair) < count)
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _pairs(first: Mapping[str, int], axis: Axis, device: Device) -> dict[str, float]:
    """GB/s between each two hosts, both ways at once, on all ranks."""
    names, size = sorted(first, key=lambda name: first[name]), 64 << 20 if device.is_cuda else 4 << 20
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device.torch) for _ in range(2))
    own: dict[str, float] = {}
    for met in rounds(len(names)):
        gather_json(None, axis, device.torch)  # a round begins when the one before has ended everywhere
        for one, other in ((names[a], names[b]) for a, b in met):
            if axis.index in (first[one], first[other]):
                peer = first[other] if axis.index == first[one] else first[one]
                seconds = _seconds(device, lambda peer=peer: _exchange(out, peer, into, peer))  # type: ignore[misc]
                own[f"{one} - {other}"] = size / seconds / 1e9
    found: dict[str, float] = {}
    for each in gather_json(own, axis, device.torch):
        for name, rate in each.items():
            found[name] = min(rate, found.get(name, rate))
    return found


def judged(
    rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, float], clocks: Sequence[float], least: float
) -> Iterator[str]:
    """Phase 4: a line for each thing that is off."""
    for name, unit in FIGURES.items():
        rates = {row["rank"]: row["figures"][name] for row in rows if name in row["figures"]}
        middle = statistics.median(rates.values()) if rates else 0.0
        for row in rows:
            if row["rank"] in rates and rates[row["rank"]] < least * middle:
                rate = rates[row["rank"]]
                share = f"{rate / middle:.0%} of the median {middle:.3g}"
                yield f"rank {row['rank']} on {row['host']}: {name} {rate:.3g} {unit}, {share}"
    middle = statistics.median(pairs.values()) if pairs else 0.0
    for name, rate in pairs.items():
        if rate < least * middle:
            yield f"hosts {name}: {rate:.3g} GB/s, {rate / middle:.0%} of the median {middle:.3g}"
    for name in dict.fromkeys(name for row in rows for name in row["facts"]):
        usual, _ = Counter(row["facts"].get(name, "none") for row in rows).most_common(1)[0]
        for row in rows:
            if row["facts"].get(name, "none") != usual:
                yield f"rank {row['rank']} on {row['host']}: {name} {row['facts'].get(name, 'none')}, others {usual}"
    middle = statistics.median(clocks)
    for row, clock in zip(rows, clocks, strict=True):
        if abs(clock - middle) > CLOCK:
            yield f"rank {row['rank']} on {row['host']}: its clock is {clock - middle:+.1f} s from the median"


def _show(rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, float], faults: Sequence[str], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"ranks": list(rows), "pairs": dict(pairs), "faults": list(faults)}))
        return
    from rich.console import Console
    from rich.table import Table

    names = [name for name in FIGURES if any(name in row["figures"] for row in rows)]
    table = Table("rank", "host", "device", *(f"{name}, {FIGURES[name]}" for name in names))
    for row in rows:
        figures = [f"{row['figures'][name]:.3g}" if name in row["figures"] else "" for name in names]
        table.add_row(str(row["rank"]), row["host"], row["facts"]["device"], *figures)
    console = Console()
    console.print(table)
    for name, rate in pairs.items():
        console.print(f"hosts {name}: {rate:.3g} GB/s each way")
    for fault in faults:
        console.print(f"off: {fault}", style="red", highlight=False)
    console.print(f"{len(rows)} ranks, {len(faults)} things off")
