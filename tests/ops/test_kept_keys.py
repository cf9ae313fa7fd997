"""Keys that are kept from step to step give what gathering them gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mega.core.ops import kept_keys
from mega.core.ops.kept_keys import KeptKeys
from mega.core.ops.paged_attention import PLAIN, Integers

BLOCK, KV_HEADS, REPEATS, D = 4, 2, 3, 8
TABLES = np.array([[3, 5, 9], [1, 7, 2], [8, 4, 6]])


def filled() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 10, BLOCK, 2, KV_HEADS, D)


def step(pool: torch.Tensor, kept: KeptKeys, sequences: list[int], lengths: list[int], tables: Integers) -> bool:
    """One of new tokens, whose attention must be PLAIN's; whether `kept` took it."""
    ends, names = np.array(lengths), np.array(sequences)
    takes = kept.follow(names, ends, tables)
    slots = torch.from_numpy(tables[np.arange(len(ends)), (ends - 1) // BLOCK] * BLOCK + (ends - 1) % BLOCK)
    for layer, rows in enumerate(pool):
        q, kv = torch.randn(len(ends), REPEATS * KV_HEADS, D), torch.randn(len(ends), 2 * KV_HEADS, D)
        rows.view(-1, 2 * KV_HEADS, D)[slots] = kv
        pages = PLAIN.pages(np.ones_like(ends), ends, tables, rows, REPEATS, None)
        if takes:
            expected = PLAIN.attend(q, rows.flatten(1), pages)
            torch.testing.assert_close(kept.attend(layer, q, kv), expected, rtol=1e-5, atol=1e-6)
    return takes


def test_the_same_sequences_are_followed_through_their_blocks() -> None:
    pool = filled()
    kept = KeptKeys(pool)
    taken = [step(pool, kept, [7, 2, 5], [1 + n, 3 + n, 4 + n], TABLES) for n in range(9)]
    assert taken == [False] + [True] * 8


def test_others_are_not_taken_for_them() -> None:
    pool = filled()
    kept = KeptKeys(pool)
    steps = [([7, 2], [1, 3]), ([7, 2], [2, 4]), ([7, 3], [3, 5]), ([3, 7], [4, 6]), ([3, 7], [5, 8]), ([3, 7], [6, 9])]
    taken = [step(pool, kept, sequences, lengths, TABLES[:2]) for sequences, lengths in steps]
    assert taken == [False, True, False, False, False, True]


def test_what_would_take_much_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled()
    kept = KeptKeys(pool)
    keys = 2 * BLOCK
    monkeypatch.setattr(kept_keys, "MOST_BYTES", 3 * keys * 2 * KV_HEADS * D * 4)
    taken = [step(pool, kept, [7, 2, 5], [1 + n, 3 + n, 4 + n], TABLES) for n in range(7)]
    assert taken == [False] + [True] * 4 + [False] * 2
