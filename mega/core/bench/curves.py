"""Measure the times of single operations on this device, as points of the curves in estimate/curves.py.

    matmuls       [m, k] x [k, n]: forward, dgrad, and wgrad that is added to main_grad
    fp8_matmuls   these three matmuls in fp8, on devices that support fp8 matmuls
    attention     by kernel, length and width of a head; forward and backward
    elementwise   a sum of two tensors and an activation, by size
    gap           time of a tiny kernel in a graph

Each operation is repeated for a tenth of a second, so that the clock rate is that of a device under load. On a GPU,
short operations are captured in a CUDA graph, because launching one takes longer than running it. This module does not
depend on models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mega.core.device import Device, Recorder, fp8_matmuls
from mega.core.estimate.curves import KERNELS
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import CAUSAL, FULL, AttentionMask
from mega.core.ops.suite import Ops

Point = tuple[str, tuple[float, ...]]
"""Name of a curve, and one of its points."""

Run = Callable[[], object]

LAUNCHED = 5e-3
"""Operations that take less than this time, in seconds, are captured in a graph on a GPU. The host needs up to a
fifth of this time to launch an operation with its backward pass."""

RECORDED = 50
"""Number of operations in a graph."""


@dataclass(frozen=True)
class Shapes:
    """The sizes to measure on one type of device."""

    matmuls: tuple[tuple[int, int, int], ...]
    """(m tokens, k inputs, n outputs)."""
    attention: tuple[tuple[int, int, int, int], ...]
    """(batch, heads, length, width of a head)."""
    elementwise: tuple[int, ...]
    """Bytes of a tensor."""
    full_width: int
    """Maximum width of a head in attention that is not causal."""
    kernels: tuple[str, ...] = KERNELS
    """The attention kernels to measure."""
    fp8: tuple[int, int] = (4096, 8192)
    """Minimum and maximum number of tokens of the matmuls that are also measured in fp8."""


CUDA = Shapes(
    matmuls=(
        (65536, 1024, 4096), (16384, 1024, 3072), (16384, 1024, 1024), (16384, 1024, 4096), (16384, 4096, 1024),
        (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024), (1024, 1024, 1024), (1024, 1024, 50304),
        (32768, 768, 3072), (8192, 4096, 12288), (8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 32000),
        (4096, 4096, 22016), (2048, 6144, 6144), (8192, 6144, 24576), (8192, 24576, 6144), (8192, 768, 6144),
    ),
    attention=(
        (64, 16, 1024, 64), (1, 16, 1024, 64), (64, 16, 512, 64), (2, 16, 4096, 64), (1, 16, 16384, 64),
        (1, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 16384, 128), (4, 32, 2048, 96),
    ),
    elementwise=tuple(1 << power for power in range(14, 31, 2)),
    full_width=64,
)  # fmt: skip
"""Sizes whose measurement takes about two minutes, including the compilation of kernels."""

CPU = Shapes(
    matmuls=(
        (64, 64, 64), (64, 64, 256), (256, 64, 64), (256, 64, 256), (256, 256, 64), (256, 256, 256), (256, 256, 1024),
        (256, 1024, 256), (512, 128, 512), (512, 512, 128), (512, 512, 512), (1024, 256, 1024), (512, 512, 4096),
        (128, 128, 128), (1024, 64, 1024),
    ),
    attention=(
        (1, 4, 64, 16), (4, 4, 64, 16), (1, 4, 128, 32), (4, 4, 128, 32), (1, 4, 256, 64), (4, 8, 128, 64),
        (2, 8, 256, 64), (1, 8, 512, 64),
    ),
    elementwise=tuple(1 << power for power in range(8, 25, 2)),
    full_width=64,
    kernels=KERNELS[:2],  # dropout and documents run in torch ops, whose times follow from their sizes
)  # fmt: skip


class Meter:
    """Measures how long operations take on a device. ops: the device's ops, in the dtype of the measurement.

    slowest: function that maps the seconds on this rank to those on the slowest rank. seconds: time for which
    an operation is repeated.
    """

    def __init__(
        self,
        device: Device,
        ops: Ops,
        dtype: torch.dtype,
        slowest: Callable[[float], float] = float,
        seconds: float = 0.1,
    ) -> None:
        self.device, self.ops, self.dtype, self._slowest, self._seconds = device, ops, dtype, slowest, seconds

    def filled(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device.torch, dtype=self.dtype)

    def microseconds(self, run: Run, *, captures: bool = True) -> float:
        """Return the microseconds per call of `run`, averaged over many consecutive calls. captures: whether `run` can
        be captured in a graph."""
        run()
        estimate = self._slowest(self._several(run, 3))  # all ranks must repeat a collective equally often
        if captures and self.device.is_cuda and estimate < LAUNCHED:
            return 1e6 * self._slowest(self.in_graph(run))
        return 1e6 * self._slowest(self._several(run, self._times(estimate)))

    def in_graph(self, run: Run) -> float:
        """Return the seconds of one call of `run` in a CUDA graph."""

        def several() -> None:
            for _ in range(RECORDED):
                run()

        graph = Recorder()(several)
        graph.play()
        times = self._times(self._slowest(self._several(graph.play, 3)))
        return self._several(graph.play, times) / RECORDED

    def _times(self, seconds: float) -> int:
        return min(20000, max(3, int(self._seconds / max(seconds, 1e-7))))

    def _several(self, run: Run, count: int) -> float:
        """Return the seconds per call, averaged over `count` calls. On a CPU, return the average of the fastest of
        several groups of calls, because other processes can only add time."""
        parts = 1 if self.device.is_cuda or count < 8 else 4
        seconds = []
        for _ in range(parts):
            self.device.synchronize()
            begin = time.perf_counter()
            for _ in range(count // parts):
                run()
            self.device.synchronize()
            seconds.append((time.perf_counter() - begin) / (count // parts))
        return max(min(seconds), 1e-9)


def points(meter: Meter, shapes: Shapes) -> Iterator[Point]:
    """Measure all curves."""
    yield from elementwise(meter, shapes.elementwise)
    yield from matmuls(meter, shapes.matmuls)
    if fp8_matmuls(meter.device.torch):
        least, most = shapes.fp8
        yield from narrow_matmuls(meter, [each for each in shapes.matmuls if least <= each[0] <= most])
    yield from attention(meter, shapes)


def gap(meter: Meter) -> float:
    """Return the microseconds of a tiny kernel, which on a GPU runs in a graph."""
    x = meter.filled(1024)
    return meter.microseconds(lambda: x.add_(1))


def matmuls(meter: Meter, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Point]:
    for m, k, n in shapes:
        x, weight, grad = meter.filled(m, k), meter.filled(n, k), meter.filled(m, n)
        main_grad = torch.zeros(n, k, device=meter.device.torch)
        runs: dict[str, Run] = {
            "forward": partial(torch.nn.functional.linear, x, weight),
            "dgrad": partial(meter.ops.matmuls.dgrad, grad, weight),
            "wgrad": partial(meter.ops.matmuls.accumulate_wgrad, main_grad, grad, x),
        }
        for layout, run in runs.items():
            yield f"matmul {layout}", (m, k, n, meter.microseconds(run))


def narrow_matmuls(meter: Meter, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Point]:
    """Measure matmuls in fp8, without casts, which are elementwise passes."""
    one, e4m3 = torch.ones((), device=meter.device.torch), torch.float8_e4m3fn
    for m, k, n in shapes:
        x, weight = meter.filled(m, k).to(e4m3), meter.filled(n, k).to(e4m3)
        scaled = partial(torch._scaled_mm, x, weight.t(), scale_a=one, scale_b=one)
        runs: dict[str, Run] = {
            "forward": partial(scaled, out_dtype=meter.dtype, use_fast_accum=True),
            "dgrad": partial(scaled, out_dtype=meter.dtype),
            "wgrad": partial(scaled, out_dtype=torch.float32),
        }
        for layout, run in runs.items():
            yield f"fp8 matmul {layout}", (m, k, n, meter.microseconds(run))


def attention(meter: Meter, shapes: Shapes) -> Iterator[Point]:
    for b, heads, s, width in shapes.attention:
        qkv = meter.filled(b, s, 3 * heads, width)
        q, k, v = (x.detach().requires_grad_() for x in qkv.split(heads, 2))
        grad = meter.filled(b, s, heads, width)
        for kernel in shapes.kernels:
            if "full" in kernel and width > shapes.full_width:
                continue
            mask = mask_of(kernel, b, s, meter.device.torch)
            with torch.no_grad():
                forward = meter.microseconds(partial(meter.ops.attention, q, k, v, mask))
            backward = _backward(meter, partial(meter.ops.attention, q, k, v, mask), (q, k, v), grad, forward)
            yield f"attention {kernel}", (b * heads, s, width, forward, backward)


def _backward(
    meter: Meter, run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor, forward: float
) -> float:
    """Return the microseconds of a backward pass. A graph with a backward pass must also contain its forward pass, so
    both passes are measured together on a GPU, and `forward`, the time of the forward pass, is subtracted."""
    if not meter.device.is_cuda:
        return meter.microseconds(partial(_gradients, run(), inputs, grad))
    both = meter.microseconds(lambda: _gradients(run(), inputs, grad))
    return max(both - forward, 0.1 * both)  # greater than 0 also if noise made `forward` too long


def _gradients(out: torch.Tensor, inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> object:
    return torch.autograd.grad(out, inputs, grad, retain_graph=True)


def mask_of(kernel: str, b: int, s: int, device: torch.device) -> AttentionMask:
    """Return a mask for which the device's attention uses `kernel`."""
    if kernel.startswith("cudnn"):
        return CAUSAL if kernel.endswith("causal") else FULL
    keys = token_keys(1, torch.arange(b, device=device), torch.arange(s, device=device))
    dropout = AttentionDropout(keys, site_key(3, "attention"), 0, (range(s),), 0.1) if "dropout" in kernel else None
    if "causal" in kernel:
        return AttentionMask(dropout=dropout)
    documents = torch.zeros(b, s, dtype=torch.int64, device=device)
    return AttentionMask("full", q_documents=documents, k_documents=documents, dropout=dropout)


def elementwise(meter: Meter, sizes: Sequence[int]) -> Iterator[Point]:
    """Measure passes over tensors of each size in `sizes`, in bytes. A sum of two tensors moves three tensors, and an
    activation moves two. A point is the mean of the two times per byte, which differ on a CPU."""
    for size in sizes:
        x, y = (meter.filled(size // meter.dtype.itemsize) for _ in range(2))
        sum_time = meter.microseconds(partial(torch.add, x, y))
        activation_time = meter.microseconds(partial(torch.nn.functional.gelu, x))
        yield "elementwise", (3 * size, (sum_time + 1.5 * activation_time) / 2)


def collected(found: Iterator[Point]) -> dict[str, list[tuple[float, ...]]]:
    """Return a map from the name of each curve to its points.

    >>> collected(iter([("elementwise", (8, 2.0)), ("elementwise", (16, 3.0))]))
    {'elementwise': [(8, 2.0), (16, 3.0)]}
    """
    curves: dict[str, list[tuple[float, ...]]] = {}
    for name, point in found:
        curves.setdefault(name, []).append(point)
    return curves
