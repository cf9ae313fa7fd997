"""Partly scored rows of token ids, and windows of a long text. This module depends neither on the tokenizer nor on the
model."""

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
"""Ids of a text, in memory or in a memory-mapped file."""


class JudgedRow(NamedTuple):
    """A row of ids. ids: the ids of a text. judged: position of the first scored id, at least 1; all later ids are also
    scored."""

    ids: Sequence[int] | NDArray[np.integer]
    judged: int


class Windows(Sequence[JudgedRow]):
    """A text as windows of `length` inputs, `stride` ids apart. Every id except the first is scored in exactly one
    window.

    In the first window, all labels are scored. In later windows, only the last `stride` labels are scored, so that each
    scored label has at least length - stride ids of context (Baevski and Auli 2018, section 4.2; Megatron-LM's
    --overlapping-eval).
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
        first_judged = self._length - self._stride + 1 if number else 1
        return JudgedRow(self._ids[begin : begin + self._length + 1], first_judged)


def batch_of(rows: Sequence[JudgedRow], unit: int) -> DecoderBatch:
    """Make one microbatch of rows, padded on the right to a multiple of `unit`. Padding has loss weight 0.

    ids      [b, s + 1]   a row's ids, then zeros
    tokens   [b, s]       all ids but the last
    labels   [b, s]       all ids but the first; weight 1 starting at the first scored id
    """
    longest = max(len(row.ids) for row in rows) - 1
    length = -(-max(longest, 1) // unit) * unit
    ids = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    for number, (text, first_judged) in enumerate(rows):
        ids[number, : len(text)] = torch.from_numpy(np.asarray(text, dtype=np.int64))
        weights[number, first_judged - 1 : len(text) - 1] = 1
    positions = torch.arange(length).expand_as(weights)
    return DecoderBatch(ids[:, :-1], ids[:, 1:], weights, positions, torch.arange(len(rows)))


def nll_of(batch: DecoderBatch, scores: TokenScores) -> Term:
    """Return [b]: for each row, the negative log-likelihood of the scored ids in nats. The weight is the number of
    scored ids."""
    weights = batch.loss_weights.double()
    return Term((scores.nll.double() * weights).sum(1), weights.sum(1))


def per_row(term: Term) -> Term:
    """Return the totals of the term `term`, with weight 1 for each row."""
    return Term(term.total, torch.ones_like(term.total))


def all_greedy(batch: DecoderBatch, scores: TokenScores) -> Term:
    """Return [b]: 1 for each row in which every scored id is the most likely id, else 0."""
    assert scores.greedy is not None
    greedy_rows = (scores.greedy | (batch.loss_weights == 0)).all(1).double()
    return Term(greedy_rows, torch.ones_like(greedy_rows))


def nll_terms(batch: DecoderBatch, scores: TokenScores) -> Terms:
    """Return the terms of a benchmark that measures only the negative log-likelihood."""
    return {"nll": nll_of(batch, scores)}
