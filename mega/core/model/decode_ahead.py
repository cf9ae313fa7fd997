"""Decoding with the layers of multi-token prediction from model/ahead.py, with a cache of keys and values.

The layers guess tokens for speculative decoding. The layer of each depth is a step like `DecodeStep`, on the ranks of
the last pipeline stage. The step never synchronises with the host, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from mega.core.model.ahead import AheadLayer
from mega.core.model.decode import DecodeParts, KeyValueCache, decode_context, layer_functions
from mega.core.model.decoder import DecoderStage, Head
from mega.core.model.residual import ResidualState
from mega.core.parallel.vocab import logits


class AheadStep:
    """The step of one depth, called as step(ids, positions, wanted, cache). The weights must stay at their addresses.

    depth: counted from 0. parts: the `parts` of the stage's `DecodeStep`. read(depth): returns the input of the depth,
    which is the output of the model's final norm or the stream of the previous depth, [tokens, h]. keep(depth, stream):
    receives the stream of the depth, [tokens, h].

    positions: int64 [tokens]. ids: int64 [tokens], the tokens depth + 1 positions later. The step returns logits [w,
    ids of this rank] of the next tokens after `ids`, at the indices `wanted`, int64 [w].
    """

    def __init__(
        self,
        stage: DecoderStage,
        depth: int,
        parts: DecodeParts,
        read: Callable[[int], torch.Tensor],
        keep: Callable[[int, torch.Tensor], None],
    ):
        assert isinstance(stage.head, Head)
        self._head, self._ropes, self._sum = stage.head, stage.architecture.ropes, parts.sum_ranks
        self._layer, self._depth = cast(AheadLayer, stage.head.ahead[depth]), depth
        self._functions, self._read, self._keep = layer_functions(self._layer.layer, parts), read, keep

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        layer, head = self._layer, self._head
        embedded, h = layer.embedding.look_up(ids, positions, None, self._sum), self._read(self._depth)
        normed = layer.token_norm(ResidualState(embedded))[1], layer.stream_norm(ResidualState(h))[1]
        stream = ResidualState(layer.join(torch.cat(normed, 1)).to(layer.residual))
        context = decode_context(cache, self._ropes, positions)
        for function in self._functions:
            stream = function(stream, context)
        h = cast(torch.Tensor, layer.norm(stream)[1])
        self._keep(self._depth, h)
        return logits(h.index_select(0, wanted), head.weight, head.region, head.bias, head.shape)
