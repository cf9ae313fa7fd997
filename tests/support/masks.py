"""Attention masks of every kind, drawn at random, and what each means, one query and one key at a time."""

from __future__ import annotations

import random
from typing import Literal

import torch

from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask


def draw_mask(
    rng: random.Random, b: int, s: int, t: int, heads: int, *, kind: Literal["causal", "full"] | None = None
) -> AttentionMask:
    """Each feature as often with as without; of equal lengths half are self-attention, where every query sees a key."""
    kind = kind if kind is not None else rng.choice(["causal", "full"])
    window = rng.choice([None, rng.randint(1, max(s, t))])
    q_offset = 0 if s == t and rng.random() < 0.5 else rng.choice([t - s, rng.randint(-s, t)])
    q_documents = k_documents = dropout = None
    if rng.random() < 0.5:
        row = torch.tensor([[rng.random() < 0.3 for _ in range(max(s, t))] for _ in range(b)]).cumsum(1)
        k_documents = row[:, :t]
        q_documents = k_documents if s == t and q_offset == 0 else row[:, :s] + rng.randint(0, 1)
    if rng.random() < 0.5:
        keys, first = token_keys(rng.randint(0, 99), torch.arange(b), torch.arange(s)), rng.randint(0, 9)
        border, at = rng.choice([t, rng.randint(0, t)]), rng.choice([0, 5, 16])
        columns = (range(at, at + border), range(at + border + 7, at + t + 7))[: 1 if border == t else 2]
        dropout = AttentionDropout(keys, site_key(1, "x"), first, columns, rng.choice([0.1, 0.5, 0.9]))
    return AttentionMask(kind, window, q_documents, k_documents, q_offset, dropout)


def sees(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """Whether a query sees a key, as the words of `AttentionMask` have it."""
    at = mask.q_offset + query
    queries, keys = mask.q_documents, mask.k_documents
    if queries is not None and keys is not None and queries[row, query] != keys[row, key]:
        return False
    if mask.kind == "causal":
        return at - mask.window < key <= at if mask.window is not None else key <= at
    return abs(at - key) < mask.window if mask.window is not None else True


def dense(mask: AttentionMask, b: int, s: int, t: int) -> torch.Tensor:
    """bool [b, s, t] of `sees`."""
    return torch.tensor([[[sees(mask, row, i, j) for j in range(t)] for i in range(s)] for row in range(b)])
