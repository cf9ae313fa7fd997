"""Rows of token ids of which some are judged, and a long text as windows of them. Knows no tokenizer, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.batch import DecoderBatch, Term, Terms
from mega.core.data.mapped import Unmapped
from mega.core.parallel.vocab import TokenScores

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer] | Unmapped
"""Ids of a text, in memory or in a file."""


class JudgedRow(NamedTuple):
    """ids: of a text. judged: the position of the first one that counts, at least 1; all after it do too."""

    ids: Sequence[int] | NDArray[np.integer]
    judged: int


class Windows(Sequence[JudgedRow]):
    """A text as windows of `length` inputs each, `stride` apart, that together judge every id but the first once.

    The first window judges all its labels, a later one its last `stride`: they have seen at least length - stride ids
    (Baevski and Auli 2018, section 4.2; Megatron-LM's --overlapping-eval). ids: integers, any array.

    >>> [(list(row.ids), row.judged) for row in Windows(range(8), length=4, stride=2)]
    [([0, 1, 2, 3, 4], 1), ([2, 3, 4, 5, 6], 3), ([4, 5, 6, 7], 3)]
    """

    def __init__(self, ids: TokenIds, length: int, stride: int):
        assert 1 <= stride <= length, (stride, length)
        self._ids, self._length, self._stride = ids, length, stride
        rest = max(len(ids) - 1 - length, 0)
        self._count = 1 + -(-rest // stride) if len(ids) > 1 else 0

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> JudgedRow: ...
    @overload
    def __getitem__(self, number: slice) -> list[JudgedRow]: ...
    def __getitem__(self, number: int | slice) -> JudgedRow | list[JudgedRow]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < self._count:
            raise IndexError(number)
        begin = number * self._stride
        judged = self._length - self._stride + 1 if number else 1
        return JudgedRow(self._ids[begin : begin + self._length + 1], judged)


def batch_of(rows: Sequence[JudgedRow], unit: int) -> DecoderBatch:
    """Rows as one microbatch, padded on the right, where nothing that counts sees it, to a multiple of `unit`."""
    longest = max(len(row.ids) for row in rows) - 1
    length = -(-max(longest, 1) // unit) * unit
    ids = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    for number, (text, judged) in enumerate(rows):
        ids[number, : len(text)] = torch.from_numpy(np.asarray(text, dtype=np.int64))
        weights[number, judged - 1 : len(text) - 1] = 1
    positions = torch.arange(length).expand_as(weights)
    return DecoderBatch(ids[:, :-1], ids[:, 1:], weights, positions, torch.arange(len(rows)))


def nll_of(batch: DecoderBatch, scores: TokenScores) -> Term:
    """The negative log-likelihood of each row's judged ids, in nats, and how many they are; [b]."""
    weights = batch.loss_weights.double()
    return Term((scores.nll.double() * weights).sum(1), weights.sum(1))


def per_row(term: Term) -> Term:
    """The same totals, each of which counts once."""
    return Term(term.total, torch.ones_like(term.total))


def all_greedy(batch: DecoderBatch, scores: TokenScores) -> Term:
    """Whether all judged ids of each row are the model's first choices; [b]."""
    assert scores.greedy is not None
    right = (scores.greedy | (batch.loss_weights == 0)).all(1).double()
    return Term(right, torch.ones_like(right))


def nll_terms(batch: DecoderBatch, scores: TokenScores) -> Terms:
    return {"nll": nll_of(batch, scores)}
