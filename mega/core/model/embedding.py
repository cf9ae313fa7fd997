"""What comes before the first block: rows of tables for tokens, positions and parts of a row. It knows no batch."""

from __future__ import annotations

import torch
from torch import nn

from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor
from mega.core.model.block import Norm, ResidualState
from mega.core.model.forward import ForwardContext
from mega.core.ops.sinusoid import sinusoid
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import VocabEmbedding, look_up
from mega.core.parallel.weight import ParameterFactory

OUTSIDE = -1
"""The "layer" of dropout outside the blocks."""


class Embedding(nn.Module):
    """Token rows, scaled if the model requires it, plus learned or sinusoidal positions and, where the model has them,
    types, and their norm; in the residual stream's dtype, then dropout. site: of the dropout, where a model has several
    embeddings.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        model: ModelConfig,
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
        normed = "model.embed_norm.weight" in tensors
        self.norm = Norm(factory, model, tensors, "model.embed_norm") if normed else None
        assert model.hidden is not None
        self.scale = model.hidden**0.5 if model.embedding_scale else None
        self.offset = model.position_offset if model.position == "sinusoidal" else None
        self.dropout, self.ops = model.hidden_dropout, factory.ops

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions and types int64 [b, s] -> [tokens, h], our tokens under sequence."""
        ours = _ours(positions, context), None if types is None else _ours(types, context)
        drop = context.dropout(self.dropout, OUTSIDE, self.site)
        return self.ops.added(None, self.look_up(tokens.flatten(), *ours), None, drop)

    def look_up(self, tokens: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """The same without dropout, of int64 [tokens]: tokens of the whole region, positions and types of ours."""
        x = self.tokens(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.positions is not None:
            x = x + look_up(positions, self.positions)
        elif self.offset is not None:
            x = x + sinusoid(positions + self.offset, x.shape[-1], x.dtype)
        if self.types is not None:
            assert types is not None
            x = x + look_up(types, self.types)
        if self.norm is not None:
            x = self.norm(ResidualState(x))[1]
        return x.to(self.residual)


def _ours(rows: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """[b, s] -> [tokens] of this rank."""
    return local_shard(rows.flatten(), context.tp) if context.sequence else rows.flatten()
