"""Attention of a text to the neighbours of its chunks (chunked cross attention; Borgeaud et al. 2022, section 2.4).

With chunks of 4 tokens, tokens 3 to 6 read what was found for tokens 0 to 3, and so on; tokens 0 to 2 read nothing:

    tokens          0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    neighbours of     -   | chunk 0 |  chunk 1 | chunk 2

So no token reads what was found by tokens after it. The neighbours' encoder reads each of them by itself, in both
directions, and in its first layer the chunk that found it. Knows no files.
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
    """Queries of the text, keys and values of its neighbours, which an encoder may have to read first."""

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
        """None: `finish` adds it, to tokens that read something alone."""
        return None

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [tokens, h] -> [all tokens of the region, heads x d], 0 for tokens that read nothing."""
        near = context.neighbours
        assert near is not None
        if len(self.encoder):
            near.encoded = self.encode(near, x)
        q, k, v = self.projected(x, near.read, context, near.context)
        before, size = self.chunk - 1, near.shape[0] * self.chunk
        q = q.unflatten(0, (context.batch, context.seq))[:, before : before + size]
        filled = F.pad(q, (0, 0, 0, 0, 0, size - q.shape[1])).reshape(-1, self.chunk, *q.shape[2:])
        k, v = (one.unflatten(0, (len(filled), -1)) for one in (k, v))
        mixed = self.ops.attention(filled, k, v, self.mask(near, context, size))
        mixed = mixed.reshape(context.batch, size, *q.shape[2:])[:, : q.shape[1]]
        after = context.seq - before - q.shape[1]
        return F.pad(mixed, (0, 0, 0, 0, before, after)).reshape(context.batch * context.seq, -1)

    def encode(self, near: NeighbourStates, x: torch.Tensor) -> torch.Tensor:
        """What the encoder makes of the neighbours of the text x."""
        stream, context = ResidualState(near.tokens), replace(near.context, neighbours=replace(near, text=x))
        for layer in self.encoder:
            stream = layer(stream, context)
        return stream.sum(self.ops)

    def mask(self, near: NeighbourStates, context: ForwardContext, size: int) -> AttentionMask:
        """What tokens [b l, m] see of the neighbours [b l, k r] that they read. size: of all chunks of a row."""
        _, each, width = near.shape
        dropout = None
        if context.row_keys is not None:
            keys = context.row_keys[:, self.chunk - 1 :][:, :size]
            keys = F.pad(keys, (0, size - keys.shape[1])).reshape(-1, self.chunk)
            dropout = context.weight_dropout(keys, self.value, self.layer, self.first_head, each * width)
        mask = AttentionMask("full", dropout=dropout, softcap=self.value.softcap)
        if near.found is None:
            return mask
        missing = (~near.found).long().flatten(0, 1).repeat_interleave(width, 1)
        return replace(mask, q_documents=missing.new_zeros(len(missing), self.chunk), k_documents=missing)

    def finish(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        y, near = super().finish(mixed, context), context.neighbours
        if self.out.bias is None:
            return y
        assert near is not None
        reads = near.readers(context.seq).expand(context.batch, -1).flatten()
        reads = local_shard(reads, self.region.axis) if self.region.sequence else reads
        return y + self.out.bias * reads[:, None]


class ReaderAttention(CrossAttention):
    """In the neighbours' encoder: queries of the neighbours, keys and values of the chunk that found them."""

    adapters = "reader_"

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [tokens of the neighbours, h] -> [all of the region, heads x d]."""
        near = context.neighbours
        assert near is not None and near.text is not None
        chunks, each, width = near.shape
        batch = context.batch // (chunks * each)
        q, k, v = self.projected(x, near.text, context, context)
        size = chunks * near.chunk
        k, v = (
            one.unflatten(0, (batch, -1))[:, :size].reshape(batch * chunks, near.chunk, *one.shape[1:])
            for one in (k, v)
        )
        dropout = None
        if context.row_keys is not None:
            keys = context.row_keys.reshape(batch * chunks, each * width)
            dropout = context.weight_dropout(keys, self.value, self.layer, self.first_head, near.chunk)
        mask = AttentionMask("full", dropout=dropout, softcap=self.value.softcap)
        mixed = self.ops.attention(q.unflatten(0, (batch * chunks, each * width)), k, v, mask)
        return mixed.reshape(context.batch * context.seq, -1)
