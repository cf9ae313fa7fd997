"""Keys and values of a stage's blocks of the model, in the blocks of a pool. What lies where is the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mega.core.ops.few_rows import Place
from mega.core.ops.heads import Rotary
from mega.core.ops.kept_keys import KeptKeys
from mega.core.ops.paged_attention import Integers, PagedAttention


@dataclass(eq=False)
class PagedCache:
    """pool: [layers, blocks, block, 2, kv_heads, d]. repeats: query heads of a key/value head. window: a token sees so
    many keys at most.

    rotary: cos and sin of all positions, each [positions, R / 2] or as of `spread`, or None. kept: of the same pool;
    takes the steps that it can.
    """

    pool: torch.Tensor
    first_layer: int
    attention: PagedAttention
    repeats: int
    window: int | None
    rotary: Rotary | None
    kept: KeptKeys | None = None

    def __post_init__(self) -> None:
        self._layers = [(pool.flatten(1), pool.view(-1, 2 * pool.shape[3], pool.shape[4])) for pool in self.pool]
        self._slots = torch.empty(0)
        self._pages: Any = None

    def pages(self, counts: Integers, lengths: Integers, tables: Integers, sequences: Integers | None = None) -> Any:
        """Where the keys of a step's tokens lie. sequences: int64 [runs], numbers that no others have had."""
        kept = self.kept if int(counts.max()) == 1 else None
        if kept is not None and sequences is not None and kept.follow(sequences, lengths, tables):
            return kept
        return self.attention.pages(counts, lengths, tables, self.pool[0], self.repeats, self.window)

    def begin(self, slots: torch.Tensor, pages: Any) -> None:
        """The next tokens go to `slots`, and see what `pages` say."""
        self._slots, self._pages = slots, pages

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks, int64 [c] each."""
        self.pool[:, target] = self.pool[:, source]

    def attend_new(self, layer: int, fused: torch.Tensor, rotary: Rotary | None, place: Place) -> torch.Tensor:
        pool, rows = self._layers[layer - self.first_layer]
        if self.attention.attend_new is not None:
            out = self.attention.attend_new(fused, rotary, pool, self._pages)
            if out is not None:
                return out
        heads = fused.shape[1] - rows.shape[1]
        place(fused, rotary, rows, self._slots, heads)
        return self.attention.attend(fused[:, :heads], pool, self._pages)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pool, rows = self._layers[layer - self.first_layer]
        rows.index_copy_(0, self._slots, kv)
        if isinstance(self._pages, KeptKeys):
            return self._pages.attend(layer - self.first_layer, q, kv)
        return self.attention.attend(q, pool, self._pages)
