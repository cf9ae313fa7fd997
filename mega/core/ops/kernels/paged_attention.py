"""Attention of the next token of each sequence to the keys in its blocks of a cache, read where they lie.

A program takes the query heads of one key/value head of one sequence along a share of its keys; a second kernel adds up
the shares (Dao et al. 2023, "Flash-Decoding"). What is launched follows from the number of sequences alone, and lengths
are read from the device's memory, so a graph can hold it. Runs of several tokens take the plain form.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from mega.core.device import sent
from mega.core.ops.kernels.language import cdiv, in_turn, jit, launch, next_power_of_2, overlapping, tl
from mega.core.ops.paged_attention import Integers, PagedAttention, padded_attention, padded_pages

LOG2E = math.log2(math.e)
KEYS = 64
"""Keys of one tile."""
PROGRAMS, MOST_SHARES = 528, 32
"""Programs that keep a device busy, four on each of 132 multiprocessors; shares of a sequence at the most."""


class SingleTokens(NamedTuple):
    """Runs of one token each. tables: int64 [runs, width], blocks. lengths: int64 [runs]. shape: block, kv_heads, d."""

    tokens: slice
    tables: torch.Tensor
    lengths: torch.Tensor
    shape: tuple[int, int, int]
    window: int | None


@jit
def _look(
    q_at, pool_at, tables_at, lengths_at, part_at, stats_at, q_row, q_head, width, scale, window,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of a share of the keys: the mixed values, not divided yet, the largest score and the sum of the weights.

    ALONE: of all keys, the mixed values as they are wanted."""
    in_turn(OVERLAP)
    row, kv_head, share, shares = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths_at + row)
    oldest = length * 0
    if WINDOW:
        oldest = tl.maximum(length - window, 0)
    begin = oldest // KEYS * KEYS
    per = tl.cdiv(length - begin, KEYS * shares) * KEYS
    first = begin + share * per
    end = tl.minimum(first + per, length)
    one, part = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + one
    queried = (one < GROUP)[:, None] & (part < WIDTH)[None, :]
    q = tl.load(q_at + row.to(tl.int64) * q_row + head[:, None] * q_head + part[None, :], queried, 0.0)
    total = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    sum_ = tl.zeros([GROUP_BLOCK], tl.float32)
    largest = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = (key >= oldest) & (key < end)
        block = tl.load(tables_at + row.to(tl.int64) * width + key // SIZE, seen, 0)
        at = pool_at + ((block * SIZE + key % SIZE) * (2 * KV) + kv_head)[:, None] * WIDTH + part[None, :]
        there = seen[:, None] & (part < WIDTH)[None, :]
        keys = tl.load(at, there, 0.0)
        values = tl.load(at + KV * WIDTH, there, 0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        sum_ = sum_ * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
        largest = now
    place = (row.to(tl.int64) * shares + share) * (KV * GROUP) + head
    if ALONE:
        total = total / sum_[:, None]
    tl.store(part_at + place[:, None] * WIDTH + part[None, :], total.to(part_at.dtype.element_ty), queried)
    if not ALONE:
        tl.store(stats_at + place * 2, largest, one < GROUP)
        tl.store(stats_at + place * 2 + 1, sum_, one < GROUP)


@jit
def _add_up(
    part_at, stats_at, out_at, shares, SHARES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    in_turn(OVERLAP)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    share, part = tl.arange(0, SHARES), tl.arange(0, BLOCK)
    place = (row.to(tl.int64) * shares + share) * heads + head
    largest = tl.load(stats_at + place * 2, share < shares, -float("inf"))
    weights = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(weights * tl.load(stats_at + place * 2 + 1, share < shares, 0.0), 0)
    there = (share < shares)[:, None] & (part < WIDTH)[None, :]
    values = tl.load(part_at + place[:, None] * WIDTH + part[None, :], there, 0.0)
    mixed = tl.sum(values * weights[:, None], 0) / total
    tl.store(out_at + (row.to(tl.int64) * heads + head) * WIDTH + part, mixed.to(out_at.dtype.element_ty), part < WIDTH)


def _pages(tokens: slice, lengths: Integers, tables: Integers, pool: torch.Tensor, window: int | None) -> SingleTokens:
    device, (_, block, _, kv_heads, d) = pool.device, pool.shape
    # A kernel is compiled again for a width that 16 does not divide, in the middle of serving.
    wide = np.zeros((len(tables), -(-tables.shape[1] // 16) * 16), dtype=np.int64)
    wide[:, : tables.shape[1]] = tables
    return SingleTokens(tokens, sent(wide, device), sent(lengths, device), (block, kv_heads, d), window)


def _attend(q: torch.Tensor, pool: torch.Tensor, runs: SingleTokens) -> torch.Tensor:
    (rows, heads, d), (block, kv_heads, _) = q.shape, runs.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    shares = min(cdiv(PROGRAMS, rows * kv_heads), MOST_SHARES)
    out = torch.empty(rows, heads * d, dtype=q.dtype, device=q.device)
    part, stats = out, None
    if shares > 1:
        part = torch.empty(rows, shares, heads, d, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, shares, heads, 2, dtype=torch.float32, device=q.device)
    group, wide = heads // kv_heads, max(16, next_power_of_2(d))
    launch(
        _look, (rows, kv_heads, shares), q, pool, runs.tables, runs.lengths, part, stats, q.stride(0), q.stride(1),
        runs.tables.shape[1], LOG2E / math.sqrt(d), runs.window or 0, KV=kv_heads, GROUP=group,
        GROUP_BLOCK=max(16, next_power_of_2(group)), WIDTH=d, BLOCK=wide, SIZE=block, KEYS=KEYS,
        WINDOW=runs.window is not None, ALONE=shares == 1, **overlapping(q.device),
    )  # fmt: skip
    if shares > 1:
        launch(
            _add_up, (rows, heads), part, stats, out, shares, SHARES=next_power_of_2(shares), WIDTH=d, BLOCK=wide,
            **overlapping(q.device),
        )  # fmt: skip
    return out


PAGED = PagedAttention(partial(padded_pages, single=_pages), partial(padded_attention, single=_attend), graphs=True)
