"""Store the keys and values of a stage's layers in a pool of blocks. The scheduler assigns the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mega.core.architecture.layer import Rope
from mega.core.ops.few_rows import Place
from mega.core.ops.heads import Rotary
from mega.core.ops.kept_keys import KeptKeys
from mega.core.ops.paged_attention import Integers, PagedAttention

Pages = dict[int | None, Any]
"""Attention window -> location of a step's keys for attention: the result of `PagedAttention.pages`, or a
`KeptKeys`."""


@dataclass(eq=False)
class PagedCache:
    """The cached keys and values of a stage's layers."""

    pool: torch.Tensor
    """Keys and values, [layers, blocks, block, 2, kv_heads, d]."""
    first_layer: int
    attention: PagedAttention
    repeats: int
    """Number of query heads per key/value head."""
    windows: Sequence[int | None]
    """For each layer in the pool, the attention window in keys; None for no limit."""
    tables: Mapping[Rope, Rotary]
    """cos and sin of all positions for each rotary embedding, each [positions, R / 2] or in the format of `spread`.
    There are twice as many rows if short and long sequences have different factors."""
    kept: KeptKeys | None = None
    """An alternative attention implementation on the same pool, used for the steps that it supports."""

    def __post_init__(self) -> None:
        self._layers = [
            (pool.flatten(1), pool.view(-1, 2 * pool.shape[3], pool.shape[4]), window)
            for pool, window in zip(self.pool, self.windows, strict=True)
        ]
        self.slots = torch.empty(0)
        """int64 [tokens], the slots of the current pass."""
        self._pages: Pages = {}

    def pages(self, counts: Integers, lengths: Integers, tables: Integers, sequences: Integers | None = None) -> Pages:
        """Return, for each window, the locations of the keys that a step's tokens read.

        sequences: int64 [runs], unique numbers of the runs' sequences.
        """
        kept_keys = self.kept if int(counts.max()) == 1 else None
        if kept_keys is not None and sequences is not None and kept_keys.follow(sequences, lengths, tables):
            return dict.fromkeys(self.windows, kept_keys)
        size = self.pool[0], self.repeats
        return {
            window: self.attention.pages(counts, lengths, tables, *size, window)
            for window in dict.fromkeys(self.windows)
        }

    def begin(self, slots: torch.Tensor, pages: Pages) -> None:
        """Prepare the next forward pass. It writes keys and values to `slots`, and its tokens attend to `pages`."""
        self.slots, self._pages = slots, pages

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks. source, target: indices of blocks, int64 [c]."""
        self.pool[:, target] = self.pool[:, source]

    def attend_new(self, layer: int, fused: torch.Tensor, rotary: Rotary | None, place: Place) -> torch.Tensor:
        pool, rows, window = self._layers[layer - self.first_layer]
        pages = self._pages[window]
        if self.attention.attend_new is not None:
            out = self.attention.attend_new(fused, rotary, pool, pages)
            if out is not None:
                return out
        heads = fused.shape[1] - rows.shape[1]
        place(fused, rotary, rows, self.slots, heads)
        return self.attention.attend(fused[:, :heads], pool, pages)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pool, rows, window = self._layers[layer - self.first_layer]
        pages = self._pages[window]
        rows.index_copy_(0, self.slots, kv)
        if isinstance(pages, KeptKeys):
            return pages.attend(layer - self.first_layer, q, kv)
        return self.attention.attend(q, pool, pages)
