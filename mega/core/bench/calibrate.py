"""What this machine can do, measured: products, attention, copies, elementwise passes, collectives; written as TOML.

    products        by shape, in the dtype that training uses      -> product
    attention       causal, forward and backward                   -> attention_forward, attention_backward
    copies, norms   large tensors                                  -> bandwidth, elementwise
    collectives     by size over all ranks of this host            -> inside, latency
    hand-overs      from one rank to the next, by size             -> peer

The file is read by `mega memory-estimate --gpu FILE.toml`. What one host cannot tell (links between hosts), or only
a model (what a block takes a GPU's host), keeps the values of `base` in estimate/hardware.toml. It knows no model.
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
    """How much is measured on a kind of device.

    products: (m, k, n). attention: (rows, length, heads, width of a head). sizes: bytes of collectives.
    elements: of copies and elementwise passes, as (tokens, width).
    """

    dtype: str
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, int]
    sizes: tuple[int, ...]
    elements: tuple[int, int]


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
    """Measure as one rank of the world that the environment describes; rank 0 writes `out`. The exit code."""
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
    """One rank's device and its way to the others."""

    def __init__(self, world: World, device: Device, groups: Groups, repeats: int):
        self.world, self.device, self.repeats = world, device, repeats
        self.extent = CUDA if device.is_cuda else CPU
        self.dtype = DTYPES[self.extent.dtype]
        self.ops: Ops = choose(device.torch, self.dtype)
        self.axis: Axis = Mesh(world.rank, dp=world.size, groups=groups).everyone

    def measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """The file's values, and peaks in TFLOP/s by dtype."""
        one = self.filled(1)
        launch = self.seconds(lambda: one.add_(0))
        bandwidth = self._bandwidth()
        samples = [self._matmul(*shape) for shape in self.extent.products]
        fastest = max(sample.flops / sample.seconds for sample in samples)
        known = self.device.peak_tflops
        peak = known * 1e12 if known is not None else fastest
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
            values["communicator"] = 0.01  # sockets and their buffers
            values["host"] = 1e-3  # the host is the device: none waits for the other
            values["launch"] = launch * 1e6
        if self.world.size > 1:
            delay, each = self._gathering()
            values |= {"inside": 1 / each / 1e9, "latency": max(delay * 1e6, 1e-3), "peer": self._handing() / 1e9}
        # fp32 runs on the 16-bit kernels' device too; what is not measured keeps the base's peak.
        names = ("bf16", "fp16") if self.device.is_cuda else ("bf16", "fp16", "fp32", "fp64")
        peaks = {name: peak / 1e12 / (2 if name == "fp64" else 1) for name in names}
        # Every device that multiplies in fp8 does so twice as fast.
        return values, peaks | ({"fp8": 2 * peak / 1e12} if fp8_matmuls(self.device.torch) else {})

    def filled(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device.torch, dtype=self.dtype)

    def seconds(self, run: Callable[[], object], times: int = 3) -> float:
        """Seconds of one `run`, the best of several trials (other work only ever adds), as the slowest rank takes."""
        run()
        found = []
        for _ in range(self.repeats):
            self.device.synchronize()
            begin = time.perf_counter()
            for _ in range(times):
                run()
            self.device.synchronize()
            found.append((time.perf_counter() - begin) / times)
        slowest = torch.tensor(min(found), dtype=torch.float64, device=self.device.torch)
        all_reduce(slowest, self.axis, "max")
        return max(float(slowest), 1e-9)

    def _bandwidth(self) -> float:
        """Bytes read and written a second by a copy."""
        x = self.filled(*self.extent.elements)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: y.copy_(x))

    def _elementwise(self) -> float:
        """Bytes a second of the residual addition with its norm: two tensors read, two written."""
        tokens, width = self.extent.elements
        x, branch = self.filled(tokens, width), self.filled(tokens, width)
        weight = torch.ones(width, device=self.device.torch, dtype=self.dtype)
        return 4 * x.nbytes / self.seconds(lambda: self.ops.add_norm(x, branch, None, None, weight, None, 1e-5))

    def _matmul(self, m: int, k: int, n: int) -> Product:
        x, weight = self.filled(m, k), self.filled(n, k)
        return Product(m, k, n, x.element_size(), self.seconds(lambda: torch.nn.functional.linear(x, weight)))

    def _attention(self) -> tuple[float, float]:
        """Operations a second forward and backward, causal half counted."""
        rows, length, heads, width = self.extent.attention
        q, k, v = (self.filled(rows, length, heads, width).requires_grad_() for _ in range(3))
        half = 2.0 * rows * length * length * heads * width
        forward = self.seconds(lambda: self.ops.attention(q, k, v, CAUSAL))
        out = self.ops.attention(q, k, v, CAUSAL)
        grad = torch.ones_like(out)
        backward = self.seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        return half / forward, 2.5 * half / backward

    def _gathering(self) -> tuple[float, float]:
        """Delay in seconds of an all-gather, and seconds per byte that a rank sends."""
        sizes, seconds = [], []
        for size in self.extent.sizes:
            own = torch.zeros(size // self.world.size, dtype=torch.uint8, device=self.device.torch)
            sizes.append(own.nbytes * (self.world.size - 1))
            seconds.append(self.seconds(partial(all_gather, own, self.axis)))
        return line(sizes, seconds)

    def _handing(self) -> float:
        """Bytes a second from each rank to the next, all at once."""
        x = torch.zeros(self.extent.sizes[-1], dtype=torch.uint8, device=self.device.torch)
        return x.nbytes / self.seconds(lambda: RingShift(x, self.axis).wait())
