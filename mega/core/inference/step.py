"""What one iteration of the model runs, as plain integers and floats: one thing for one rank and for many.

Made by the scheduler, cut into tiles or packed into one array for other ranks, run by workers. Knows neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega.core.inference.cache import SCRATCH
from mega.core.ops.paged_attention import Integers

CHOOSE, BEAM = -1, -2
"""Targets that are not ids: choose a token; report the likeliest that are allowed."""

NOT_FINITE = -1
"""In the place of a chosen id: the logits hold a NaN or an infinity."""

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniform", "presence", "frequency")
"""Columns of `Step.numbers`; uniform: in [0, 1), what a draw goes by."""


def from_request(index: int) -> int:
    """In the place of an id: the last one that a step chose for the request of this index.

    >>> from_request(0), from_request(from_request(5))
    (-1, 5)
    """
    return ~index


@dataclass(frozen=True, eq=False)
class Step:
    """Tokens [n] in runs [r], each of one sequence, and the rows of logits [m] that are wanted.

    tokens, positions: int64 [n]; a token below 0 is `from_request`. slots: int64 [n], where in the cache a token's key
    and value go: block x size + place.
    counts, lengths: int64 [r], tokens of each run, and of its sequence up to its end. tables: int64 [r, width], blocks.
    sequences: int64 [r], a number that no other sequence has had.
    adapters: int64 [r], number of the adapter that a run goes by, from 1 on; 0 is none.
    offsets: int64 [r], what is added to positions to find the rows of the rotary tables.
    copies: int64 [c, 2], blocks that are copied (from, to) before anything is computed.
    wanted: int64 [m], tokens whose logits are wanted. targets: int64 [m], the id to be scored, or CHOOSE or BEAM. tops:
    int64 [m], likeliest ids to report; -1: not even the log-probability. seen: int64 [m], which row of seen ids the
    repetition penalty goes by, or -1. requests: int64 [m], index of the
    request whose last token is what is chosen, or -1. numbers:
    float64 [m, NUMBERS].
    marks: int64 [p, 2], (row of seen ids, id to add to it), with id -1 to clear it first.
    biases: float64 [b, 3], (row of seen ids, id, what is added to its logit), after `marks`.
    allowed: bool [m, vocab], or [0, 0] where everything is.
    """

    tokens: Integers
    positions: Integers
    slots: Integers
    counts: Integers
    lengths: Integers
    tables: Integers
    sequences: Integers
    adapters: Integers
    offsets: Integers
    copies: Integers
    wanted: Integers
    targets: Integers
    tops: Integers
    seen: Integers
    requests: Integers
    marks: Integers
    biases: NDArray[np.float64]
    numbers: NDArray[np.float64]
    allowed: NDArray[np.bool_]

    @property
    def table_rows(self) -> Integers:
        """int64 [n], rows of the rotary tables."""
        return self.positions + np.repeat(self.offsets, self.counts) if self.offsets.any() else self.positions

    @property
    def report(self) -> int:
        """Likeliest ids that any row reports; -1 where no log-probability is wanted."""
        return int(self.tops.max(initial=-1))

    def pack(self) -> Integers:
        """All of it as one array."""
        parts = []
        for field in fields(self):
            array = getattr(self, field.name)
            parts.append(np.array([*array.shape, 0][:2], dtype=np.int64))
            parts.append(_as_integers(array))
        return np.concatenate(parts)

    @classmethod
    def unpack(cls, packed: Integers) -> Step:
        """The step of a `pack`."""
        values: dict[str, Any] = {}
        at = 0
        for field in fields(cls):
            rows, columns = (int(size) for size in packed[at : at + 2])
            at += 2
            flat, shape = field.name in _FLAT, (rows, columns)
            length = _length(field.name, rows if flat else rows * columns)
            array = _from_integers(field.name, packed[at : at + length], rows if flat else rows * columns)
            values[field.name] = array if flat else array.reshape(shape)
            at += length
        return cls(**values)

    def tiles(self, rows: int) -> Iterator[Step]:
        """The same in steps of exactly `rows` tokens, each a run of its own, and `rows` wanted; padding goes to
        SCRATCH. What is wanted of a tile comes first in it. Only what a forward pass needs is cut."""
        run = np.repeat(np.arange(len(self.counts)), self.counts)
        tables = self.tables[run]
        for first in range(0, max(len(self.tokens), 1), rows):
            part = slice(first, first + rows)
            missing = rows - len(self.tokens[part])
            here = (self.wanted >= first) & (self.wanted < first + rows)
            wanted = self.wanted[here] - first
            yield replace(
                self,
                tokens=_padded(self.tokens[part], missing),
                positions=_padded(self.positions[part], missing),
                slots=_padded(self.slots[part], missing),
                counts=np.ones(rows, dtype=np.int64),
                lengths=_padded(self.positions[part] + 1, missing, 1),
                tables=np.concatenate([tables[part], np.full((missing, tables.shape[1]), SCRATCH)]),
                sequences=_padded(self.sequences[run][part], missing, -1),
                adapters=_padded(self.adapters[run][part], missing),
                offsets=_padded(self.offsets[run][part], missing),
                wanted=_padded(wanted, rows - len(wanted)),
            )


def scratch_step(counts: Sequence[int], block: int, before: int = 0, free: int = 0) -> Step:
    """Runs of `counts` tokens of no sequence, after `before` others; of each a token is drawn.

    They lie in blocks of their own, from 1 on, where at least `free` blocks are nobody's; else all in SCRATCH, where
    the keys of runs of several tokens are whichever were written last.
    """
    runs = len(counts)
    lengths = np.array(counts, dtype=np.int64)
    none, pairs = np.zeros(int(lengths.sum()), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    rows, drawn = np.zeros(runs, dtype=np.int64), (1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0)
    width = -(-(int(lengths.max()) + before) // block)
    tables = 1 + np.arange(runs * width).reshape(runs, width)
    if runs * width > free:
        tables[:] = SCRATCH
    positions = [np.arange(before, before + count) for count in counts]
    slots = [
        table[at // block] * block + (at % block) * (table[0] != SCRATCH)
        for table, at in zip(tables, positions, strict=True)
    ]
    return Step(
        tokens=none,
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        counts=lengths,
        lengths=lengths + before,
        tables=tables,
        sequences=rows - 1,
        adapters=rows,
        offsets=rows,
        copies=pairs,
        wanted=lengths.cumsum() - 1,
        targets=rows + CHOOSE,
        tops=rows - 1,
        seen=rows - 1,
        requests=rows - 1,
        marks=pairs,
        biases=np.zeros((0, 3)),
        numbers=np.array([drawn] * runs, dtype=np.float64),
        allowed=np.zeros((0, 0), dtype=np.bool_),
    )


def _padded(array: Integers, missing: int, value: int = 0) -> Integers:
    return np.concatenate([array, np.full(missing, value)]) if missing else array


_FLAT = {field.name for field in fields(Step)} - {"tables", "copies", "marks", "biases", "numbers", "allowed"}


def _as_integers(array: NDArray[Any]) -> Integers:
    if array.dtype == np.bool_:
        bits = np.packbits(array.reshape(-1))
        array = np.concatenate([bits, np.zeros(-len(bits) % 8, dtype=np.uint8)])
    return array.reshape(-1).view(np.int64)


def _length(name: str, elements: int) -> int:
    return -(-elements // 64) if name == "allowed" else elements


def _from_integers(name: str, array: Integers, elements: int) -> NDArray[np.generic]:
    if name == "allowed":
        return np.unpackbits(array.view(np.uint8), count=elements).astype(np.bool_)
    return array.view(np.float64) if name in ("numbers", "biases") else array
