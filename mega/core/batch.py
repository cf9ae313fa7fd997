"""The inputs of a model: the protocol of a batch, and one dataclass for each family.

A batch contains only tensors. The package `data` reads the samples, and the model computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, Self

import torch


class Term(NamedTuple):
    """One loss or metric as two sums over tokens or rows: its mean is total / weight.

    root: the tensor at which the backward pass begins, for a loss whose gradient was computed in the forward pass and
    already includes the loss scale; `total` is then only a number. `root` has no elements, so that no caller can scale
    the loss again, which would not change the gradient. None if the backward pass begins at `total`.
    """

    total: torch.Tensor
    weight: torch.Tensor
    root: torch.Tensor | None = None


Terms = Mapping[str, Term]


class Batch(Protocol):
    """One microbatch of any family."""

    @property
    def samples(self) -> torch.Tensor:
        """int64 [b], global sample indices; sample index and column identify a token in every layout."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Name of each loss term of the head -> the weights whose sum divides that term."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by field."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the batch with `change` applied to every tensor."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`."""

    def split(self, index: int, size: int) -> Self:
        """Return the columns that rank `index` of a context axis of `size` ranks holds."""


@dataclass(frozen=True)
class _Tensors:
    """A dataclass of tensors, some of which may be None."""

    def to(self, device: torch.device) -> Self:
        """Copy to `device`; copies to a GPU use pinned memory, because the host would wait for a copy from pageable
        memory."""
        if device.type != "cuda":
            return self.map(lambda value: value.to(device))
        # Rows may share the memory of their positions (`expand`), which cannot be pinned.
        return self.map(lambda value: value.contiguous().pin_memory().to(device, non_blocking=True))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, **{name: change(value) for name, value in self.tensors().items()})

    def _cut(self, index: int, size: int, *names: str) -> dict[str, Any]:
        """The columns of context rank `index` of `size` in the named tensors [b, s], by field."""
        return {name: zigzag(getattr(self, name), index, size) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by field."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class DecoderBatch(_Tensors):
    """One microbatch of a left-to-right model: b rows of s tokens.

    Under context parallelism a rank holds only some columns of its rows.
    """

    tokens: torch.Tensor
    """int64 [b, s]"""
    labels: torch.Tensor
    """int64 [b, s]; label i is the token after token i."""
    loss_weights: torch.Tensor
    """float32 [b, s]; the loss is sum(weight x nll) / sum(weight) over the global batch."""
    positions: torch.Tensor
    """int64 [b, s], for position encodings."""
    samples: torch.Tensor
    """int64 [b], global sample indices."""
    documents: torch.Tensor | None = None
    """int64 [b, whole row], index of each token's document within its row; None if attention may cross documents. The
    tensor covers the whole row on every context rank, because tokens attend to columns of other ranks."""
    columns: torch.Tensor | None = None
    """int64 [s], the columns that this rank holds, ascending; None if the rank holds all columns."""
    ahead_tokens: torch.Tensor | None = None
    """[b, s, depths], tokens further ahead in the whole row; set if the model predicts tokens beyond the next one and
    this rank does not hold all columns (model/ahead.py)."""
    ahead_labels: torch.Tensor | None = None
    """[b, s, depths], the labels of `ahead_tokens`."""
    ahead_weights: torch.Tensor | None = None
    """[b, s, depths], the loss weights of `ahead_labels`."""
    padding: torch.Tensor | None = None
    """bool [b, s], true for tokens that only fill their row, which routers of experts do not count. None if there are
    no such tokens."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"lm": self.loss_weights}

    def split(self, index: int, size: int) -> DecoderBatch:
        if size == 1:
            return self
        optional = ("ahead_tokens", "ahead_labels", "ahead_weights", "padding")
        there = [name for name in optional if getattr(self, name) is not None]
        return replace(
            self,
            **self._cut(index, size, "tokens", "labels", "loss_weights", "positions", *there),
            columns=zigzag(torch.arange(self.tokens.shape[1], device=self.tokens.device)[None], index, size)[0],
        )


@dataclass(frozen=True)
class PreferenceBatch(DecoderBatch):
    """b pairs of answers as 2 b rows: the chosen row of each pair, then its rejected row.

    The fields of `DecoderBatch`; loss_weights is 1 where the label is a token of an answer.
    """

    reference: torch.Tensor | None = None
    """float64 [b, 2], log-probabilities of both answers under the initial weights; None while these log-probabilities
    are computed."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"dpo": torch.ones(len(self.tokens) // 2, device=self.tokens.device)}

    def split(self, index: int, size: int) -> PreferenceBatch:
        assert size == 1, "an answer's log-probability is a sum over its whole row"
        return self


@dataclass(frozen=True)
class NeighbourBatch(DecoderBatch):
    """Rows whose chunks have neighbours: texts that were retrieved for the chunks. Adds two fields to
    `DecoderBatch`."""

    neighbours: torch.Tensor = field(kw_only=True)
    """int64 [b, l, k, r]: r tokens for each of k neighbours, for each of l chunks in a row."""
    found: torch.Tensor | None = None
    """bool [b, l, k], which neighbours exist; None if all exist."""

    def split(self, index: int, size: int) -> NeighbourBatch:
        assert size == 1, "chunks are of whole rows"
        return self


@dataclass(frozen=True)
class MaskedBatch(_Tensors):
    """One microbatch of a masked model (BERT): b rows of s tokens, padded on the right."""

    tokens: torch.Tensor
    """int64 [b, s], tokens of which some are replaced with masks."""
    labels: torch.Tensor
    """int64 [b, s], the original token at each masked position, 0 elsewhere."""
    loss_weights: torch.Tensor
    """float32 [b, s], 1 for tokens to be predicted."""
    types: torch.Tensor
    """int64 [b, s], 0 for the first segment of a row and 1 for the second."""
    lengths: torch.Tensor
    """int64 [b], number of tokens in each whole row that are not padding, even if this rank holds only some columns."""
    pairs: torch.Tensor
    """int64 [b], 1 if the two segments are in the wrong order and 0 if not, or the class of the row. It is -1 if the
    order or class is unknown, or if another context rank holds the first token and computes the loss. For multiple
    choice: int64 [questions], the index of the right row among the consecutive rows of a question."""
    samples: torch.Tensor
    """int64 [b], global sample indices."""
    columns: torch.Tensor | None = None
    """int64 [s], the columns that this rank holds, ascending; None if the rank holds all columns."""
    predicted: torch.Tensor | None = None
    """int64 [b, k], columns of each row that include all tokens to be predicted; None if any column may be
    predicted."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Separate weights for the loss of masked tokens and for the losses of rows."""
        return {"lm": self.loss_weights, "pair": self.pair_weights, "class": self.pair_weights}

    @property
    def pair_weights(self) -> torch.Tensor:
        """float32, shaped like `pairs`: 1 if the order of the segments, or the class, is known."""
        return (self.pairs >= 0).float()

    @property
    def positions(self) -> torch.Tensor:
        """int64 [b, s]: each token's column in its row."""
        columns = self.columns
        if columns is None:
            columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return columns.expand_as(self.tokens)

    def read_columns(self, *, first: bool) -> torch.Tensor:
        """Return the columns that losses read, int64 [b, k]: those of `predicted`, which must be known, and before them
        the first column if `first`."""
        predicted = self.predicted
        assert predicted is not None
        if not first:
            return predicted
        columns = predicted.new_zeros(predicted.shape[0], predicted.shape[1] + 1)
        columns[:, 1:] = predicted
        return columns

    def read(self, *, first: bool) -> MaskedBatch:
        """Return the batch of the columns that losses read (`read_columns`). `predicted` may include the first column,
        so the loss weight of the column added by `first` is 0."""
        columns = self.read_columns(first=first)
        names = ("tokens", "labels", "loss_weights", "types")
        tensors = {name: getattr(self, name).gather(1, columns) for name in names}
        if first:
            tensors["loss_weights"][:, 0].zero_()
        return replace(self, **tensors, predicted=None)

    def split(self, index: int, size: int) -> MaskedBatch:
        if size == 1:
            return self
        return replace(
            self,
            **self._cut(index, size, "tokens", "labels", "loss_weights", "types"),
            pairs=self.pairs if index == 0 else torch.full_like(self.pairs, -1),
            columns=zigzag(self.positions[:1], index, size)[0],
            predicted=None,
        )


@dataclass(frozen=True)
class EncoderDecoderBatch(_Tensors):
    """One microbatch of an encoder and a decoder (T5), each padded on the right."""

    encoder_tokens: torch.Tensor
    """int64 [b, e]"""
    encoder_lengths: torch.Tensor
    """int64 [b], number of encoder tokens that are not padding."""
    tokens: torch.Tensor
    """int64 [b, d], tokens of the decoder."""
    labels: torch.Tensor
    """int64 [b, d]; label i is the token after token i, 0 after the end."""
    loss_weights: torch.Tensor
    """float32 [b, d]"""
    lengths: torch.Tensor
    """int64 [b], number of decoder tokens that are not padding."""
    samples: torch.Tensor
    """int64 [b], global sample indices."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"lm": self.loss_weights}

    def split(self, index: int, size: int) -> EncoderDecoderBatch:
        assert size == 1, "an encoder and a decoder share no context axis"
        return self


def zigzag(rows: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Return the columns that rank `index` of a context axis of `size` ranks holds: [b, s, ...] -> [b, s / size, ...].

    A row is cut into 2 size chunks, and rank `index` holds chunks index and 2 size - 1 - index. Under causal attention,
    early chunks attend to few keys and late chunks attend to many. Each rank holds one early and one late chunk, so all
    ranks have equal work.

        size 2      chunk 0    1    2    3
                    rank  0    1    1    0

    >>> zigzag(torch.arange(8)[None], 1, 2)
    tensor([[2, 3, 4, 5]])
    """
    if size == 1:
        return rows
    assert rows.shape[1] % (2 * size) == 0, f"{rows.shape[1]} columns over {size} ranks"
    chunks = rows.chunk(2 * size, dim=1)
    return torch.cat([chunks[index], chunks[-1 - index]], dim=1)
