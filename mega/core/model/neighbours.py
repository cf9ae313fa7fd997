"""Attention to the retrieved neighbours of a text's chunks (chunked cross attention; Borgeaud et al. 2022, section
2.4).

With chunks of 4 tokens, tokens 3 to 6 attend to the neighbours retrieved for tokens 0 to 3, and so on. Tokens 0 to 2
have no neighbours:

    tokens          0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    neighbours of     -   | chunk 0 |  chunk 1 | chunk 2

No token therefore attends to neighbours that were retrieved with later tokens. The encoder processes each neighbour
separately and bidirectionally. The encoder's first layer also attends to the chunk for which the neighbour was
retrieved. This module does not read files.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture.layer import NeighbourAttention
from mega.core.model.forward import ForwardContext, NeighbourStates
from mega.core.model.mixers import CrossAttention, LayerPlace
from mega.core.model.residual import ResidualState, Tensors
from mega.core.ops.mask import AttentionMask
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.weight import ParameterFactory, Weight


class ChunkAttention(CrossAttention):
    """Attention of a text to neighbours. The module may hold the neighbours' encoder, which runs before the
    attention."""

    def __init__(
        self,
        factory: ParameterFactory,
        value: NeighbourAttention,
        tensors: Tensors,
        place: LayerPlace,
        encoder: nn.ModuleList,
    ):
        super().__init__(factory, value.attention, tensors, place)
        self.chunk, self.region, self.encoder = value.chunk, place.region, encoder

    @property
    def bias(self) -> Weight | None:
        """None, because `finish` adds the bias for the tokens that have neighbours."""
        return None

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the heads' outputs for x [tokens, h], with shape [all tokens of the tensor-parallel region, heads x
        d]. The outputs of tokens without neighbours are 0."""
        states = context.neighbours
        assert states is not None
        if len(self.encoder):
            states.encoded = self.encode(states, x)
        q, k, v = self.projected(x, states.read, context, states.context)
        before, size = self.chunk - 1, states.shape[0] * self.chunk
        q = q.unflatten(0, (context.batch, context.seq))[:, before : before + size]
        filled = F.pad(q, (0, 0, 0, 0, 0, size - q.shape[1])).reshape(-1, self.chunk, *q.shape[2:])
        k, v = (tensor.unflatten(0, (len(filled), -1)) for tensor in (k, v))
        outputs = self.ops.attention(filled, k, v, self.mask(states, context, size))
        outputs = outputs.reshape(context.batch, size, *q.shape[2:])[:, : q.shape[1]]
        after = context.seq - before - q.shape[1]
        return F.pad(outputs, (0, 0, 0, 0, before, after)).reshape(context.batch * context.seq, -1)

    def encode(self, states: NeighbourStates, x: torch.Tensor) -> torch.Tensor:
        """Encode the neighbours of the text x."""
        stream, context = ResidualState(states.tokens), replace(states.context, neighbours=replace(states, text=x))
        for layer in self.encoder:
            stream = layer(stream, context)
        return stream.sum(self.ops)

    def mask(self, states: NeighbourStates, context: ForwardContext, size: int) -> AttentionMask:
        """Return the mask of attention from tokens [b l, m] to neighbours [b l, k r]. size: number of tokens in all
        chunks of a row."""
        _, count, width = states.shape
        dropout = None
        if context.row_keys is not None:
            keys = context.row_keys[:, self.chunk - 1 :][:, :size]
            keys = F.pad(keys, (0, size - keys.shape[1])).reshape(-1, self.chunk)
            dropout = context.weight_dropout(keys, self.value, self.layer, self.first_head, count * width)
        mask = AttentionMask("full", dropout=dropout, softcap=self.value.softcap)
        if states.found is None:
            return mask
        missing = (~states.found).long().flatten(0, 1).repeat_interleave(width, 1)
        return replace(mask, q_documents=missing.new_zeros(len(missing), self.chunk), k_documents=missing)

    def finish(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        y, states = super().finish(mixed, context), context.neighbours
        if self.out.bias is None:
            return y
        assert states is not None
        reads = states.readers(context.seq).expand(context.batch, -1).flatten()
        reads = local_shard(reads, self.region.axis) if self.region.sequence else reads
        return y + self.out.bias * reads[:, None]


class ReaderAttention(CrossAttention):
    """Cross attention in the neighbours' encoder: queries from the neighbours, keys and values from the chunk for which
    the neighbours were retrieved."""

    adapters = "reader_"

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the heads' outputs for x [neighbours' tokens, h], with shape [all neighbours' tokens of the
        tensor-parallel region, heads x d]."""
        states = context.neighbours
        assert states is not None and states.text is not None
        chunks, count, width = states.shape
        batch = context.batch // (chunks * count)
        q, k, v = self.projected(x, states.text, context, context)
        size = chunks * states.chunk
        k, v = (
            tensor.unflatten(0, (batch, -1))[:, :size].reshape(batch * chunks, states.chunk, *tensor.shape[1:])
            for tensor in (k, v)
        )
        dropout = None
        if context.row_keys is not None:
            keys = context.row_keys.reshape(batch * chunks, count * width)
            dropout = context.weight_dropout(keys, self.value, self.layer, self.first_head, states.chunk)
        mask = AttentionMask("full", dropout=dropout, softcap=self.value.softcap)
        outputs = self.ops.attention(q.unflatten(0, (batch * chunks, count * width)), k, v, mask)
        return outputs.reshape(context.batch * context.seq, -1)
