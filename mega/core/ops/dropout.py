"""Dropout by counter: the mask is a function of the tokens' keys, never of a random stream.

So it is the same in every layout and under recompute, and no random state is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mega.core.ops.counter import keep_mask


def dropout(x: torch.Tensor, keys: torch.Tensor, elements: torch.Tensor, probability: float) -> torch.Tensor:
    """x / (1 - p) where kept, else 0.

    keys: int64, one per token, shaped to broadcast against `elements` (numbers of the logical elements) and x.
    """
    kept = keep_mask(keys, elements, probability)
    return torch.where(kept, x * (1.0 / (1.0 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights: a function of query token, head and key column.

    keys: int64 [b, s], dropout keys of the query tokens. heads: int64 [heads], numbers among all heads of the model.
    columns: int64 [t], columns of the keys in their row.
    """

    keys: torch.Tensor
    heads: torch.Tensor
    columns: torch.Tensor
    probability: float

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, t] -> the same, x / (1 - p) where kept, else 0."""
        elements = self.heads[:, None, None] * (1 << 32) + self.columns
        return dropout(weights, self.keys[:, None, :, None], elements, self.probability)

    def cut(self, queries: slice, keys: slice) -> AttentionDropout:
        """The same dropout for some of the queries and keys."""
        return replace(self, keys=self.keys[:, queries], columns=self.columns[keys])
