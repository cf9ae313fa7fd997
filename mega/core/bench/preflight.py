"""Check before a run that all hosts of a fleet are equal and fast, by comparing each rank with the median.

    1 figures of a rank       matrix products, copies on and to the device, writing and reading in --save
    2 links                   each rank to the next on the same host, simultaneously; every pair of hosts, in rounds of
                              disjoint pairs (a round-robin tournament)
    3 facts                   device, driver, versions, clock
    4 report                  figures below --least x the fleet's median, facts that differ from those of most ranks,
                              clocks that differ from the median by more than CLOCK seconds

This module does not depend on a model. The file written in --save is removed afterwards.
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
from mega.core.terminal import print_table

CLOCK = 1.0
"""Maximum accepted difference of a clock from the median of all clocks, in seconds."""

REPEATS = 5

FIGURES = {"matmul": "TFLOP/s", "copy": "GB/s", "upload": "GB/s", "link": "GB/s", "write": "GB/s", "read": "GB/s"}
"""Measured figure of a rank -> its unit. upload: copies from host memory to the GPU. link: transfers to the next rank
of the host."""


def preflight(options: PreflightOptions) -> int:
    """Measure as one rank of the job described by the environment; rank 0 prints. Returns 1 if a problem was found."""
    world, device, groups = connect(options.device, options.backend, options.timeout_minutes)
    axis = Mesh(world.rank, dp=world.size, groups=groups).everyone
    measured = {"rank": world.rank, "host": socket.gethostname(), "facts": _machine(device)}
    measured["figures"] = dict(_figures(device, world, options))
    rows = gather_json(measured, axis, device.torch)
    pairs = _pairs(_first_ranks(rows), axis, device)
    clocks = gather_json(time.time(), axis, device.torch)
    faults = list(problems(rows, pairs, clocks, options.least))
    if world.rank == 0:
        _show(rows, pairs, faults, as_json=options.json)
        sys.stdout.flush()
    gather_json(None, axis, device.torch)  # a failing rank ends the other ranks, so all wait until rank 0 has printed
    disconnect()
    return int(bool(faults))


def _machine(device: Device) -> dict[str, str]:
    versions = {"mega": mega.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    return {"device": device.name, "cores": str(os.cpu_count()), **versions, **device.library_versions()}


def _figures(device: Device, world: World, options: PreflightOptions) -> Iterator[tuple[str, float]]:
    """Yield the figures of phases 1 and 2, except those for pairs of hosts. All ranks measure the same figure
    simultaneously, as under the load of a run."""
    size = 4096 if device.is_cuda else 512
    matrix = torch.randn(size, size, device=device.torch, dtype=torch.bfloat16 if device.is_cuda else torch.float32)
    yield "matmul", 2 * size**3 / _seconds(device, lambda: matrix @ matrix) / 1e12
    large = torch.zeros(256 << 20 if device.is_cuda else 16 << 20, dtype=torch.uint8, device=device.torch)
    other = torch.empty_like(large)
    yield "copy", 2 * large.nbytes / _seconds(device, lambda: other.copy_(large)) / 1e9
    if device.is_cuda:
        host_memory = torch.zeros(large.nbytes, dtype=torch.uint8).pin_memory()
        yield "upload", large.nbytes / _seconds(device, lambda: large.copy_(host_memory, non_blocking=True)) / 1e9
    if world.local_size > 1:
        first = world.rank - world.local_rank
        after = first + (world.local_rank + 1) % world.local_size
        before = first + (world.local_rank - 1) % world.local_size
        sent, received = large[: large.nbytes // 4], other[: large.nbytes // 4]
        yield "link", sent.nbytes / _seconds(device, lambda: _exchange(sent, after, received, before)) / 1e9
    if options.save is not None and world.local_rank == 0:
        yield from _disk(Path(options.save), options.megabytes)


def _seconds(device: Device, act: Callable[[], object]) -> float:
    """Return the median seconds of REPEATS calls, after one untimed call."""
    act()
    seconds = []
    for _ in range(REPEATS):
        device.synchronize()
        began = time.perf_counter()
        act()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds), 1e-9)


def _exchange(out: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)])
    for work in works:
        work.wait()


def _disk(folder: Path, megabytes: int) -> Iterator[tuple[str, float]]:
    """Yield the rates of writing a file, with fsync, and of reading it. Errors: OSError if a file operation fails."""
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
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the page cache is read
            began = time.perf_counter()
            while file.read(len(block)):
                pass
        yield "read", megabytes * len(block) / (time.perf_counter() - began) / 1e9
    finally:
        path.unlink(missing_ok=True)


def _first_ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return a map from each host to the host's first rank."""
    return {row["host"]: row["rank"] for row in reversed(rows)}


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs of the numbers below `count`, such that every pair occurs once (a round-robin
    tournament by the circle method).

    >>> list(rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> list(rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    even = count + count % 2
    seats = list(range(even))
    for _ in range(even - 1):
        pairs = [(seats[position], seats[even - 1 - position]) for position in range(even // 2)]
        yield sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count)
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _pairs(first: Mapping[str, int], axis: Axis, device: Device) -> dict[str, float]:
    """Return the GB/s between every pair of hosts, sending in both directions; the result is identical on all ranks."""
    names, size = sorted(first, key=lambda name: first[name]), 64 << 20 if device.is_cuda else 4 << 20
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device.torch) for _ in range(2))
    rates: dict[str, float] = {}
    for pairs in rounds(len(names)):
        gather_json(None, axis, device.torch)  # a barrier: the previous round has ended on all ranks
        for first_host, second_host in ((names[a], names[b]) for a, b in pairs):
            if axis.index in (first[first_host], first[second_host]):
                peer = first[second_host] if axis.index == first[first_host] else first[first_host]
                seconds = _seconds(device, lambda peer=peer: _exchange(sent, peer, received, peer))  # type: ignore[misc]
                rates[f"{first_host} - {second_host}"] = size / seconds / 1e9
    slowest: dict[str, float] = {}
    for each in gather_json(rates, axis, device.torch):
        for name, rate in each.items():
            slowest[name] = min(rate, slowest.get(name, rate))
    return slowest


def problems(
    rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, float], clocks: Sequence[float], least: float
) -> Iterator[str]:
    """Yield a message for each figure, fact or clock that deviates too far (phase 4)."""
    for name, unit in FIGURES.items():
        rates = {row["rank"]: row["figures"][name] for row in rows if name in row["figures"]}
        median = statistics.median(rates.values()) if rates else 0.0
        for row in rows:
            if row["rank"] in rates and rates[row["rank"]] < least * median:
                rate = rates[row["rank"]]
                share = f"{rate / median:.0%} of the median {median:.3g}"
                yield f"rank {row['rank']} on {row['host']}: {name} {rate:.3g} {unit}, {share}"
    median = statistics.median(pairs.values()) if pairs else 0.0
    for name, rate in pairs.items():
        if rate < least * median:
            yield f"hosts {name}: {rate:.3g} GB/s, {rate / median:.0%} of the median {median:.3g}"
    for name in dict.fromkeys(name for row in rows for name in row["facts"]):
        usual, _ = Counter(row["facts"].get(name, "none") for row in rows).most_common(1)[0]
        for row in rows:
            if row["facts"].get(name, "none") != usual:
                yield f"rank {row['rank']} on {row['host']}: {name} {row['facts'].get(name, 'none')}, others {usual}"
    median = statistics.median(clocks)
    for row, clock in zip(rows, clocks, strict=True):
        if abs(clock - median) > CLOCK:
            yield f"rank {row['rank']} on {row['host']}: its clock is {clock - median:+.1f} s from the median"


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
    print_table(console, table)
    for name, rate in pairs.items():
        console.print(f"hosts {name}: {rate:.3g} GB/s each way")
    for fault in faults:
        console.print(f"off: {fault}", style="red", highlight=False)
    console.print(f"{len(rows)} ranks, {len(faults)} things off")
