"""What operations cost: the operations of a chunk of the model, heard on the meta device, in seconds of a card.

    ChunkOperations  one microbatch on a chunk: what each of its units runs, forward, backward, and gradients put off
    seconds          of one operation, read from measured curves
    played           operations one after the other, with exchanges that run along with them

Nothing here knows what a model consists of: an operation is a shape. heard.py lists them; curves.json was measured on
an H100 (tests/gpu/cost_curves.py) and is scaled to what another card reaches at most (hardware.toml).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from statistics import median
from typing import NamedTuple

from mega.core.estimate.hardware import Hardware


class Gemm(NamedTuple):
    """One of the three matmuls of a linear layer [m tokens, k inputs] -> [m, n outputs], `times` times.

    layout: "forward", "dgrad" or "wgrad". dtype: of what is multiplied. moved: bytes in and out.
    """

    m: int
    k: int
    n: int
    layout: str
    dtype: str
    moved: int
    times: int = 1


class AttentionWork(NamedTuple):
    """rows: batch x heads. share: of all pairs of queries and keys, those that are computed."""

    kernel: str
    backward: bool
    rows: int
    queries: int
    keys: int
    width: int
    share: float


class ElementwiseWork(NamedTuple):
    """A kernel that reads and writes this number of bytes."""

    kernel: str
    moved: int


class CollectiveBegin(NamedTuple):
    """A collective begins: `size` bytes in all over ranks that lie `stride` apart."""

    number: int
    kind: str
    size: int
    ranks: int
    stride: int


class Wait(NamedTuple):
    """What follows needs collective `number`."""

    number: int


class Send(NamedTuple):
    """`blocks` copies of `size` bytes each into other ranks' memory begin."""

    exchange: int
    size: int
    blocks: int


class Received(NamedTuple):
    """What follows needs the next `blocks` blocks of other ranks, which send as we do."""

    exchange: int
    blocks: int


Operation = Gemm | AttentionWork | ElementwiseWork | CollectiveBegin | Wait | Send | Received
Units = tuple[tuple[Operation, ...], ...]
"""Operations by units: what precedes a stack of blocks, every block, what follows them, ..."""


class ChunkOperations(NamedTuple):
    """One microbatch on a chunk. weight: what a schedule that splits the backward pass puts off. cargo: bytes that come
    from the stage before, or go to the next."""

    forward: Units
    backward: Units
    weight: Units
    cargo: int


# -- curves


class Curve:
    """Seconds by shape, between measured points: work / rate, times what the points nearby deviate by, + delay.

    points: coordinates (any positive numbers), work and measured seconds; near points count more, by the distance
    between logarithms of their coordinates. delay: seconds of the least work.
    """

    CLOSE = 0.02
    """Squared distance (in powers of two) within which a point is as good as the shape itself."""

    def __init__(self, points: Sequence[tuple[tuple[float, ...], float, float]], delay: float) -> None:
        self._delay = delay
        self._rate = median(work / (seconds - delay) for _, work, seconds in points)
        self._coordinates = [tuple(map(math.log2, place)) for place, _, _ in points]
        self._off = [math.log((seconds - delay) * self._rate / work) for _, work, seconds in points]

    def seconds(self, place: tuple[float, ...], work: float, speed: float = 1.0) -> float:
        """speed: of another card, whose units are as busy with its share of the first coordinate."""
        where, total, off = tuple(math.log2(max(x, 1e-9)) for x in (place[0] / speed, *place[1:])), 0.0, 0.0
        for point, deviation in zip(self._coordinates, self._off, strict=True):
            distance = sum((a - b) ** 2 for a, b in zip(where, point, strict=True))
            weight = 1.0 / (distance + self.CLOSE) ** 2
            total += weight
            off += weight * deviation
        return work / self._rate / speed * math.exp(off / total) + self._delay


@cache
def _measured() -> Mapping[str, Sequence[Sequence[float]]]:
    return json.loads(files("mega.core.estimate").joinpath("curves.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@cache
def _gemms(kind: str, layout: str) -> Curve:
    """kind: "matmul" or "fp8 matmul"."""
    points = _measured()[f"{kind} {layout}"]
    return Curve([((m, k, n), 2.0 * m * k * n, microseconds * 1e-6) for m, k, n, microseconds in points], 2.5e-6)


@cache
def _attentions(kernel: str, backward: bool) -> Curve:
    points = _measured()[f"attention {kernel}"]
    half = 0.5 if "causal" in kernel else 1.0
    return Curve(
        [
            ((rows, s, width), half * _attention_flops(rows, s, s, width, backward), microseconds[backward] * 1e-6)
            for rows, s, width, *microseconds in points
        ],
        12e-6 if backward else 4e-6,
    )


def _attention_flops(rows: float, queries: float, keys: float, width: float, backward: bool) -> float:
    return (10.0 if backward else 4.0) * rows * queries * keys * width


# -- one operation


@dataclass(frozen=True)
class Card:
    """A device with what its curves are scaled by."""

    on: Hardware

    def seconds(self, operation: Gemm | AttentionWork | ElementwiseWork) -> float:
        """How long a device is busy with it, the gap before the next included."""
        return _seconds(operation, self.on)

    def collective(self, kind: str, size: float, ranks: int, stride: int) -> float:
        """An exchange of `size` bytes in all over ranks that lie `stride` apart."""
        on = self.on
        if ranks == 1:
            return 0.0
        if kind == "shift":
            return self.handed(size, ranks, stride)
        share = (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
        if stride * ranks <= on.node:
            return share * size / (on.inside * 1e9) + on.latency * 1e-6
        # A ring that passes through a node on several GPUs uses the network card of each.
        cards = max(1, on.node // stride)
        rate = min(on.inside, on.outside * cards)
        return share * size / (rate * 1e9) + on.latency_outside * 1e-6 * ranks

    def handed(self, size: float, ranks: int, stride: int) -> float:
        """`size` bytes from each of ranks that lie `stride` apart to the next, all at once: the slowest pair counts."""
        outside = stride * ranks > self.on.node
        rate = self.on.outside if outside else self.on.peer
        delay = self.on.latency_outside if outside else self.on.latency
        return size / (rate * 1e9) + delay * 1e-6

    def elementwise(self, moved: float) -> float:
        """A pass over this number of bytes."""
        return max(moved / (self.on.bandwidth * 1e12 * self.on.elementwise), SHORTEST) + self.on.launch * 1e-6


SHORTEST = 2e-6
"""Seconds of the smallest kernel."""

PEAK, FP8, PRODUCT, ATTENTION = 989.0, 1979.0, 0.70, (0.558, 0.467)
"""Of the card of curves.json: TFLOP/s at most, and the shares of a large product and of plain causal attention."""

GEMM_IN_STEP, ATTENTION_IN_STEP = 1.015, 0.912
"""Speed within a step to that of the curves: an operation that runs alone for long sets its own clock."""


@lru_cache(maxsize=1 << 16)
def _seconds(operation: Gemm | AttentionWork | ElementwiseWork, on: Hardware) -> float:
    gap = on.launch * 1e-6
    if isinstance(operation, Gemm):
        m, k, n, layout, dtype, moved, times = operation
        native = dtype == "fp8" and "fp8" in on.peak
        curve = _gemms("fp8 matmul" if native else "matmul", layout)
        peak = on.fp8 / FP8 if native else (on.fp8 if dtype == "fp8" else on.peak[dtype]) / PEAK
        speed = peak * on.product / PRODUCT * GEMM_IN_STEP
        return max(times * curve.seconds((m, k, n), 2.0 * m * k * n, speed), moved / (on.bandwidth * 1e12)) + gap
    if isinstance(operation, AttentionWork):
        kernel, backward, rows, queries, keys, width, share = operation
        reached = (on.attention_forward, on.attention_backward)[backward] / ATTENTION[backward]
        speed = on.peak["bf16"] / PEAK * reached * ATTENTION_IN_STEP
        work = share * _attention_flops(rows, queries, keys, width, backward)
        return _attentions(kernel, backward).seconds((rows, math.sqrt(queries * keys), width), work, speed) + gap
    assert isinstance(operation, ElementwiseWork), operation
    return Card(on).elementwise(operation.moved)


# -- one after the other


class Taken(NamedTuple):
    """Seconds of a device, and how often the host launched a kernel and an exchange."""

    seconds: float
    launches: int
    exchanges: int


@lru_cache(maxsize=1 << 12)
def played(unit: Sequence[Operation], on: Hardware) -> Taken:
    """The operations of a unit. Collectives run one after the other on a stream of their own, and so do copies."""
    card, now, network, copies = Card(on), 0.0, 0.0, 0.0
    begun: dict[int, tuple[float, float]] = {}
    arrivals: dict[int, list[float]] = {}
    launches = exchanges = 0
    for operation in unit:
        if isinstance(operation, CollectiveBegin):
            start = max(now, network)
            network = start + card.collective(*operation[1:])
            begun[operation.number] = start, network
            exchanges += 1
        elif isinstance(operation, Wait):
            start, end = begun.pop(operation.number, (now, now))
            # It takes some processors from what runs along with it.
            now = max(now + CROWDED * max(0.0, min(now, end) - start), end)
        elif isinstance(operation, Send):
            exchanges += 1
            copies = max(copies, now)
            for _ in range(operation.blocks):
                copies += operation.size / (on.inside * 1e9)
                arrivals.setdefault(operation.exchange, []).append(copies)
        elif isinstance(operation, Received):
            coming = arrivals.get(operation.exchange, [])
            for end in coming[: operation.blocks]:
                now = max(now, end)
            del coming[: operation.blocks]
        else:
            now += card.seconds(operation)
            launches += 1
    return Taken(now, launches, exchanges)


CROWDED = 0.43
"""Share of an overlapped collective by which what runs along with it is slower."""


@dataclass(frozen=True)
class Pass:
    """Seconds of a part: forward, backward, and weight gradients that are put off."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, times: float) -> Pass:
        return Pass(self.forward * times, self.backward * times, self.weight * times)

    @property
    def all(self) -> float:
        return self.forward + self.backward + self.weight


def chunk_pass(found: ChunkOperations, on: Hardware, *, recorded: bool) -> Pass:
    """One microbatch. recorded: as a graph, which asks nothing of the host."""
    device, host = zip(*(_summed(units, on) for units in (found.forward, found.backward, found.weight)), strict=True)
    total = Pass(*device)
    # The host asks for one operation after the other, and a device that is faster waits.
    late = 1.0 if recorded else max(1.0, sum(host) / max(total.all, 1e-12))
    return total * late


def _summed(units: Units, on: Hardware) -> tuple[float, float]:
    """Seconds of a device and of its host."""
    taken = [played(unit, on) for unit in units]
    device = sum(one.seconds for one in taken)
    asked = sum(UNIT * bool(one.launches) + LAUNCH * one.launches + EXCHANGE * one.exchanges for one in taken)
    return device, asked * on.host * 1e-6


UNIT, LAUNCH, EXCHANGE = 0.27, 0.016, 0.061
"""Shares of the host's time for a plain block (25 launches, forward and backward): what a pass of a unit takes in
addition to its launches, a launch, and an exchange between ranks, who wait for each other's hosts too."""
