"""Bytes that one microbatch takes on one model chunk: kept from forward to backward, and while each op runs.

A chunk is a list of operators, each with what autograd keeps of it and with what lives besides while it runs. Walking
the list forwards and backwards gives the peaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mega.core.config.run import RunConfig
from mega.core.estimate.operators import Op, Sizes, block_ops, embedding_ops, head_ops, rotary_table
from mega.core.estimate.weights import Passing
from mega.core.plan.pieces import SLOTS


@dataclass(frozen=True)
class Segment:
    """Ops that are kept together, or computed again from `origin` bytes of input."""

    ops: tuple[Op, ...]
    origin: int | None = None

    @property
    def saved(self) -> int:
        return sum(op.saved for op in self.ops)

    @property
    def held(self) -> int:
        return self.saved if self.origin is None else self.origin


@dataclass(frozen=True)
class Footprint:
    """One microbatch on one chunk, in bytes.

    held: from its forward to its backward. forward, backward: the most that lives while it runs, `held` included.
    products: from its backward to its weights' act, where these are two. travelling: blocks of exchanges that are
    over, behind a forward pass, once for all microbatches; what there is of them is part of `forward` and `backward`.
    """

    held: int
    forward: int
    backward: int
    products: int = 0
    travelling: int = 0


def footprint(run: RunConfig, blocks: int, *, first: bool, last: bool, passing: Passing | None = None) -> Footprint:
    """One microbatch of a resolved `run` on a chunk of `blocks` blocks, with embedding or head where it has them.

    passing: buckets that come and go meanwhile.
    """
    sizes = Sizes(run)
    segments = list(chunk_segments(run, sizes, blocks, first=first, last=last))
    cargo = 0 if first or (blocks and _keeps_cargo(run, sizes)) else sizes.residual
    out = 0 if last else sizes.residual
    held = sum(segment.held for segment in segments) + cargo + out
    walk = _Walk(segments, blocks, sizes.residual, passing, sizes.beside)
    later = run.parallel.schedule == "zb-h1"
    products = sum(op.product for segment in segments for op in segment.ops) if later else 0
    forward, travelling = cargo + out + walk.forward(), walk.travelling
    return Footprint(held, max(held, forward), max(held, walk.backward(held, later)), products, travelling)


def _keeps_cargo(run: RunConfig, sizes: Sizes) -> bool:
    """Whether what came from the stage before is the very tensor that a first block keeps of it."""
    if run.memory.recompute == "full" and (run.memory.recompute_method == "uniform" or run.memory.recompute_layers):
        return not run.memory.distribute_saved
    return sizes.kernels or not sizes.widened


def chunk_segments(run: RunConfig, sizes: Sizes, blocks: int, *, first: bool, last: bool) -> Iterator[Segment]:
    """The ops of a chunk in order, grouped by what is computed again."""
    memory = run.memory
    if first:
        yield Segment(tuple(embedding_ops(sizes)))
    if sizes.model.position == "rope":
        yield Segment((rotary_table(sizes),))
    block = tuple(block_ops(sizes))
    origin = sizes.residual // (sizes.tp if memory.distribute_saved else 1)
    if memory.recompute == "full":
        drops = sizes.model.hidden_dropout or sizes.model.attention_dropout
        own = sizes.tokens * (sizes.cp + 1 if sizes.cp > 1 else 1)
        yield Segment((Op("dropout keys", 8 * own if drops else 0, 0, 0),))
    if memory.recompute != "full":
        yield from (Segment(block) for _ in range(blocks))
    elif memory.recompute_method == "uniform":
        group = memory.recompute_layers or 1
        for start in range(0, blocks, group):
            yield Segment(block * min(group, blocks - start), origin)
    else:
        singly = min(memory.recompute_layers or 0, blocks)
        yield from (Segment(block, origin) for _ in range(singly))
        yield from (Segment(block) for _ in range(blocks - singly))
    # What leaves a stage is the stream with its last branch added.
    leaves = Op("sum", 0, 2 * sizes.residual + sizes.normed, sizes.residual)
    yield Segment(tuple(head_ops(sizes)) if last else (leaves,))


class _Walk:
    """The ops of a chunk, run forwards and backwards with what is alive at each.

    A microbatch finds the blocks that the one before left on their way, forwards those of a backward pass.
    """

    def __init__(
        self, segments: list[Segment], blocks: int, residual: int, passing: Passing | None, beside: bool
    ) -> None:
        self.residual, self.passing = residual, passing
        self.segments: list[tuple[Segment, list[tuple[Op, int]]]] = []
        unit = 0
        for segment in segments:
            placed = []
            for op in segment.ops:
                unit += op.name == "attention norm"
                if op.name == "final norm":
                    unit = blocks + 1
                placed.append((op, unit))
            self.segments.append((segment, placed))
        self._blocks = deque([0] * SLOTS, maxlen=SLOTS) if beside else None
        if self._blocks is not None:
            self._blocks.extend(
                size for segment in reversed(segments) for op in segment.ops[::-1] for size in op.blocks.backward
            )

    @property
    def travelling(self) -> int:
        """Blocks of exchanges that are over, and kept."""
        return sum(self._blocks or ())

    def forward(self) -> int:
        live = peak = self.passing.left if self.passing else 0
        for segment, placed in self.segments:
            peak = max(peak, live + (self._through(placed) if segment.origin is None else self._pass(placed)))
            live += segment.held
        return peak

    def _through(self, placed: list[tuple[Op, int]]) -> int:
        """The peak of running ops forwards and keeping what their backward pass needs."""
        live = peak = 0
        for op, unit in placed:
            live += op.saved
            peak = max(peak, live + self._besides(op, unit, op.forward, op.blocks.forward))
        return peak

    def _pass(self, placed: list[tuple[Op, int]]) -> int:
        """The peak of running ops forwards where nothing is kept: roughly that of the widest."""
        return max(op.saved + self._besides(op, unit, op.forward, op.blocks.passed) for op, unit in placed)

    def _besides(self, op: Op, unit: int, working: int, sent: Sequence[int]) -> int:
        """What an op takes besides what is kept: `working`, weights that are here for it, and blocks on their way.

        sent: what it adds to those; each of its exchanges lets the oldest go.
        """
        if self._blocks is not None:
            working += sum(list(self._blocks)[len(sent) :])
            self._blocks.extend(sent)
        if self.passing is None:
            return working
        here, arriving = self.passing.gathered.get(unit, (0, 0))
        # While a unit's weights arrive there is a bucket of them twice, and nothing runs yet.
        return here + (max(working, arriving) if op.name in _ENDS else working)

    def backward(self, held: int, later: bool) -> int:
        """later: products of weights are kept, not computed. After `forward`."""
        passing = self.passing
        leaving = passing.left if passing else 0
        live = peak = held + leaving
        for segment, placed in reversed(self.segments):
            if segment.origin is not None:
                # What comes back from behind waits while the run is computed again.
                peak = max(peak, live + self.residual + self._through(placed))
                live += segment.saved
            for op, unit in reversed(placed):
                if passing:
                    live += passing.opened.get((unit, op.name), 0)
                peak = max(peak, live + self._besides(op, unit, op.backward, op.blocks.backward))
                live += (op.product if later else 0) - op.saved
                for gradients, span in passing.closed.get((unit, op.name), ()) if passing else ():
                    # One bucket at a time is on its way, with room for our span of its sum.
                    peak = max(peak, live + span)
                    live += span - leaving
                    leaving = gradients + span
            if segment.origin is not None:
                live -= segment.origin
        return peak


_ENDS = ("embedding", "attention norm", "down", "final norm", "logits")
"""Ops with which a unit begins, forwards or backwards."""
