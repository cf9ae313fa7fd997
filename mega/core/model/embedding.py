"""The embedding of tokens, positions and token types before the first layer. This module does not depend on batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.architecture.model import Input
from mega.core.model.forward import ForwardContext
from mega.core.model.residual import ResidualState, normalization
from mega.core.ops.sinusoid import sinusoid
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import VocabEmbedding, look_up
from mega.core.parallel.weight import ParameterFactory

OUTSIDE = -1
"""Layer index for dropout outside the layers."""


class Embedding(nn.Module):
    """Module that computes dropout(norm(scale x tokens + positions + types)); scale, types and norm are optional.

    Positions are learned or sinusoidal. The result has the dtype of the residual stream. site: name of the dropout, for
    models with several embeddings.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        value: Input,
        tensors: dict[str, Tensor],
        region: Region,
        residual: torch.dtype,
        site: str = "embedding",
    ):
        super().__init__()
        self.residual, self.site = residual, site
        self.tokens = VocabEmbedding(factory, tensors["model.embed_tokens.weight"], region)
        positions, types = (tensors.get(f"model.embed_{name}.weight") for name in ("positions", "types"))
        self.positions = factory(positions) if positions is not None else None
        self.types = factory(types) if types is not None else None
        self.norm = normalization(factory, value.norm, tensors)
        self.scale, self.offset, self.first_row = value.scale, value.sinusoid_from, value.learned_from
        if value.rounds_scale:
            self.scale = float(torch.tensor(self.scale, dtype=self.tokens.weight.dtype))
        self.dropout, self.ops = value.dropout, factory.ops

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return embeddings [tokens, h], this rank's tokens under sequence parallelism. tokens, positions, types: int64
        [b, s]."""
        local_ids = _local_ids(positions, context), None if types is None else _local_ids(types, context)
        drop = context.dropout(self.dropout, OUTSIDE, self.site)
        return self.ops.added(None, self.look_up(tokens.flatten(), *local_ids), None, drop)

    def look_up(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None = None,
        sum_ranks: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Return embeddings without dropout. tokens: int64, all tokens of the tensor-parallel region. positions, types:
        int64, only for this rank's tokens. sum_ranks: as in `VocabEmbedding`."""
        x = self.tokens(tokens, sum_ranks)
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            x = x + look_up(positions + self.first_row if self.first_row else positions, self.positions)
        elif self.offset is not None:
            x = x + sinusoid(positions + self.offset, x.shape[-1], x.dtype)
        if self.types is not None:
            assert types is not None
            # RoBERTa's table has a single row, for all token types.
            x = x + look_up(types if self.types.shape[0] > 1 else torch.zeros_like(types), self.types)
        if self.norm is not None:
            x = self.norm(ResidualState(x))[1]
        return x.to(self.residual)


def _local_ids(rows: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """Flatten [b, s] and return this rank's tokens, [tokens]."""
    return local_shard(rows.flatten(), context.tp) if context.sequence else rows.flatten()
