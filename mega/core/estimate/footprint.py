"""Bytes that one microbatch takes on one model chunk, from its trace, with the buckets that come and go meanwhile.

trace.py says what each part of the chunk keeps and takes; here the parts are put one after the other. Knows no
pipeline, and no torch before it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk
from mega.core.estimate.weights import Transient

if TYPE_CHECKING:
    from mega.core.estimate.trace import Parts


@dataclass(frozen=True)
class Footprint:
    """One microbatch on one chunk, in bytes.

    held: from its forward to its backward. forward, backward: the most that lives while it runs, `held` included.
    deferred: from its backward to its weights' act, where these are two. in_flight: blocks of exchanges that are over,
    after a forward pass, once for all microbatches; what there is of them is part of `forward` and `backward`.
    cargo: what it gets from the stage before, or gives to the next. batch: the batch itself. mapped: outside the
    allocator. head: of `held`, what is kept after the last block.
    """

    held: int
    forward: int
    backward: int
    deferred: int
    in_flight: int
    cargo: int
    batch: int
    mapped: int
    head: int


def footprint(run: RunConfig, chunk: Chunk, buckets: Sequence[Transient] = (), *, repeats: bool = False) -> Footprint:
    """One microbatch of a resolved `run` on a chunk.

    buckets: those that come and go meanwhile (ZeRO 2 and 3), of the only stage. repeats: a microbatch went before.
    """
    from mega.core.estimate.trace import trace

    found = trace(run, chunk)
    walk = _Walk(buckets, len(found.forward))
    backward = walk.backward(found.backward, found.held + found.in_flight)
    if repeats and buckets:
        backward = walk.backward(found.backward, found.held + found.in_flight)
    forward = walk.forward(found.forward, found.before + (walk.leaving if repeats else 0))
    return Footprint(
        held=found.held,
        forward=max(found.held, forward),
        backward=max(found.held, backward),
        deferred=found.deferred,
        in_flight=found.in_flight,
        cargo=found.cargo,
        batch=found.batch,
        mapped=found.mapped,
        head=sum(part.change for part in found.forward[-1]),
    )


class _Walk:
    """The parts of a chunk one after the other, with what is alive at each.

    leaving: bytes of a sum of gradients that is still on its way.
    """

    def __init__(self, buckets: Sequence[Transient], units: int) -> None:
        self.leaving = 0
        self._home: Mapping[tuple[int, int], Transient] = {place: b for b in buckets for place in b.places}
        self._gathered: list[list[Transient]] = [[] for _ in range(units)]
        for bucket in buckets:
            for unit in bucket.units:
                self._gathered[unit].append(bucket)

    def forward(self, parts: Parts, live: int) -> int:
        """The peak of a forward pass that begins with `live` bytes."""
        peak = live
        for unit, gathered, following in zip(parts, self._gathered, [*self._gathered[1:], []], strict=True):
            here = sum(bucket.weights for bucket in [*gathered, *self._sent_for(following, gathered)])
            peak = max(peak, live + here)
            for part in unit:
                peak = max(peak, live + here + part.peak)
                live += part.change
        return peak

    @staticmethod
    def _sent_for(following: Sequence[Transient], here: Sequence[Transient]) -> list[Transient]:
        """What a unit sends for, of the unit that runs next."""
        return [bucket for bucket in following if bucket.sent_for and bucket not in here]

    def backward(self, parts: Parts, live: int) -> int:
        live += self.leaving
        peak, here = live, set[int]()
        waiting: dict[int, int] = {}
        order = self._gathered[::-1]
        for unit, gathered, following in zip(reversed(parts), order, [*order[1:], []], strict=True):
            arriving = [
                bucket for bucket in [*gathered, *self._sent_for(following, gathered)] if id(bucket) not in here
            ]
            here |= set(map(id, arriving))
            live += sum(bucket.weights for bucket in arriving)
            peak = max(peak, live)
            for part in unit:
                peak = max(peak, live + part.peak)
                live += part.change
                if part.weight is None or not self._home:
                    continue
                bucket = self._home[part.weight]
                if part.opens:
                    live += 0 if id(bucket) in waiting else bucket.grads
                    waiting.setdefault(id(bucket), len(bucket.places))
                    continue
                waiting[id(bucket)] -= 1
                if not waiting[id(bucket)]:
                    # One bucket at a time is on its way, with room for our span of its sum.
                    peak = max(peak, live + bucket.summed)
                    live += bucket.summed - self.leaving - (bucket.weights if id(bucket) in here else 0)
                    self.leaving = bucket.grads + bucket.summed
        return peak
