"""Predicts the time in seconds that a chunk's operations, recorded on the meta device, take on a GPU.

    ChunkOperations  one microbatch on a chunk: operations of each unit (forward, backward, deferred weight gradients)
    Card.seconds     the time of one operation, interpolated from measured curves
    play_unit        the time of a sequence of operations, with overlapping exchanges

This module does not depend on the model, because an operation is described by its shape. `operation_log.py` records
operations. The curves are those of a calibrated device, or those of an H100 (curves.py), scaled to the peak rates of
the device (hardware.toml).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mega.core.estimate.curves import attention_flops, built_in
from mega.core.estimate.hardware import Hardware


class Gemm(NamedTuple):
    """A matmul of a linear layer [m tokens, k inputs] -> [m, n outputs]: forward, dgrad or wgrad."""

    m: int  # Number of tokens
    k: int  # Number of inputs
    n: int  # Number of outputs
    layout: str  # "forward", "dgrad" or "wgrad"
    dtype: str  # Dtype of the factors, or "fp8 blocks" for fp8 with scales of blocks
    moved: int  # Number of bytes read and written
    times: int = 1  # Number of repetitions


class AttentionWork(NamedTuple):
    """One call of an attention kernel."""

    kernel: str  # Name of the curve for this kernel
    backward: bool  # Whether this is the backward pass
    rows: int  # Batch size times number of heads
    queries: int  # Number of query tokens
    keys: int  # Number of key tokens
    width: int  # Head dimension
    share: float  # Fraction of all (query, key) pairs that are computed


class ElementwiseWork(NamedTuple):
    """A kernel whose time depends only on the number of bytes that it reads and writes."""

    kernel: str
    moved: int


class CollectiveBegin(NamedTuple):
    """The start of a collective that runs concurrently until `Wait`."""

    number: int  # Identifies the collective for `Wait`
    kind: str  # Such as "all-reduce" or "shift"
    size: int  # Bytes in total
    ranks: int  # Number of ranks
    stride: int  # Distance between consecutive ranks


class Wait(NamedTuple):
    """The point in a sequence of operations from which the result of collective `number` is needed."""

    number: int


class Send(NamedTuple):
    """The start of copying `blocks` blocks of `size` bytes each into the memory of other ranks."""

    exchange: int
    size: int
    blocks: int


class Received(NamedTuple):
    """The point at which later operations wait for the next `blocks` blocks from other ranks. The other ranks are
    assumed to send blocks at the same times as this rank."""

    exchange: int
    blocks: int


Operation = Gemm | AttentionWork | ElementwiseWork | CollectiveBegin | Wait | Send | Received
Units = tuple[tuple[Operation, ...], ...]
"""Operations, one tuple per unit. The units are the modules before a stack of blocks, each block, the modules after the
stack, and so on."""


class ChunkOperations(NamedTuple):
    """The operations of one microbatch on a chunk."""

    forward: Units  # Forward pass
    backward: Units  # Backward pass
    weight: Units  # Weight gradients that a schedule with a split backward pass defers
    cargo: int  # Bytes received from the previous stage or sent to the next stage


# -- one operation


@dataclass(frozen=True)
class Card:
    """Predicts times on the device `on`, by scaling the measured curves."""

    on: Hardware

    def seconds(self, operation: Gemm | AttentionWork | ElementwiseWork) -> float:
        """Seconds that the device is busy with an operation, including the gap before the next operation."""
        return _seconds(operation, self.on)

    def collective(self, kind: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of a collective with `size` bytes in total, over `ranks` ranks at a distance of `stride`."""
        on = self.on
        if ranks == 1:
            return 0.0
        if kind == "shift":
            return self.handed(size, ranks, stride)
        share = (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
        if stride * ranks <= on.node:
            return share * size / (on.inside * 1e9) + on.latency * 1e-6
        # If several GPUs of a node belong to the group, a ring uses the network cards of all these GPUs.
        network_cards = max(1, on.node // stride)
        rate = min(on.inside, on.outside * network_cards)
        return share * size / (rate * 1e9) + on.latency_outside * 1e-6 * ranks

    def handed(self, size: float, ranks: int, stride: int) -> float:
        """Seconds for all ranks to send `size` bytes at the same time, each to the rank at distance `stride`. The
        slowest pair determines the time."""
        outside = stride * ranks > self.on.node
        rate = self.on.outside if outside else self.on.peer
        delay = self.on.latency_outside if outside else self.on.latency
        return size / (rate * 1e9) + delay * 1e-6

    def elementwise(self, moved: float) -> float:
        """Seconds of an elementwise kernel that reads and writes `moved` bytes in total."""
        if self.on.curves is not None and (measured := self.on.curves.elementwise(moved)) is not None:
            return measured + self.on.launch * 1e-6
        return max(moved / (self.on.bandwidth * 1e12 * self.on.elementwise), SHORTEST) + self.on.launch * 1e-6


SHORTEST = 2e-6
"""Seconds of the smallest kernel."""

PEAK, FP8, PRODUCT, ATTENTION = 989.0, 1979.0, 0.70, (0.558, 0.467)
"""Values of the card on which curves.json was measured: peak TFLOP/s in bf16 and fp8, and the fractions of the peak
that a large matrix product and plain causal attention (forward, backward) reach."""

GEMM_IN_STEP, ATTENTION_IN_STEP = 1.015, 0.912
"""Speed of matmuls and of attention within a step, relative to the curves. The curves were measured by repeating one
operation, which changes the card's clock rate."""

BLOCKED = {"forward": 1.17, "wgrad": 1.47}
"""Time of an fp8 GEMM with scales of blocks relative to the curve, which was measured with one scale per tensor.
Measured in a step of 8 blocks of Llama-2 7B with 32,768 tokens on an H100. "forward" includes dgrad."""


@lru_cache(maxsize=1 << 16)
def _seconds(operation: Gemm | AttentionWork | ElementwiseWork, hardware: Hardware) -> float:
    gap = hardware.launch * 1e-6
    if isinstance(operation, Gemm):
        return _gemm(operation, hardware) + gap
    if isinstance(operation, AttentionWork):
        return _attention(operation, hardware) + gap
    assert isinstance(operation, ElementwiseWork), operation
    return Card(hardware).elementwise(operation.moved)


def _gemm(operation: Gemm, hardware: Hardware) -> float:
    m, k, n, layout, dtype, bytes_moved, times = operation
    fp8 = dtype.startswith("fp8")
    native = fp8 and "fp8" in hardware.peak
    kind, rate = "fp8 matmul" if native else "matmul", hardware.fp8 if fp8 else hardware.peak[dtype]
    curve = None if hardware.curves is None else hardware.curves.matmul(kind, layout)
    if curve is not None:
        speed = rate / hardware.peak["fp8" if native else "bf16"]
    else:
        curve = built_in().matmul(kind, layout)
        speed = rate / (FP8 if native else PEAK) * hardware.product / PRODUCT
    assert curve is not None, f"{kind} {layout}: no curve says what this matmul takes"
    seconds = times * curve.seconds((m, k, n), 2.0 * m * k * n, speed * GEMM_IN_STEP)
    if dtype == "fp8 blocks" and native:
        seconds *= BLOCKED[layout]
    return max(seconds, bytes_moved / (hardware.bandwidth * 1e12))


def _attention(operation: AttentionWork, hardware: Hardware) -> float:
    kernel, backward, rows, queries, keys, width, share = operation
    curve, speed = None if hardware.curves is None else hardware.curves.attention(kernel, backward), 1.0
    if curve is None:
        curve = built_in().attention(kernel, backward)
        relative_efficiency = (hardware.attention_forward, hardware.attention_backward)[backward] / ATTENTION[backward]
        speed = hardware.peak["bf16"] / PEAK * relative_efficiency
    assert curve is not None, f"{kernel}: no curve says what this attention takes"
    work = share * attention_flops(rows, queries, keys, width, backward)
    return curve.seconds((rows, math.sqrt(queries * keys), width), work, speed * ATTENTION_IN_STEP)


# -- sequences of operations


class UnitTime(NamedTuple):
    """The device time and the number of launches of a sequence of operations."""

    seconds: float
    """Device time in seconds."""
    launches: int
    """Number of kernels that the host launched."""
    exchanges: int
    """Number of exchanges that the host launched."""


@lru_cache(maxsize=1 << 13)
def play_unit(unit: Sequence[Operation], hardware: Hardware) -> UnitTime:
    """Simulate the operations of a unit. Collectives run one after the other on one stream, and copies to other ranks
    on a second stream."""
    card, device_time, network_free, copies_end = Card(hardware), 0.0, 0.0, 0.0
    running: dict[int, tuple[float, float]] = {}
    arrivals: dict[int, list[float]] = {}
    launches = exchanges = 0
    for operation in unit:
        if isinstance(operation, CollectiveBegin):
            start = max(device_time, network_free)
            network_free = start + card.collective(*operation[1:])
            running[operation.number] = start, network_free
            exchanges += 1
        elif isinstance(operation, Wait):
            start, end = running.pop(operation.number, (device_time, device_time))
            # A running collective occupies multiprocessors, which slows down overlapping kernels.
            device_time = max(device_time + CROWDED * max(0.0, min(device_time, end) - start), end)
        elif isinstance(operation, Send):
            exchanges += 1
            copies_end = max(copies_end, device_time)
            for _ in range(operation.blocks):
                copies_end += operation.size / (hardware.inside * 1e9)
                arrivals.setdefault(operation.exchange, []).append(copies_end)
        elif isinstance(operation, Received):
            block_arrivals = arrivals.get(operation.exchange, [])
            for end in block_arrivals[: operation.blocks]:
                device_time = max(device_time, end)
            del block_arrivals[: operation.blocks]
        else:
            device_time += card.seconds(operation)
            launches += 1
    return UnitTime(device_time, launches, exchanges)


CROWDED = 0.43
"""Time by which a running collective delays overlapping kernels, as a fraction of the overlapped time."""


@dataclass(frozen=True)
class Pass:
    """Times of the forward and backward passes through a unit or a chunk of the model, in seconds."""

    forward: float = 0.0
    """Forward pass."""
    backward: float = 0.0
    """Backward pass, without deferred weight gradients."""
    weight: float = 0.0
    """Deferred weight gradients."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, times: float) -> Pass:
        return Pass(self.forward * times, self.backward * times, self.weight * times)

    @property
    def all(self) -> float:
        return self.forward + self.backward + self.weight


def chunk_pass(operations: ChunkOperations, hardware: Hardware, *, recorded: bool) -> Pass:
    """Return the times of one microbatch on a chunk. recorded: whether the microbatch is replayed as a CUDA graph, in
    which case the host does not launch individual operations."""
    device, host = zip(
        *(_summed(units, hardware) for units in (operations.forward, operations.backward, operations.weight)),
        strict=True,
    )
    total = Pass(*device)
    # The host launches operations one by one. If the device is faster than the host, it waits for launches.
    slowdown = 1.0 if recorded else max(1.0, sum(host) / max(total.all, 1e-12))
    return total * slowdown


def _summed(units: Units, hardware: Hardware) -> tuple[float, float]:
    """Return (device time, host time) of `units`, in seconds."""
    device = sum(play_unit(unit, hardware).seconds for unit in units)
    return device, host_blocks(units, hardware) * hardware.host * 1e-6


def host_blocks(units: Units, hardware: Hardware) -> float:
    """Return the host time of `units`, as a multiple of the host time for a plain block (`Hardware.host`)."""
    times = [play_unit(unit, hardware) for unit in units]
    return sum(UNIT * bool(one.launches) + LAUNCH * one.launches + EXCHANGE * one.exchanges for one in times)


UNIT, LAUNCH, EXCHANGE = 0.27, 0.016, 0.061
"""Host time of one pass of a unit, of a kernel launch, and of an exchange (including the wait for the hosts of other
ranks). All are fractions of the host time for a plain block (25 launches, forward and backward)."""
