"""Counter-based dropout, whose masks are computed from the keys of tokens instead of a random stream.

Masks are therefore the same in every parallel layout and under recomputation, and no random state is saved. The classes
in this module describe dropout and implement it in plain torch. Kernels compute identical masks (kernels/counter.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mega.core.ops import counter
from mega.core.ops.counter import OLD_RULE, RULE, keep_mask, kept_share, row_keys


class _Decided:
    """Properties that depend only on the probability and the rule of a dropout."""

    probability: float
    rule: int

    @property
    def keep(self) -> float:
        """The exact probability that an element survives, given the integer threshold."""
        return kept_share(self.probability, self.rule)

    @property
    def threshold(self) -> int:
        """The number of drawn values, of 65,536, that drop an element."""
        return counter.threshold(self.probability)


@dataclass(frozen=True, eq=False)
class Dropout(_Decided):
    """Dropout of the elements of tokens. Masks depend on the token, the site and the element."""

    keys: torch.Tensor
    """int64 [tokens]: keys of the tokens."""
    site: int
    """Key of the site in the model, from `counter.site_key`."""
    probability: float
    rule: int = RULE
    """Version of the dropout rule, a constant in `counter`."""
    first: int = 0
    """Index of the first element, for an `x` that contains only some elements of each token. Kernels support only whole
    tokens."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout to x [tokens, h]: x / (1 - p) for surviving elements, else 0."""
        rows = row_keys(self.keys, self.site)
        elements = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
        return _drop(x, keep_mask(rows[:, None], elements, self.probability, self.rule), self.keep)


def of_columns(drop: Dropout | None, index: int, width: int) -> Dropout | None:
    """Return the dropout for the `width` columns of a rank, which begin at column `index` x `width`."""
    return None if drop is None else replace(drop, first=index * width)


@dataclass(frozen=True, eq=False)
class AttentionDropout(_Decided):
    """Dropout of attention weights. Masks depend on the query token, the head and the column of the key."""

    keys: torch.Tensor
    """int64 [b, s]: keys of the query tokens."""
    site: int
    """Key of the site in the model, from `counter.site_key`."""
    first_head: int
    """Index of the first head among all heads of the layer."""
    columns: tuple[range, ...]
    """Columns of the t keys within their row, as one or two ranges."""
    probability: float
    rule: int = RULE
    """Version of the dropout rule, a constant in `counter`."""

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply dropout to weights [b, heads, s, t]: x / (1 - p) for surviving elements, else 0."""
        return _drop(weights, self.kept(weights.shape[1]), self.keep)

    def kept(self, heads: int) -> torch.Tensor:
        """Return bool [b, heads, s, t], which is True for weights that survive."""
        device = self.keys.device
        numbers = torch.arange(self.first_head, self.first_head + heads, device=device)[:, None]
        columns = torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.columns])
        if self.rule == OLD_RULE:
            rows, elements = row_keys(self.keys, self.site)[:, None], numbers[..., None] * (1 << 32) + columns
        else:
            rows, elements = row_keys(self.keys[:, None], self.site, numbers), columns
        return keep_mask(rows[..., None], elements, self.probability, self.rule)

    def shifts(self) -> tuple[int, int, int]:
        """Return (early, border, late), where key j has column j + early if j < border, otherwise column j + late.

        >>> AttentionDropout(torch.zeros(1, 1), 0, 0, (range(2, 4), range(9, 11)), 0.5).shifts()
        (2, 2, 7)
        """
        early, *late = self.columns
        assert len(late) <= 1, self.columns
        return early.start, len(early), late[0].start - len(early) if late else early.start

    def cut(self, queries: slice, keys: slice) -> AttentionDropout:
        """Return the dropout for a range of queries and a range of keys."""
        first, end, _ = keys.indices(sum(map(len, self.columns)))
        parts, before = [], 0
        for run in self.columns:
            parts.append(run[max(0, first - before) : max(0, end - before)])
            before += len(run)
        return replace(self, keys=self.keys[:, queries], columns=joined(parts))


def joined(runs: Iterable[range]) -> tuple[range, ...]:
    """Merge adjacent ranges of columns.

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
