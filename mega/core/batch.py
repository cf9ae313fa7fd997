"""What flows into a model: one dataclass a family. Tensors only; where they come from is data's affair."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class DecoderBatch:
    """One microbatch of a left-to-right model: b rows of s tokens.

    tokens, labels: int64 [b, s]; label i is the token behind token i.
    loss_weights: float32 [b, s]; the loss is sum(weight x nll) / sum(weight) over the global batch.
    positions: int64 [b, s], for position encodings.
    samples: int64 [b], global sample numbers; with the column they name a token in every layout.
    documents: int64 [b, s], number of each token's document within its row, or None where attention
        may cross documents.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    positions: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None = None

    def to(self, device: torch.device) -> DecoderBatch:
        """The same batch on `device`; copies from pinned memory do not wait."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(self, **moved)
