"""Measure matrix products, attention, copies, elementwise passes and collectives on this machine; write a TOML file.

    products        by shape, in the dtype that training uses      -> product
    attention       causal, forward and backward                   -> attention_forward, attention_backward
    copies, norms   large tensors                                  -> bandwidth, elementwise
    collectives     by size over all ranks of this host            -> inside, latency
    transfers       from each rank to the next, by size            -> peer

`mega memory-estimate --gpu FILE.toml` reads this file. Values that cannot be measured without several hosts (links
between hosts) or a model (host time for launching a block) are copied from `base` in estimate/hardware.toml. This
module does not depend on a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mega.core.device import DTYPES, Device, fp8_matmuls
from mega.core.estimate.fit import Product, as_toml, line, product_shares
from mega.core.files import whole_file
from mega.core.ops.mask import CAUSAL
from mega.core.ops.suite import Ops, choose
from mega.core.parallel.collectives import RingShift, all_gather, all_reduce
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.processes.connect import connect, disconnect
from mega.core.processes.world import World


@dataclass(frozen=True)
class Extent:
    """The sizes measured on one type of device."""

    dtype: str
    products: tuple[tuple[int, int, int], ...]
    """Sizes (m, k, n) of matrix products [m, k] x [k, n]."""
    attention: tuple[int, int, int, int]
    """Size of the attention: (rows, length, heads, width of a head)."""
    sizes: tuple[int, ...]
    """Sizes of collectives, in bytes."""
    elements: tuple[int, int]
    """Size (tokens, width) of the tensors in copies and elementwise passes."""


CUDA = Extent(
    dtype="bf16",
    products=(
        (2048, 4096, 4096),
        (4096, 4096, 12288),
        (4096, 4096, 22016),
        (4096, 11008, 4096),
        (8192, 6144, 6144),
        (8192, 6144, 2304),
        (8192, 768, 6144),
        (16384, 1024, 4096),
        (16384, 1024, 1024),
    ),
    attention=(1, 4096, 32, 128),
    sizes=tuple(size << 20 for size in (1, 4, 16, 64, 256)),
    elements=(16384, 8192),
)
CPU = Extent(
    dtype="fp32",
    products=((128, 128, 128), (256, 256, 256), (512, 256, 512), (512, 512, 64), (512, 512, 512)),
    attention=(1, 256, 4, 64),
    sizes=tuple(size << 10 for size in (16, 64, 256, 1024)),
    elements=(512, 1024),
)


def calibrate(out: str, kind: str, backend: str, timeout_minutes: float, repeats: int) -> int:
    """Measure as one rank of the job described by the environment; rank 0 writes `out`. Returns the exit code."""
    world, device, groups = connect(kind, backend, timeout_minutes)
    values, peaks = Machine(world, device, groups, repeats).measured()
    if world.rank == 0:
        text = as_toml(values, peaks, f"{world.size} x {device.name}, measured by mega bench --calibrate")
        with whole_file(Path(out)) as file:
            file.write(text.encode())
        print(f"{text}written to {out}; read it by: mega memory-estimate --gpu {out}")
    disconnect()
    return 0


class Machine:
    """Measurements on the device of one rank, and over the axis of all ranks."""

    def __init__(self, world: World, device: Device, groups: Groups, repeats: int):
        self.world, self.device, self.repeats = world, device, repeats
        self.extent = CUDA if device.is_cuda else CPU
        self.dtype = DTYPES[self.extent.dtype]
        self.ops: Ops = choose(device.torch, self.dtype)
        self.axis: Axis = Mesh(world.rank, dp=world.size, groups=groups).everyone

    def measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values for the hardware file, and the peak TFLOP/s per dtype."""
        element = self.filled(1)
        launch = self.seconds(lambda: element.add_(0))
        bandwidth = self._bandwidth()
        samples = [self._matmul(*shape) for shape in self.extent.products]
        fastest = max(sample.flops / sample.seconds for sample in samples)
        rated_tflops = self.device.peak_tflops
        peak = rated_tflops * 1e12 if rated_tflops is not None else fastest
        share, _ = product_shares(samples, peak, bandwidth, launch)
        forward, backward = self._attention()
        values: dict[str, float] = {
            "memory": self.device.room() / 2**30 / (1 if self.device.is_cuda else self.world.local_size),
            "bandwidth": bandwidth / 1e12,
            "product": share,
            "elementwise": self._elementwise() / bandwidth,
            "attention_forward": forward / peak,
            "attention_backward": backward / peak,
            "node": self.world.local_size,
        }
        if not self.device.is_cuda:
            values["communicator"] = 0.01  # memory of sockets and socket buffers
            values["host"] = 1e-3  # the host is the device, so neither waits for the other
            values["launch"] = launch * 1e6
        if self.world.size > 1:
            delay, each = self._gathering()
            values |= {"inside": 1 / each / 1e9, "latency": max(delay * 1e6, 1e-3), "peer": self._handing() / 1e9}
        # On CUDA, fp32 and fp64 are not measured; the peaks of `base` are used.
        names = ("bf16", "fp16") if self.device.is_cuda else ("bf16", "fp16", "fp32", "fp64")
        peaks = {name: peak / 1e12 / (2 if name == "fp64" else 1) for name in names}
        # On devices with fp8 products, the fp8 peak is twice the 16-bit peak.
        return values, peaks | ({"fp8": 2 * peak / 1e12} if fp8_matmuls(self.device.torch) else {})

    def filled(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device.torch, dtype=self.dtype)

    def seconds(self, run: Callable[[], object], times: int = 3) -> float:
        """Return the seconds of one call of `run` on the slowest rank: the minimum of several trials, because other
        work can only add time."""
        run()
        trials = []
        for _ in range(self.repeats):
            self.device.synchronize()
            begin = time.perf_counter()
            for _ in range(times):
                run()
            self.device.synchronize()
            trials.append((time.perf_counter() - begin) / times)
        slowest = torch.tensor(min(trials), dtype=torch.float64, device=self.device.torch)
        all_reduce(slowest, self.axis, "max")
        return max(float(slowest), 1e-9)

    def _bandwidth(self) -> float:
        """Return the memory bandwidth of a copy, counting bytes read and written, in bytes per second."""
        x = self.filled(*self.extent.elements)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: y.copy_(x))

    def _elementwise(self) -> float:
        """Return the memory bandwidth, in bytes per second, of a residual addition with a norm, which reads and writes
        two tensors each."""
        tokens, width = self.extent.elements
        x, branch = self.filled(tokens, width), self.filled(tokens, width)
        weight = torch.ones(width, device=self.device.torch, dtype=self.dtype)
        return 4 * x.nbytes / self.seconds(lambda: self.ops.add_norm(x, branch, None, None, weight, None, 1e-5))

    def _matmul(self, m: int, k: int, n: int) -> Product:
        x, weight = self.filled(m, k), self.filled(n, k)
        return Product(m, k, n, x.element_size(), self.seconds(lambda: torch.nn.functional.linear(x, weight)))

    def _attention(self) -> tuple[float, float]:
        """Return operations per second of attention, forward and backward, counting only the causal half."""
        rows, length, heads, width = self.extent.attention
        q, k, v = (self.filled(rows, length, heads, width).requires_grad_() for _ in range(3))
        half = 2.0 * rows * length * length * heads * width
        forward = self.seconds(lambda: self.ops.attention(q, k, v, CAUSAL))
        out = self.ops.attention(q, k, v, CAUSAL)
        grad = torch.ones_like(out)
        backward = self.seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        return half / forward, 2.5 * half / backward

    def _gathering(self) -> tuple[float, float]:
        """Return the latency of an all-gather in seconds, and the seconds per byte sent by a rank."""
        sizes, seconds = [], []
        for size in self.extent.sizes:
            shard = torch.zeros(size // self.world.size, dtype=torch.uint8, device=self.device.torch)
            sizes.append(shard.nbytes * (self.world.size - 1))
            seconds.append(self.seconds(partial(all_gather, shard, self.axis)))
        return line(sizes, seconds)

    def _handing(self) -> float:
        """Return the bytes per second from each rank to the next while all ranks send simultaneously."""
        x = torch.zeros(self.extent.sizes[-1], dtype=torch.uint8, device=self.device.torch)
        return x.nbytes / self.seconds(lambda: RingShift(x, self.axis).wait())
