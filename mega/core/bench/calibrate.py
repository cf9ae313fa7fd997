"""Measure the times of operations, links and the host on this machine; write a TOML file.

    curves          matmuls, attention, elementwise passes (bench/curves.py)  -> curves, launch
    products        the matmuls of the curves                                 -> product, peak on a CPU
    attention       causal, of one size of the curves                         -> attention_forward, attention_backward
    copies, norms   large tensors                                             -> bandwidth, elementwise
    host            steps of small models with few and with many blocks       -> host; on a CPU: launch
    collectives     by size over all ranks of this host                       -> inside, latency
    transfers       from each rank to the next, by size                       -> peer

`mega memory-estimate --gpu FILE.toml` reads this file. Links between hosts, and between a device and its host, are not
measured; the file has no values for these links, so the values of `base` in estimate/hardware.toml are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mega.core.bench import curves
from mega.core.bench.curves import Meter, Shapes
from mega.core.bench.training import measure
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.device import DTYPES, Device, fp8_matmuls
from mega.core.estimate.chunks import stage_chunks
from mega.core.estimate.cost import SHORTEST, Units, host_blocks, play_unit
from mega.core.estimate.curves import Points
from mega.core.estimate.fit import Product, as_toml, line, product_shares
from mega.core.estimate.hardware import Hardware, from_table, hardware
from mega.core.estimate.operations import operations
from mega.core.files import whole_file
from mega.core.ops.suite import Ops, choose
from mega.core.parallel.collectives import RingShift, all_gather, all_reduce
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.processes.world import World


@dataclass(frozen=True)
class Extent:
    """The sizes measured on one type of device."""

    dtype: str
    shapes: Shapes
    """Sizes of the operations of the curves."""
    sizes: tuple[int, ...]
    """Sizes of collectives, in bytes."""
    elements: tuple[int, int]
    """Size (tokens, width) of the tensors in copies and norms."""
    blocks: tuple[int, int] = (2, 10)
    """Numbers of blocks of the small models that measure the host."""


CUDA = Extent("bf16", curves.CUDA, tuple(size << 20 for size in (1, 4, 16, 64, 256)), (16384, 8192))
CPU = Extent("fp32", curves.CPU, tuple(size << 10 for size in (16, 64, 256, 1024)), (512, 1024))

SMALL = {
    "hidden": 128,
    "heads": 4,
    "vocab": 512,
    "seq_length": 64,
    "micro_batch": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "cuda_graph": False,
}
"""Options of the small models that measure the host, chosen so that the device waits for the host."""

MICROBATCHES = 8
"""Number of microbatches in a step of the small models, on each rank."""


def calibrate(out: str, kind: str, backend: str, timeout_minutes: float, repeats: int) -> int:
    """Measure as one rank of the job described by the environment; rank 0 writes `out`. Returns the exit code."""
    world, device, groups = connect(kind, backend, timeout_minutes)
    machine = Machine(world, device, groups, repeats)
    points = machine.curves()
    values, peaks = machine.measured(points)
    if world.rank == 0:
        text = as_toml(values, peaks, f"{world.size} x {device.name}, measured by mega bench --calibrate", points)
        with whole_file(Path(out)) as file:
            file.write(text.encode())
        constants_text = text.partition("[curves]")[0]
        count = sum(map(len, points.values()))
        print(f"{constants_text}{count} points of {len(points)} curves")
        print(f"written to {out}; read it by: mega memory-estimate --gpu {out}")
    disconnect()
    return 0


class Machine:
    """Performs the measurements on the device of one rank, and over the axis of all ranks."""

    def __init__(self, world: World, device: Device, groups: Groups, repeats: int):
        self.world, self.device, self.groups, self.repeats = world, device, groups, repeats
        self.extent = CUDA if device.is_cuda else CPU
        self.dtype = DTYPES[self.extent.dtype]
        self.ops: Ops = choose(device.torch, self.dtype)
        self.axis: Axis = Mesh(world.rank, dp=world.size, groups=groups).everyone
        self.meter = Meter(device, self.ops, self.dtype, self._slowest)

    def curves(self) -> Points:
        """Measure the curves of operations."""
        return curves.collected(curves.points(self.meter, self.extent.shapes))

    def measured(self, points: Points) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values for the hardware file, and the peak TFLOP/s per dtype. points: the measured curves."""
        gap, bandwidth = curves.gap(self.meter), self._bandwidth()
        width = self.dtype.itemsize
        samples = [Product(int(m), int(k), int(n), width, 1e-6 * time) for m, k, n, time in points["matmul forward"]]
        fastest = max(sample.flops / sample.seconds for sample in samples)
        rated_tflops = self.device.peak_tflops
        peak = rated_tflops * 1e12 if rated_tflops is not None else fastest
        share, _ = product_shares(samples, peak, bandwidth, 1e-6 * gap)
        forward, backward = self._attention(points["attention cudnn causal"])
        values: dict[str, float] = {
            "memory": self.device.room() / 2**30 / (1 if self.device.is_cuda else self.world.local_size),
            "bandwidth": bandwidth / 1e12,
            "product": share,
            "elementwise": self._elementwise() / bandwidth,
            "attention_forward": forward / peak,
            "attention_backward": backward / peak,
            "node": self.world.local_size,
        }
        if self.device.is_cuda:
            values |= {"launch": max(gap - 1e6 * SHORTEST, 0.1), "host": self.host()}
        else:  # the host is the device: neither waits for the other
            values |= {"launch": 1e-3, "host": 1e-3, "communicator": 0.01}
            table = {**values, "peak": self._peaks(peak), "curves": points}
            values["launch"] = max(self.launch(from_table("measured", table, "--calibrate")), 1e-3)
        if self.world.size > 1:
            delay, each = self._gathering()
            values |= {"inside": 1 / each / 1e9, "latency": max(delay * 1e6, 1e-3), "peer": self._handing() / 1e9}
        return values, self._peaks(peak)

    def _peaks(self, peak: float) -> dict[str, float]:
        """Peak TFLOP/s by dtype. On CUDA, fp32 and fp64 are not measured; the peaks of `base` are used. On devices with
        fp8 matmuls, the fp8 peak is twice the 16-bit peak."""
        names = ("bf16", "fp16") if self.device.is_cuda else ("bf16", "fp16", "fp32", "fp64")
        peaks = {name: peak / 1e12 / (2 if name == "fp64" else 1) for name in names}
        return peaks | ({"fp8": 2 * peak / 1e12} if fp8_matmuls(self.device.torch) else {})

    def _slowest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device.torch)
        all_reduce(slowest, self.axis, "max")
        return float(slowest)

    def host(self) -> float:
        """Return the host time per plain block and microbatch, in microseconds, forward plus backward. It is computed
        from the difference between two small models' steps (cost.host_blocks)."""
        (few, few_units), (many, many_units) = self._small_steps()
        device = hardware("h100")  # host times in units of a plain block do not depend on the device
        blocks = [sum(host_blocks(units, device) for units in each) for each in (few_units, many_units)]
        return 1e6 * max(many - few, 1e-9) / (blocks[1] - blocks[0])

    def launch(self, on: Hardware) -> float:
        """Return the microseconds between two operations on a CPU: the time per operation that small models' steps take
        in addition to the operations. on: the calibrated device, with a negligible time between two operations."""
        (few, few_units), (many, many_units) = self._small_steps()
        played = [[play_unit(unit, on) for units in each for unit in units] for each in (few_units, many_units)]
        busy, launches = (
            [sum(getattr(unit, name) for unit in each) for each in played] for name in ("seconds", "launches")
        )
        return 1e6 * max(many - few - (busy[1] - busy[0]), 1e-9) / (launches[1] - launches[0])

    def _small_steps(self) -> list[tuple[float, tuple[Units, ...]]]:
        """Measure two small models, which differ only in their number of blocks. Return, for each model, the seconds
        and the operations of a microbatch."""
        steps: list[tuple[float, tuple[Units, ...]]] = []
        for layers in self.extent.blocks:
            flags: dict[str, object] = {**SMALL, "layers": layers, "global_batch": MICROBATCHES * self.world.size}
            flags |= {"dtype": self.extent.dtype, "device": self.device.torch.type, "mock_data": True, "steps": 1}
            run = resolve(compose(flags={**flags, "lr": 1e-4}), self.world.size)
            rank_args = self.world.rank, self.world.size, self.device, self.groups
            speed = measure("host", run, *rank_args, repeats=self.repeats, warmup=2, profiled=False)
            work = operations(run, stage_chunks(run)[0][0])
            steps.append((min(speed.steps) / MICROBATCHES, (work.forward, work.backward, work.weight)))
        return steps

    def _bandwidth(self) -> float:
        """Return the memory bandwidth of a copy, counting bytes read and written, in bytes per second."""
        x = self.meter.filled(*self.extent.elements)
        y = torch.empty_like(x)
        return 2e6 * x.nbytes / self.meter.microseconds(lambda: y.copy_(x))

    def _elementwise(self) -> float:
        """Return the memory bandwidth, in bytes per second, of a fused residual addition and norm, which reads two
        tensors and writes two."""
        tokens, width = self.extent.elements
        x, branch = self.meter.filled(tokens, width), self.meter.filled(tokens, width)
        weight = torch.ones(width, device=self.device.torch, dtype=self.dtype)
        norm = partial(self.ops.add_norm, x, branch, None, None, weight, None, 1e-5)
        return 4e6 * x.nbytes / self.meter.microseconds(norm)

    def _attention(self, points: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Return operations per second of causal attention, forward and backward, counting only the causal half, at the
        largest measured size."""
        rows, length, width, forward, backward = max(points, key=lambda point: point[0] * point[1] ** 2 * point[2])
        half = 2e6 * rows * length * length * width
        return half / forward, 2.5 * half / backward

    def _gathering(self) -> tuple[float, float]:
        """Return the latency of an all-gather in seconds, and the seconds per byte sent by a rank."""
        sizes, seconds = [], []
        for size in self.extent.sizes:
            shard = torch.zeros(size // self.world.size, dtype=torch.uint8, device=self.device.torch)
            sizes.append(shard.nbytes * (self.world.size - 1))
            seconds.append(1e-6 * self.meter.microseconds(partial(all_gather, shard, self.axis), captures=False))
        return line(sizes, seconds)

    def _handing(self) -> float:
        """Return the bytes per second from each rank to the next while all ranks send simultaneously."""
        x = torch.zeros(self.extent.sizes[-1], dtype=torch.uint8, device=self.device.torch)
        shift = self.meter.microseconds(lambda: RingShift(x, self.axis).wait(), captures=False)
        return 1e6 * x.nbytes / shift
