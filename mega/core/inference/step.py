"""Describe one iteration of the model as arrays of integers and floats, in the same way for any number of ranks.

The scheduler builds a step, and the workers run it. A step can be split into tiles, or packed into one array for the
other ranks. This module depends on neither the scheduler nor workers.
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
"""Values of `Step.targets` other than ids. CHOOSE: choose a token. BEAM: report the most likely allowed ids."""

STRIDE = 7919
"""Difference between consecutive tokens of a `scratch_step`, modulo the vocabulary size."""
NOT_FINITE = -1
"""Reported instead of the chosen id if the logits contain NaN or infinity."""

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniform", "presence", "frequency")
"""Columns of `Step.numbers`; uniform: the random number in [0, 1) that determines the sampled token."""


def from_request(index: int) -> int:
    """Return a placeholder for an id that is not known yet: the last id that an earlier step chooses for the request
    with index `index`.

    >>> from_request(0), from_request(from_request(5))
    (-1, 5)
    """
    return ~index


@dataclass(frozen=True, eq=False)
class Step:
    """The input of a step: n tokens in r runs, each from one sequence, and the m rows of logits that the step returns.

    tokens   a0 a1 a2 | b7 | c4 c5      n = 6, r = 3: a prompt of three tokens, one new token, two tokens
    counts   3          1    2
    wanted         2    3       5       m = 3: the last token of each run
    """

    tokens: Integers
    """int64 [n], ids; negative values are `from_request` placeholders."""
    positions: Integers
    """int64 [n], positions of the tokens in their sequences."""
    slots: Integers
    """int64 [n], slots in the cache for a token's key and value: block * block size + offset."""
    counts: Integers
    """int64 [r], number of tokens in each run."""
    lengths: Integers
    """int64 [r], number of tokens in the run's sequence up to the end of the run."""
    tables: Integers
    """int64 [r, width], block table of the run's sequence."""
    sequences: Integers
    """int64 [r], unique number of the run's sequence."""
    adapters: Integers
    """int64 [r], index of the run's adapter, counted from 1; 0 for the base model."""
    offsets: Integers
    """int64 [r], offset added to a position to get its row in the rotary tables."""
    copies: Integers
    """int64 [c, 2], pairs (source, destination) of blocks to copy before the computation."""
    wanted: Integers
    """int64 [m], indices of the tokens whose logits are returned."""
    targets: Integers
    """int64 [m], the id to score, or CHOOSE or BEAM."""
    tops: Integers
    """int64 [m], number of most likely ids to report; -1 to report no log-probabilities."""
    seen: Integers
    """int64 [m], row of `SeenIds` for the penalties; -1 for no penalties."""
    requests: Integers
    """int64 [m], index of the request whose last token is chosen from the row, or -1."""
    marks: Integers
    """int64 [p, 2], (row of `SeenIds`, id to add to the row); id -1 clears the row."""
    biases: NDArray[np.float64]
    """float64 [b, 3], (row of `SeenIds`, id, value to add to the id's logit), applied after `marks`."""
    numbers: NDArray[np.float64]
    """float64 [m, len(NUMBERS)], sampling parameters in the order of `NUMBERS`."""
    allowed: NDArray[np.bool_]
    """bool [m, vocab], whether an id may be chosen; [0, 0] if all ids are allowed."""

    @property
    def table_rows(self) -> Integers:
        """int64 [n], row index in the rotary tables for each token."""
        return self.positions + np.repeat(self.offsets, self.counts) if self.offsets.any() else self.positions

    @property
    def report(self) -> int:
        """The maximum number of ids that a row reports; -1 if no row reports log-probabilities."""
        return int(self.tops.max(initial=-1))

    def pack(self) -> Integers:
        """Concatenate all arrays into one."""
        parts = []
        for field in fields(self):
            array = getattr(self, field.name)
            parts.append(np.array([*array.shape, 0][:2], dtype=np.int64))
            parts.append(_as_integers(array))
        return np.concatenate(parts)

    @classmethod
    def unpack(cls, packed: Integers) -> Step:
        """Restore a step from the array that `pack` returns."""
        values: dict[str, Any] = {}
        offset = 0
        for field in fields(cls):
            rows, columns = (int(size) for size in packed[offset : offset + 2])
            offset += 2
            flat, shape = field.name in _FLAT, (rows, columns)
            length = _length(field.name, rows if flat else rows * columns)
            array = _from_integers(field.name, packed[offset : offset + length], rows if flat else rows * columns)
            values[field.name] = array if flat else array.reshape(shape)
            offset += length
        return cls(**values)

    def tiles(self, rows: int) -> Iterator[Step]:
        """Split the step into tiles, which are steps of exactly `rows` tokens and `rows` wanted rows. In a tile, each
        token is a run, keys of padding are written to SCRATCH, and wanted rows come before padding. Only the fields
        that a forward pass reads are split."""
        run = np.repeat(np.arange(len(self.counts)), self.counts)
        tables = self.tables[run]
        for first in range(0, max(len(self.tokens), 1), rows):
            part = slice(first, first + rows)
            missing = rows - len(self.tokens[part])
            in_tile = (self.wanted >= first) & (self.wanted < first + rows)
            wanted_rows = self.wanted[in_tile] - first
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
                wanted=_padded(wanted_rows, rows - len(wanted_rows)),
            )


def scratch_step(counts: Sequence[int], block: int, vocab: int, before: int = 0, free: int = 0) -> Step:
    """Return a step with runs of `counts` tokens that belong to no sequence. Each run starts at position `before` and
    samples one token.

    The runs use separate blocks if `free` blocks are enough. Otherwise, all runs write to SCRATCH, whose content is
    then undefined.

    vocab: vocabulary size. The tokens differ, because with equal tokens an MoE layer would read only the experts of one
    token, and the measured duration would be too short.
    """
    runs = len(counts)
    lengths = np.array(counts, dtype=np.int64)
    tokens, pairs = np.arange(lengths.sum()) * STRIDE % vocab, np.zeros((0, 2), dtype=np.int64)
    rows, sampled = np.zeros(runs, dtype=np.int64), (1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0)
    width = -(-(int(lengths.max()) + before) // block)
    # block 0 is SCRATCH
    tables = 1 + np.arange(runs * width).reshape(runs, width)
    if runs * width > free:
        tables[:] = SCRATCH
    positions = [np.arange(before, before + count) for count in counts]
    slots = [
        table[place // block] * block + (place % block) * (table[0] != SCRATCH)
        for table, place in zip(tables, positions, strict=True)
    ]
    return Step(
        tokens=tokens,
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
        numbers=np.array([sampled] * runs, dtype=np.float64),
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
