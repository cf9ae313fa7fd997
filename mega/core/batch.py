"""What flows into a model: one dataclass a family. Tensors only; where they come from is data's affair."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch


@dataclass(frozen=True)
class _Batch:
    """Tensors under names."""

    def to_gpu(self, device: torch.device) -> Self:
        """The same batch on a GPU. Copies leave from pinned memory: from any other the host would wait for its turn."""
        moved = {name: value.pin_memory().to(device, non_blocking=True) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that it has, by field."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class DecoderBatch(_Batch):
    """One microbatch of a left-to-right model: b rows of s tokens.

    tokens, labels: int64 [b, s]; label i is the token behind token i.
    loss_weights: float32 [b, s]; the loss is sum(weight x nll) / sum(weight) over the global batch.
    positions: int64 [b, s], for position encodings.
    samples: int64 [b], global sample numbers; with the column they name a token in every layout.
    documents: int64 [b, s], number of each token's document within its row, or None where attention
        may cross documents.
    columns: int64 [s], where a rank holds some columns of its rows only: which ones, ascending. Documents are those of
        the whole row even then, since a token may look at what other ranks hold.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    positions: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None = None
    columns: torch.Tensor | None = None


@dataclass(frozen=True)
class MaskedBatch(_Batch):
    """One microbatch of a masked model (BERT): b rows of s tokens, padded on the right.

    tokens: int64 [b, s], with masks; labels: int64 [b, s], what stood under a mask, 0 elsewhere.
    loss_weights: float32 [b, s], 1 where a token is to be foretold.
    types: int64 [b, s], 0 for the first part and 1 for the second.
    lengths: int64 [b], tokens of each row that are no padding.
    pairs: int64 [b], 1 where the two parts stand in the wrong order.
    samples: int64 [b], global sample numbers.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    types: torch.Tensor
    lengths: torch.Tensor
    pairs: torch.Tensor
    samples: torch.Tensor


@dataclass(frozen=True)
class EncoderDecoderBatch(_Batch):
    """One microbatch of an encoder and a decoder (T5), each padded on the right.

    encoder_tokens: int64 [b, e]; encoder_lengths: int64 [b], tokens that are no padding.
    tokens, labels: int64 [b, d] of the decoder; label i is the token behind token i, 0 behind the end.
    loss_weights: float32 [b, d]; lengths: int64 [b]; samples: int64 [b], global sample numbers.
    """

    encoder_tokens: torch.Tensor
    encoder_lengths: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    lengths: torch.Tensor
    samples: torch.Tensor
