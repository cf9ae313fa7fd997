"""Attention during decoding (one new token per sequence and step), with gathered keys that are reused in later steps.

For a small model on a CPU, gathering keys from the blocks of a cache and calling torch's attention takes longer than
the GEMMs. This module therefore gathers the keys and values of a step's sequences once, in the layout of batched GEMMs,
and adds one column per layer in each later step. The cache itself remains valid. Sliding windows and several ranks are
not supported.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mega.core.ops.paged_attention import Integers

MOST_BYTES = 1 << 21
"""Maximum number of bytes of one layer's keys and values. For larger caches, GEMMs dominate, and gathering the keys
takes as long as many decoding steps."""


class KeptKeys:
    """The gathered keys and values of the current sequences.

    keys.follow(...)    once per step, before its first layer
    keys.attend(...)    for each layer, if `follow` returned True

    pool: the cache [layers, blocks, block, 2, kv_heads, d], on a CPU and in at least 32 bits.
    """

    def __init__(self, pool: torch.Tensor):
        self._pool = pool
        self._sequences = self._lengths = np.zeros(0, dtype=np.int64)
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._kept: torch.Tensor | None = None
        self._bias = self._column = torch.empty(0)

    def follow(self, sequences: Integers, lengths: Integers, tables: Integers) -> bool:
        """Prepare a step with one token per sequence, and return whether `attend` can be used in this step.

        The result is True from the second consecutive step with the same sequences onward, unless the keys exceed
        MOST_BYTES.
        sequences: int64 [runs], a unique number per sequence, which is never reused. lengths, tables: the same as for
        `PagedAttention.pages`.
        """
        resumes = np.array_equal(sequences, self._sequences) and np.array_equal(lengths, self._lengths + 1)
        self._sequences, self._lengths = sequences, lengths
        layers, _, block, _, kv_heads, d = self._pool.shape
        batch, blocks = len(lengths), -(-int(lengths.max()) // block)
        layer = 2, batch * kv_heads, d, blocks * block
        if not resumes or math.prod(layer) * self._pool.element_size() > MOST_BYTES:
            self._kept = None
            return False
        if self._kept is None or self._kept.shape[-1] < layer[-1]:
            before, self._kept = self._kept, self._pool.new_zeros(layers, *layer)
            if before is None:  # the pool contains the keys of all earlier tokens
                rows = torch.from_numpy(tables[:, :blocks].reshape(-1))
                gathered = self._pool[:, rows].view(layers, batch, blocks * block, 2, kv_heads, d)
                self._kept.view(layers, 2, batch, kv_heads, d, -1).copy_(gathered.permute(0, 3, 1, 4, 5, 2))
            else:
                self._kept[..., : before.shape[-1]] = before
            visible = torch.from_numpy(np.arange(blocks * block) < lengths[:, None])
            bias = torch.zeros(visible.shape, dtype=self._kept.dtype).masked_fill_(~visible, -torch.inf)
            self._bias = bias.repeat_interleave(kv_heads, 0)[:, None]
            self._layers = [(each.view(2, batch, kv_heads * d, -1), *each) for each in self._kept]
        position = torch.from_numpy(lengths - 1).view(-1, 1, 1)
        self._column = position[None].expand(2, -1, kv_heads * d, 1)
        self._bias.view(batch, kv_heads, -1).scatter_(-1, position.expand(-1, kv_heads, 1), 0.0)
        return True

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Compute attention for a step's tokens in one layer: q [tokens, heads, d], kv [tokens, 2 kv_heads, d] ->
        [tokens, heads x d]."""
        (tokens, _, d), (columns, k, v) = q.shape, self._layers[layer]
        columns.scatter_(-1, self._column, kv.reshape(tokens, 2, -1, 1).transpose(0, 1))
        # The query heads of a key/value head form the rows of one matrix, so the keys of this head are read only once.
        scores = torch.baddbmm(self._bias, q.reshape(k.shape[0], -1, d), k, alpha=d**-0.5)
        return torch.bmm(scores.softmax(-1), v.transpose(1, 2)).view(tokens, -1)
