"""Computes the peak bytes of one microbatch on one model chunk, from the chunk's trace and the temporary buckets of
ZeRO.

`trace.py` measures each part of a forward or backward pass, and this module adds up these parts in sequence. This
module does not depend on the pipeline, and imports torch only when `footprint` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega.core.config.resolve import shares_casts
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import Chunk
from mega.core.estimate.weights import TransientBucket

if TYPE_CHECKING:
    from mega.core.estimate.trace import Parts


@dataclass(frozen=True)
class Footprint:
    """The memory of one microbatch on one chunk, in bytes."""

    held: int
    """Bytes saved by the forward pass for the backward pass."""
    forward: int
    """Peak of the forward pass, including `held`."""
    backward: int
    """Peak of the backward pass, including `held`."""
    deferred: int
    """Bytes saved by the backward pass for a later, separate pass that computes the weight gradients."""
    in_flight: int
    """Bytes of sent blocks that exchanges keep allocated after a forward pass. All microbatches share these bytes,
    which are included in `forward` and `backward`."""
    cargo: int
    """Bytes received from the previous stage or sent to the next stage."""
    batch: int
    """Bytes of the batch."""
    mapped: int
    """Bytes that exchanges map outside torch's allocator."""
    head: int
    """Bytes, included in `held`, that the units after the last block store."""


def footprint(
    run: RunConfig, chunk: Chunk, buckets: Sequence[TransientBucket] = (), *, repeats: bool = False
) -> Footprint:
    """Return the footprint of one microbatch of a resolved `run` on a chunk.

    buckets: temporary buckets of the only pipeline stage (ZeRO 2 and 3). repeats: whether another microbatch ran before
    this microbatch.
    """
    from mega.core.estimate.trace import trace

    chunk_trace = trace(run, chunk, shared=shares_casts(run))
    walk = _Walk(buckets, len(chunk_trace.forward))
    backward = walk.backward(chunk_trace.backward, chunk_trace.held + chunk_trace.in_flight)
    if repeats and buckets:
        backward = walk.backward(chunk_trace.backward, chunk_trace.held + chunk_trace.in_flight)
    forward = walk.forward(chunk_trace.forward, chunk_trace.before + (walk.leaving if repeats else 0))
    return Footprint(
        held=chunk_trace.held,
        forward=max(chunk_trace.held, forward),
        backward=max(chunk_trace.held, backward),
        deferred=chunk_trace.deferred,
        in_flight=chunk_trace.in_flight,
        cargo=chunk_trace.cargo,
        batch=chunk_trace.batch,
        mapped=chunk_trace.mapped,
        head=sum(part.change for part in chunk_trace.forward[-1]),
    )


class _Walk:
    """Adds up the traced parts of a chunk's passes in sequence, and tracks live bytes.

    leaving: bytes of the gradient reduction that is in flight.
    """

    def __init__(self, buckets: Sequence[TransientBucket], units: int) -> None:
        self.leaving = 0
        self._home: Mapping[tuple[int, int], TransientBucket] = {place: b for b in buckets for place in b.places}
        self._gathered: list[list[TransientBucket]] = [[] for _ in range(units)]
        for bucket in buckets:
            for unit in bucket.units:
                self._gathered[unit].append(bucket)

    def forward(self, parts: Parts, live: int) -> int:
        """The peak of a forward pass that begins with `live` bytes."""
        peak = live
        for unit, gathered, following in zip(parts, self._gathered, [*self._gathered[1:], []], strict=True):
            gathered_bytes = sum(bucket.weights for bucket in [*gathered, *self._sent_for(following, gathered)])
            peak = max(peak, live + gathered_bytes)
            for part in unit:
                peak = max(peak, live + gathered_bytes + part.peak)
                live += part.change
        return peak

    @staticmethod
    def _sent_for(following: Sequence[TransientBucket], gathered: Sequence[TransientBucket]) -> list[TransientBucket]:
        """The buckets that a unit prefetches for the `following` unit."""
        return [bucket for bucket in following if bucket.sent_for and bucket not in gathered]

    def backward(self, parts: Parts, live: int) -> int:
        live += self.leaving
        peak, gathered_ids = live, set[int]()
        open_gradients: dict[int, int] = {}
        order = self._gathered[::-1]
        for unit, gathered, following in zip(reversed(parts), order, [*order[1:], []], strict=True):
            new_buckets = [
                bucket for bucket in [*gathered, *self._sent_for(following, gathered)] if id(bucket) not in gathered_ids
            ]
            gathered_ids |= set(map(id, new_buckets))
            live += sum(bucket.weights for bucket in new_buckets)
            peak = max(peak, live)
            for part in unit:
                peak = max(peak, live + part.peak)
                live += part.change
                if part.weight is None or not self._home:
                    continue
                bucket = self._home[part.weight]
                if part.opens:
                    live += 0 if id(bucket) in open_gradients else bucket.grads
                    open_gradients.setdefault(id(bucket), len(bucket.places))
                    continue
                open_gradients[id(bucket)] -= 1
                if not open_gradients[id(bucket)]:
                    # Only one bucket is reduced at a time. The reduction also needs an output buffer for this rank's
                    # span.
                    peak = max(peak, live + bucket.summed)
                    live += bucket.summed - self.leaving - (bucket.weights if id(bucket) in gathered_ids else 0)
                    self.leaving = bucket.grads + bucket.summed
        return peak
