"""Decoding with the layers of multi-token prediction: as in model/ahead.py, with a cache of keys and values.

The layers guess tokens for speculative decoding. This module runs on one rank that holds the whole model.
"""

from __future__ import annotations

from typing import cast

import torch

from mega.core.model.ahead import AheadLayer
from mega.core.model.decode import DecodeParts, KeyValueCache, decode_context, layer_functions
from mega.core.model.decoder import DecoderStage, Head
from mega.core.model.residual import ResidualState
from mega.core.parallel.vocab import logits


class AheadStep:
    """The layers of a stage's head. The weights must stay at their addresses."""

    def __init__(self, stage: DecoderStage):
        assert isinstance(stage.head, Head)
        self._head, self._ropes = stage.head, stage.architecture.ropes
        self._layers = [cast(AheadLayer, each) for each in stage.head.ahead]
        parts = DecodeParts(None, None, None, (None, *self._ropes))
        self._functions = [layer_functions(each.layer, parts) for each in self._layers]

    @property
    def depths(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def __call__(
        self, depth: int, tokens: torch.Tensor, positions: torch.Tensor, h: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        """Return the stream [tokens, h] of layer `depth`, counted from 0. h: the stream of the previous layer, or the
        output of the model's final norm, at the same positions. tokens: int64, the tokens depth + 1 positions later."""
        layer = self._layers[depth]
        embedded = layer.embedding.look_up(tokens, positions)
        normed = layer.token_norm(ResidualState(embedded))[1], layer.stream_norm(ResidualState(h))[1]
        stream = ResidualState(layer.join(torch.cat(normed, 1)).to(layer.residual))
        context = decode_context(cache, self._ropes, positions)
        for function in self._functions[depth]:
            stream = function(stream, context)
        return cast(torch.Tensor, layer.norm(stream)[1])

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits [w, vocab] of a layer's stream [w, h]."""
        head = self._head
        return logits(h, head.weight, head.region, head.bias, head.shape)
