"""What flows into a model: what the engine asks of any family's batch, and the families' own dataclasses.

Tensors only; where they come from is data's affair, and how a loss is made of them the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, Self

import torch


class Term(NamedTuple):
    """One loss or metric as two sums over tokens, rows or whatever it counts: its mean is total / weight.

    root: of a loss whose gradient was computed along with it, already multiplied by the loss's scale: where the
    backward pass begins, since `total` is only a number then. It has no elements, so nobody can multiply it by what the
    gradient would lack. None: the backward pass begins at `total`.
    """

    total: torch.Tensor
    weight: torch.Tensor
    root: torch.Tensor | None = None


Terms = Mapping[str, Term]


class Batch(Protocol):
    """One microbatch of any family."""

    @property
    def samples(self) -> torch.Tensor:
        """int64 [b], global sample numbers; with the column they name a token in every layout."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Name of each loss term of the head -> weights whose sum is its divisor."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by field."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same batch of changed tensors."""

    def to(self, device: torch.device) -> Self:
        """The same batch on `device`."""

    def split(self, index: int, size: int) -> Self:
        """The columns that rank `index` of a context axis of `size` ranks holds."""


@dataclass(frozen=True)
class _Tensors:
    """Tensors under names."""

    def to(self, device: torch.device) -> Self:
        """Copies to a GPU leave from pinned memory: from any other the host would wait for its turn."""
        if device.type != "cuda":
            return self.map(lambda value: value.to(device))
        # Rows may share the memory of their positions, which cannot be pinned.
        return self.map(lambda value: value.contiguous().pin_memory().to(device, non_blocking=True))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, **{name: change(value) for name, value in self.tensors().items()})

    def _cut(self, index: int, size: int, *names: str) -> dict[str, Any]:
        """The columns of context rank `index` of `size` of some tensors [b, s], by field."""
        return {name: zigzag(getattr(self, name), index, size) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that it has, by field."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class DecoderBatch(_Tensors):
    """One microbatch of a left-to-right model: b rows of s tokens.

    tokens, labels: int64 [b, s]; label i is the token after token i.
    loss_weights: float32 [b, s]; the loss is sum(weight x nll) / sum(weight) over the global batch.
    positions: int64 [b, s], for position encodings.
    samples: int64 [b], global sample numbers.
    documents: int64 [b, s], number of each token's document within its row, or None where attention
        may cross documents.
    columns: int64 [s], where a rank holds some columns of its rows only: which ones, ascending. Documents are those of
        the whole row even then, since a token may look at what other ranks hold.
    ahead_tokens, ahead_labels, ahead_weights: [b, s, depths], tokens, labels and loss weights further on in the whole
        row, where a model predicts tokens after the next one and a rank holds some columns only (model/ahead.py).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    positions: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    ahead_tokens: torch.Tensor | None = None
    ahead_labels: torch.Tensor | None = None
    ahead_weights: torch.Tensor | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"lm": self.loss_weights}

    def split(self, index: int, size: int) -> DecoderBatch:
        if size == 1:
            return self
        ahead = () if self.ahead_tokens is None else ("ahead_tokens", "ahead_labels", "ahead_weights")
        return replace(
            self,
            **self._cut(index, size, "tokens", "labels", "loss_weights", "positions", *ahead),
            columns=zigzag(torch.arange(self.tokens.shape[1], device=self.tokens.device)[None], index, size)[0],
        )


@dataclass(frozen=True)
class PreferenceBatch(DecoderBatch):
    """b pairs of answers as 2 b rows: each pair's chosen row, then its rejected one.

    Fields as of `DecoderBatch`; loss_weights: 1 where an answer's token is the label.
    reference: float64 [b, 2], log-probabilities of both answers under the weights that training began with; None where
    they are what is asked for.
    """

    reference: torch.Tensor | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"dpo": torch.ones(len(self.tokens) // 2, device=self.tokens.device)}

    def split(self, index: int, size: int) -> PreferenceBatch:
        assert size == 1, "an answer's log-probability is a sum over its whole row"
        return self


@dataclass(frozen=True)
class NeighbourBatch(DecoderBatch):
    """Rows whose chunks have neighbours, other texts that were found for them.

    Fields as of `DecoderBatch`. neighbours: int64 [b, l, k, r], tokens of the k neighbours of each of the l chunks of a
    row. found: bool [b, l, k], which of them there are; None: all.
    """

    neighbours: torch.Tensor = field(kw_only=True)
    found: torch.Tensor | None = None

    def split(self, index: int, size: int) -> NeighbourBatch:
        assert size == 1, "chunks are of whole rows"
        return self


@dataclass(frozen=True)
class MaskedBatch(_Tensors):
    """One microbatch of a masked model (BERT): b rows of s tokens, padded on the right.

    tokens: int64 [b, s], with masks; labels: int64 [b, s], what stood under a mask, 0 elsewhere.
    loss_weights: float32 [b, s], 1 where a token is to be predicted.
    types: int64 [b, s], 0 for the first part and 1 for the second.
    lengths: int64 [b], tokens of each row that are not padding.
    pairs: int64 [b], 1 where the two parts stand in the wrong order, 0 in the right one, or the row's class; -1 where
        that is not known, or where another rank, which holds the first token, judges it. Of choices, each of several
        rows that stand together: int64 [choices], which of them it is.
    samples: int64 [b], global sample numbers.
    columns: int64 [s], where a rank holds some columns of its rows only: which ones, ascending. Lengths are those of
        the whole rows even then.
    predicted: int64 [b, k], columns of each row among which are all that are to be predicted; None: any may be.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    types: torch.Tensor
    lengths: torch.Tensor
    pairs: torch.Tensor
    samples: torch.Tensor
    columns: torch.Tensor | None = None
    predicted: torch.Tensor | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Masked tokens, and rows: each loss has its own divisor."""
        return {"lm": self.loss_weights, "pair": self.pair_weights, "class": self.pair_weights}

    @property
    def pair_weights(self) -> torch.Tensor:
        """float32, as `pairs`: 1 where the order of the parts, or the class, is known."""
        return (self.pairs >= 0).float()

    @property
    def positions(self) -> torch.Tensor:
        """int64 [b, s]: each token's column in its row."""
        columns = self.columns
        if columns is None:
            columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return columns.expand_as(self.tokens)

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
    """One microbatch of an encoder and a decoder (T5), each padded on the right.

    encoder_tokens: int64 [b, e]; encoder_lengths: int64 [b], tokens that are not padding.
    tokens, labels: int64 [b, d] of the decoder; label i is the token after token i, 0 after the end.
    loss_weights: float32 [b, d]; lengths: int64 [b]; samples: int64 [b], global sample numbers.
    """

    encoder_tokens: torch.Tensor
    encoder_lengths: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    lengths: torch.Tensor
    samples: torch.Tensor

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"lm": self.loss_weights}

    def split(self, index: int, size: int) -> EncoderDecoderBatch:
        assert size == 1, "an encoder and a decoder share no context axis"
        return self


def zigzag(rows: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """[b, s, ...] -> [b, s / size, ...]: the columns that rank `index` of a context axis of `size` ranks holds.

    A row is cut into 2 size chunks, and a rank holds chunks index and 2 size - 1 - index, so that under causal
    attention, which sees little from early chunks and much from late ones, all ranks have equal work.

    >>> zigzag(torch.arange(8)[None], 1, 2)
    tensor([[2, 3, 4, 5]])
    """
    if size == 1:
        return rows
    assert rows.shape[1] % (2 * size) == 0, f"{rows.shape[1]} columns over {size} ranks"
    chunks = rows.chunk(2 * size, dim=1)
    return torch.cat([chunks[index], chunks[-1 - index]], dim=1)
