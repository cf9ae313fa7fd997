"""Build GPT samples by concatenating the documents of a corpus in shuffled order and cutting this stream every
seq_length tokens.

This module also computes loss weights, document indices and positions from the tokens of a sample. It does not depend
on ranks or batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset
from mega.core.data.order import SampleOrder


class GPTDataset:
    """A dataset whose sample i consists of the tokens q s .. (q + 1) s of the stream (both ends included), with q =
    shuffle[i] and s = seq_length.

    A sample may span any number of documents. Adjacent samples of the stream share one token. With s = 3:

        stream   a a a b b c c c ..      documents a, b, c
        q = 0    a a a b
        q = 1          b b c c
    """

    number = 0
    """Index of the corpus in the blend."""

    def __init__(self, corpus: IndexedDataset, order: SampleOrder, seq_length: int) -> None:
        self._corpus, self._order, self._length = corpus, order, seq_length + 1

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Return token ids, int64 [seq_length + 1]."""
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        row = int(self._order.shuffle[sample])
        (first_place, offset), (last_place, last_offset) = self._order.samples[row : row + 2].tolist()
        tokens = np.empty(self._length, np.int64)
        filled = 0
        for sequence in self._order.documents[first_place:last_place].tolist():
            piece = self._corpus.get(sequence, offset)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0
        last = int(self._order.documents[last_place])
        tokens[filled:] = self._corpus.get(last, offset, last_offset + 1 - offset)
        return tokens

    def documents(self, sample: int) -> frozenset[tuple[int, int]]:
        """Return (corpus index, sequence index) of all sequences that contribute tokens to a sample."""
        row = int(self._order.shuffle[sample])
        first, last = self._order.samples[row : row + 2, 0].tolist()
        return frozenset((self.number, sequence) for sequence in self._order.documents[first : last + 1].tolist())


def loss_weights(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.float32]:
    """Return loss weights: 0 for every `eod`, because the next document's first token is not predicted, and 1 for every
    other token.

    tokens [..., s] -> float32 [..., s]. 5 6 0 7 8 0 with eod 0 -> 1 1 0 1 1 0.
    """
    return (tokens != eod).astype(np.float32) if eod is not None else np.ones(tokens.shape, np.float32)


def document_numbers(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """Return the index, within the row, of each token's document. An `eod` belongs to the document that it ends.

    tokens [..., s] -> int64 [..., s]. 5 6 0 7 8 0 with eod 0 -> 0 0 0 1 1 1.
    """
    ends = (tokens == eod).astype(np.int64)
    return np.asarray(np.cumsum(ends, axis=-1) - ends)


def positions(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.int64]:
    """Return positions 0 .. s - 1. If `eod` is given, positions restart after every `eod`.

    tokens [..., s] -> int64 [..., s]. 5 6 0 7 8 0 with eod 0 -> 0 1 2 0 1 2.
    """
    offsets = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    if eod is None:
        return offsets.copy()
    begins = np.zeros_like(tokens)
    begins[..., 1:] = np.where(tokens[..., :-1] == eod, offsets[..., 1:], 0)
    return offsets - np.maximum.accumulate(begins, axis=-1)
