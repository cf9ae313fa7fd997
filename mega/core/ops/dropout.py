"""Dropout by counter: masks are a function of the tokens' keys, not of a random stream.

So masks are the same in every parallel layout and under recomputation, and no random state is saved. The classes here
describe dropout and implement it in plain torch; kernels compute identical masks (kernels/counter.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mega.core.ops import counter
from mega.core.ops.counter import OLD_RULE, RULE, keep_mask, kept_share, row_keys


class _Decided:
    """The properties that follow from a probability and a rule."""

    probability: float
    rule: int

    @property
    def keep(self) -> float:
        """The realised probability that an element survives."""
        return kept_share(self.probability, self.rule)

    @property
    def threshold(self) -> int:
        """The number of values out of 65,536 that drop an element."""
        return counter.threshold(self.probability)


@dataclass(frozen=True, eq=False)
class Dropout(_Decided):
    """Dropout of a token's elements: a function of token, site and element."""

    keys: torch.Tensor
    """int64 [tokens]."""
    site: int
    """From `counter.site_key`."""
    probability: float
    rule: int = RULE
    """The version of the dropout rule, from `counter`."""
    first: int = 0
    """The index of the first element, if `x` is a part of a token. Kernels support whole tokens only."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout to x [tokens, h]: x / (1 - p) for surviving elements, else 0."""
        rows = row_keys(self.keys, self.site)
        elements = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
        return _drop(x, keep_mask(rows[:, None], elements, self.probability, self.rule), self.keep)


def of_columns(drop: Dropout | None, index: int, width: int) -> Dropout | None:
    """The dropout for a rank's columns, which are the `width` columns from index x width on."""
    return None if drop is None else replace(drop, first=index * width)


@dataclass(frozen=True, eq=False)
class AttentionDropout(_Decided):
    """Dropout of attention weights: a function of query token, head and key column."""

    keys: torch.Tensor
    """int64 [b, s]: keys of the query tokens."""
    site: int
    """As in `Dropout`."""
    first_head: int
    """The index of the first head among all heads of the layer."""
    columns: tuple[range, ...]
    """The columns of the t keys in their row, as one or two ranges."""
    probability: float
    rule: int = RULE
    """As in `Dropout`."""

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply dropout to weights [b, heads, s, t]: x / (1 - p) for surviving elements, else 0."""
        return _drop(weights, self.kept(weights.shape[1]), self.keep)

    def kept(self, heads: int) -> torch.Tensor:
        """bool [b, heads, s, t]: which weights survive."""
        device = self.keys.device
        numbers = torch.arange(self.first_head, self.first_head + heads, device=device)[:, None]
        columns = torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.columns])
        if self.rule == OLD_RULE:
            rows, elements = row_keys(self.keys, self.site)[:, None], numbers[..., None] * (1 << 32) + columns
        else:
            rows, elements = row_keys(self.keys[:, None], self.site, numbers), columns
        return keep_mask(rows[..., None], elements, self.probability, self.rule)

    def shifts(self) -> tuple[int, int, int]:
        """(early, border, late): key j has column j + early if j < border, else column j + late.

        >>> AttentionDropout(torch.zeros(1, 1), 0, 0, (range(2, 4), range(9, 11)), 0.5).shifts()
        (2, 2, 7)
        """
        early, *late = self.columns
        assert len(late) <= 1, self.columns
        return early.start, len(early), late[0].start - len(early) if late else early.start

    def cut(self, queries: slice, keys: slice) -> AttentionDropout:
        """The dropout of some of the queries and keys."""
        first, end, _ = keys.indices(sum(map(len, self.columns)))
        parts, before = [], 0
        for run in self.columns:
            parts.append(run[max(0, first - before) : max(0, end - before)])
            before += len(run)
        return replace(self, keys=self.keys[:, queries], columns=joined(parts))


def joined(runs: Iterable[range]) -> tuple[range, ...]:
    """The same columns, with adjacent ranges merged.

    >>> joined([range(2, 4), range(4, 6), range(0), range(9, 10)])
    (range(2, 6), range(9, 10))
    """
    columns: list[range] = []
    for run in filter(len, runs):
        if columns and columns[-1].stop == run.start:
            columns[-1] = range(columns[-1].start, run.stop)
        else:
            columns.append(run)
    return tuple(columns) or (range(0),)


def _drop(x: torch.Tensor, kept: torch.Tensor, share: float) -> torch.Tensor:
    return torch.where(kept, x * (1.0 / share), torch.zeros((), dtype=x.dtype, device=x.device))
