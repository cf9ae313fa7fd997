"""Multi-token prediction as in Megatron-LM and DeepSeek-V3 (section 2.2): layers in the head predict tokens after the
next.

    h_0          residual stream after the final norm, which predicts the next token
    h_d          norm(layer(linear [norm(embedding of the token d positions later), norm(h_d-1)]))
    loss of d    the loss of h_d, with the shared output matrix, for the label d positions later

These layers share the model's embedding tables, output matrix and loss. Positions past the end of a row or packed
document get token 0 and loss weight 0.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture import Tensor
from mega.core.architecture.model import Ahead, Architecture
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext
from mega.core.model.layer import TransformerLayer
from mega.core.model.mixers import LayerPlace
from mega.core.model.residual import Normalization, ResidualState
from mega.core.parallel.linear import ColumnLinear
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory


class AheadLayer(nn.Module):
    """The layer that predicts the tokens of one depth. tensors: the head's tensors. residual: dtype of the residual
    stream."""

    def __init__(
        self,
        factory: ParameterFactory,
        model: Architecture,
        value: Ahead,
        tensors: dict[str, Tensor],
        place: LayerPlace,
        residual: torch.dtype,
    ):
        super().__init__()
        self.embedding = Embedding(factory, model.input, tensors, place.region, residual, site=value.name)
        self.token_norm, self.stream_norm, self.norm = (
            Normalization(factory, each, tensors) for each in (value.token_norm, value.stream_norm, value.norm)
        )
        self.join = ColumnLinear(factory, [tensors[f"{value.name}.eh_proj.weight"]], [], ALONE)
        prefix = f"{value.name}.transformer_layer."
        layer_tensors = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        self.layer, self.residual = TransformerLayer(factory, value.layer, layer_tensors, place), residual

    def forward(
        self, h: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return the stream of this depth, [this rank's tokens, h]. h: the stream of the previous depth, of the same
        shape. tokens: int64 [b, s], the tokens of this depth."""
        embedded = self.embedding(tokens, positions, context)
        normed = self.token_norm(ResidualState(embedded))[1], self.stream_norm(ResidualState(h))[1]
        x = self.join(torch.cat(normed, 1)).to(self.residual)
        return cast(torch.Tensor, self.norm(self.layer(ResidualState(x), context))[1])


class AheadTokens(NamedTuple):
    """Tokens, labels and loss weights at each depth, each [b, s, depths]."""

    tokens: torch.Tensor  # int64
    labels: torch.Tensor  # int64
    weights: torch.Tensor  # loss weights of the labels


def tokens_ahead(
    tokens: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    depths: int,
    documents: torch.Tensor | None = None,
) -> AheadTokens:
    """Return the tokens ahead of each position in whole rows [b, s]. documents: as in `DecoderBatch`; tokens of another
    document are masked.

    >>> tokens_ahead(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]), torch.ones(1, 3), 2).labels.tolist()
    [[[7, 8], [8, 0], [0, 0]]]
    """

    def further(each: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.pad(each[:, depth:], (0, depth)) for depth in range(1, depths + 1)], 2)

    ahead = AheadTokens(further(tokens), further(labels), further(weights))
    if documents is None:
        return ahead
    other_document = further(documents) != documents[..., None]
    return AheadTokens(*(each.masked_fill(other_document, 0) for each in ahead))
