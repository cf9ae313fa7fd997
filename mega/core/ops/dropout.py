"""Dropout by counter: what is dropped is a function of the tokens' keys, never of a random stream.

So it is the same in every layout and under recompute, and no random state is saved. These are values, which say what
is dropped where, and the plain way to do it; kernels decide alike, bit for bit (kernels/counter.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mega.core.ops import counter
from mega.core.ops.counter import OLD_RULE, RULE, keep_mask, kept_share, row_keys


class _Decided:
    """What a probability and a rule make of dropout."""

    probability: float
    rule: int

    @property
    def keep(self) -> float:
        """The realised probability that an element survives."""
        return kept_share(self.probability, self.rule)

    @property
    def threshold(self) -> int:
        """Of 65,536 values, how many drop an element."""
        return counter.threshold(self.probability)


@dataclass(frozen=True, eq=False)
class Dropout(_Decided):
    """Dropout of a token's elements: a function of token, site and element.

    keys: int64 [tokens]. site: a key of `counter.site_key`. rule: of `counter`. first: number of the first element,
    where `x` is a part of a token; kernels take whole ones.
    """

    keys: torch.Tensor
    site: int
    probability: float
    rule: int = RULE
    first: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, h] -> the same, x / (1 - p) where kept, else 0."""
        rows = row_keys(self.keys, self.site)
        elements = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
        return _drop(x, keep_mask(rows[:, None], elements, self.probability, self.rule), self.keep)


def of_columns(drop: Dropout | None, index: int, width: int) -> Dropout | None:
    """Dropout of a rank's columns, the `index`-th run of `width`."""
    return None if drop is None else replace(drop, first=index * width)


@dataclass(frozen=True, eq=False)
class AttentionDropout(_Decided):
    """Dropout of attention weights: a function of query token, head and key column.

    keys: int64 [b, s], of the query tokens. site, rule: as of `Dropout`. first_head: number of the first head among all
    heads of the model. columns: of the t keys in their row, as one or two runs.
    """

    keys: torch.Tensor
    site: int
    first_head: int
    columns: tuple[range, ...]
    probability: float
    rule: int = RULE

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, t] -> the same, x / (1 - p) where kept, else 0."""
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
        """(early, border, late): key j has column j + early, from j = border on j + late.

        >>> AttentionDropout(torch.zeros(1, 1), 0, 0, (range(2, 4), range(9, 11)), 0.5).shifts()
        (2, 2, 7)
        """
        early, *late = self.columns
        assert len(late) <= 1, self.columns
        return early.start, len(early), late[0].start - len(early) if late else early.start

    def cut(self, queries: slice, keys: slice) -> AttentionDropout:
        """The same dropout for some of the queries and keys."""
        first, end, _ = keys.indices(sum(map(len, self.columns)))
        parts, before = [], 0
        for run in self.columns:
            parts.append(run[max(0, first - before) : max(0, end - before)])
            before += len(run)
        return replace(self, keys=self.keys[:, queries], columns=joined(parts))


def joined(runs: Iterable[range]) -> tuple[range, ...]:
    """The same columns as few runs.

    >>> joined([range(2, 4), range(4, 6), range(0), range(9, 10)])
    (range(2, 6), range(9, 10))
    """
    found: list[range] = []
    for run in filter(len, runs):
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found) or (range(0),)


def _drop(x: torch.Tensor, kept: torch.Tensor, share: float) -> torch.Tensor:
    return torch.where(kept, x * (1.0 / share), torch.zeros((), dtype=x.dtype, device=x.device))
