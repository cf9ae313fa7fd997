"""Attention of sequences that go on by one token a step, whose keys and values are kept from step to step.

On a host, gathering keys from the blocks of a cache and handing them to torch's attention takes a small model longer
than its products. Here those of a step's sequences are gathered once, laid as products of matrices take them, and each
step adds a column of every layer. The cache stays whole: it knows nothing of this. No windows and no ranks.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mega.core.ops.paged_attention import Integers

MOST_BYTES = 1 << 21
"""Of one layer. Beyond it the time lies in the products, and laying the keys takes that of many steps."""


class KeptKeys:
    """pool: [layers, blocks, block, 2, kv_heads, d] on a host, in at least 32 bits.

    kept.follow(...)    once a step, before its layers
    kept.attend(...)    for each layer, where that was True
    """

    def __init__(self, pool: torch.Tensor):
        self._pool = pool
        self._sequences = self._lengths = np.zeros(0, dtype=np.int64)
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._kept: torch.Tensor | None = None
        self._bias = self._column = torch.empty(0)

    def follow(self, sequences: Integers, lengths: Integers, tables: Integers) -> bool:
        """Whether `attend` takes this step, of one token of each sequence: from the second one in a row on it does.

        sequences: int64 [runs], numbers that no others have had. lengths, tables: as of `PagedAttention`.
        """
        goes_on = np.array_equal(sequences, self._sequences) and np.array_equal(lengths, self._lengths + 1)
        self._sequences, self._lengths = sequences, lengths
        layers, _, block, _, kv_heads, d = self._pool.shape
        batch, blocks = len(lengths), -(-int(lengths.max()) // block)
        layer = 2, batch * kv_heads, d, blocks * block
        if not goes_on or math.prod(layer) * self._pool.element_size() > MOST_BYTES:
            self._kept = None
            return False
        if self._kept is None or self._kept.shape[-1] < layer[-1]:
            before, self._kept = self._kept, self._pool.new_zeros(layers, *layer)
            if before is None:  # the tokens before this step's lie in the pool
                rows = torch.from_numpy(tables[:, :blocks].reshape(-1))
                held = self._pool[:, rows].view(layers, batch, blocks * block, 2, kv_heads, d)
                self._kept.view(layers, 2, batch, kv_heads, d, -1).copy_(held.permute(0, 3, 1, 4, 5, 2))
            else:
                self._kept[..., : before.shape[-1]] = before
            seen = torch.from_numpy(np.arange(blocks * block) < lengths[:, None])
            bias = torch.zeros(seen.shape, dtype=self._kept.dtype).masked_fill_(~seen, -torch.inf)
            self._bias = bias.repeat_interleave(kv_heads, 0)[:, None]
            self._layers = [(each.view(2, batch, kv_heads * d, -1), *each) for each in self._kept]
        at = torch.from_numpy(lengths - 1).view(-1, 1, 1)
        self._column = at[None].expand(2, -1, kv_heads * d, 1)
        self._bias.view(batch, kv_heads, -1).scatter_(-1, at.expand(-1, kv_heads, 1), 0.0)
        return True

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """layer: of the pool. q [tokens, heads, d] and kv [tokens, 2 kv_heads, d] of a step's tokens -> [tokens,
        heads x d]."""
        (tokens, _, d), (columns, k, v) = q.shape, self._layers[layer]
        columns.scatter_(-1, self._column, kv.reshape(tokens, 2, -1, 1).transpose(0, 1))
        # The query heads of a key/value head are rows of one matrix, so keys are read once for all of them.
        scores = torch.baddbmm(self._bias, q.reshape(k.shape[0], -1, d), k, alpha=d**-0.5)
        return torch.bmm(scores.softmax(-1), v.transpose(1, 2)).view(tokens, -1)
