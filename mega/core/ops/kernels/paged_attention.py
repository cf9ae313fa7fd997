"""Attention of the next token of each sequence to the keys in its blocks of a cache, read where they lie.

A program takes the query heads of one key/value head of one sequence along a share of its keys (Dao et al. 2023,
"Flash-Decoding"); the last program to end adds up the shares, always in one order. What is launched follows from the
number of sequences alone, and lengths are read from the device's memory, so a graph can hold it. Where all runs are of
one token, programs turn their queries themselves, and one of a head puts the new key and value into the cache, where no
other looks for them. Runs of several tokens take the plain form.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from mega.core.device import sent
from mega.core.ops.heads import Rotary
from mega.core.ops.kernels.language import cdiv, in_turn, jit, launch, next_power_of_2, overlapping, tl
from mega.core.ops.paged_attention import Integers, PagedAttention, padded_attention, padded_pages

LOG2E = math.log2(math.e)
KEYS = 64
"""Keys of one tile."""
PROGRAMS, MOST_SHARES = 528, 32
"""Programs that keep a device busy, four on each of 132 multiprocessors; shares of a sequence at the most."""


class SingleTokens(NamedTuple):
    """Runs of one token each. tables: int64 [runs, width], blocks. lengths: int64 [runs]. shape: block, kv_heads, d.

    ended: as of `counters`, here since a graph must find it outside of its own memory."""

    tokens: slice
    tables: torch.Tensor
    lengths: torch.Tensor
    ended: torch.Tensor
    shape: tuple[int, int, int]
    window: int | None


@jit
def _look(
    q_at, cos_at, sin_at, pool_at, tables_at, lengths_at, part_at, stats_at, out_at, ended_at, q_row, q_head, width,
    scale, window,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, SHARES: tl.constexpr, WINDOW: tl.constexpr, NEW: tl.constexpr,
    HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of a share of the keys: the mixed values, not divided yet, the largest score and the sum of the weights.

    SHARES: 1, or a power of two that is not less than their number. NEW: keys and values of the tokens follow their
    queries, and the last share begins with them; components HALF apart are turned before."""
    in_turn(OVERLAP)
    row, kv_head, share, shares = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths_at + row)
    oldest, first, end = _borders(length, window, share, shares, KEYS, WINDOW, NEW)
    one, part = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + one
    queried = (one < GROUP)[:, None] & (part < WIDTH)[None, :]
    q_at += row.to(tl.int64) * q_row
    table_at = tables_at + row.to(tl.int64) * width
    pool_at += kv_head * WIDTH
    if HALF:
        cos_at += row * HALF
        sin_at += row * HALF
    q = _turned(q_at + head[:, None] * q_head, part[None, :], queried, cos_at, sin_at, HALF)
    total = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    sum_ = tl.zeros([GROUP_BLOCK], tl.float32)
    largest = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    if NEW:
        key_at = q_at + (KV * GROUP + kv_head) * q_head
        if share == shares - 1:
            slot = tl.load(table_at + (length - 1) // SIZE) * SIZE + (length - 1) % SIZE
            to_at = pool_at + slot * (2 * KV * WIDTH)
            key, fresh = _kept(key_at, q_head, to_at, part[None, :], cos_at, sin_at, KV, WIDTH, HALF)
            largest = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
            sum_ += 1.0
            total += fresh.to(tl.float32)
    total, largest, sum_ = _along(
        q, total, largest, sum_, pool_at, table_at, oldest, first, end, scale, KV, WIDTH, BLOCK, SIZE, KEYS
    )
    _put(
        total, largest, sum_, part_at, stats_at, out_at, ended_at, row, kv_head, share, shares, KV, GROUP, GROUP_BLOCK,
        WIDTH, BLOCK, SHARES,
    )  # fmt: skip


@jit
def _borders(length, window, share, shares, KEYS: tl.constexpr, WINDOW: tl.constexpr, NEW: tl.constexpr):
    """The oldest key of all, the first one of a share, and its end."""
    oldest = length * 0
    if WINDOW:
        oldest = tl.maximum(length - window, 0)
    if NEW:
        length = length - 1
    begin = oldest // KEYS * KEYS
    per = tl.cdiv(length - begin, KEYS * shares) * KEYS
    first = begin + share * per
    return oldest, first, tl.minimum(first + per, length)


@jit
def _put(
    total, largest, sum_, part_at, stats_at, out_at, ended_at, row, kv_head, share, shares,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    one, part = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + one
    queried = (one < GROUP)[:, None] & (part < WIDTH)[None, :]
    if SHARES == 1:
        place = row.to(tl.int64) * (KV * GROUP) + head
        total = (total / sum_[:, None]).to(out_at.dtype.element_ty)
        tl.store(out_at + place[:, None] * WIDTH + part[None, :], total, queried)
    else:
        place = (row.to(tl.int64) * shares + share) * (KV * GROUP) + head
        tl.store(part_at + place[:, None] * WIDTH + part[None, :], total, queried)
        tl.store(stats_at + place * 2, largest, one < GROUP)
        tl.store(stats_at + place * 2 + 1, sum_, one < GROUP)
        if _is_last(ended_at + row * KV + kv_head, shares):
            for query in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                _add_up(part_at, stats_at, out_at, row, query, shares, KV * GROUP, SHARES, WIDTH, BLOCK)


@jit
def _kept(key_at, head_size, to_at, part, cos_at, sin_at, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """The new key, turned, and value of one head, which go into the cache."""
    key = _turned(key_at, part, part < WIDTH, cos_at, sin_at, HALF)
    value = tl.load(key_at + KV * head_size + part, part < WIDTH, 0.0)
    tl.store(to_at + part, key, part < WIDTH)
    tl.store(to_at + KV * WIDTH + part, value, part < WIDTH)
    return key, value


@jit
def _turned(at, part, there, cos_at, sin_at, HALF: tl.constexpr):
    """Heads that begin at `at`, [n, 1], by the angles of their token; pairs of components lie HALF apart."""
    x = tl.load(at + part, there, 0.0)
    if HALF:
        turns, first = part < 2 * HALF, part < HALF
        other = tl.load(at + tl.where(first, part + HALF, part - HALF), there & turns, 0.0).to(tl.float32)
        cos = tl.load(cos_at + tl.where(first, part, part - HALF), turns, 1.0)
        sin = tl.load(sin_at + tl.where(first, part, part - HALF), turns, 0.0)
        x = (x.to(tl.float32) * cos + other * tl.where(first, -sin, sin)).to(x.dtype)
    return x


@jit
def _along(
    q, total, largest, sum_, pool_at, table_at, oldest, first, end, scale,
    KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """With the keys of one head from `first` to `end`, which `pool_at` and `table_at` say the places of."""
    part = tl.arange(0, BLOCK)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = (key >= oldest) & (key < end)
        block = tl.load(table_at + key // SIZE, seen, 0)
        at = pool_at + ((block * SIZE + key % SIZE) * (2 * KV * WIDTH))[:, None] + part[None, :]
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
    return total, largest, sum_


@jit
def _is_last(ended_at, programs):
    """Whether all other programs have written their parts, which this one may then read; the counter is 0 again."""
    tl.debug_barrier()  # one thread counts, when all have written
    last = tl.atomic_add(ended_at, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(ended_at, 0)
    return last


@jit
def _add_up(
    part_at, stats_at, out_at, row, head, shares, HEADS: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All is asked for at once, past the cache of one multiprocessor, where parts of a step before may lie."""
    share, part = tl.arange(0, SHARES), tl.arange(0, BLOCK)
    place = (row.to(tl.int64) * shares + share) * HEADS + head
    there = (share < shares)[:, None] & (part < WIDTH)[None, :]
    largest = tl.load(stats_at + place * 2, share < shares, -float("inf"), cache_modifier=".cg")
    sums = tl.load(stats_at + place * 2 + 1, share < shares, 0.0, cache_modifier=".cg")
    values = tl.load(part_at + place[:, None] * WIDTH + part[None, :], there, 0.0, cache_modifier=".cg")
    weights = tl.exp2(largest - tl.max(largest, 0))
    mixed = tl.sum(values * weights[:, None], 0) / tl.sum(weights * sums, 0)
    tl.store(out_at + (row.to(tl.int64) * HEADS + head) * WIDTH + part, mixed.to(out_at.dtype.element_ty), part < WIDTH)


@cache
def counters(device: torch.device, count: int) -> torch.Tensor:
    """int32 [count] zeros, of the programs that have ended of each that are added up; 0 again when all have. A device
    does one step at a time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _pages(tokens: slice, lengths: Integers, tables: Integers, pool: torch.Tensor, window: int | None) -> SingleTokens:
    device, (_, block, _, kv_heads, d) = pool.device, pool.shape
    # A kernel is compiled again for a width that 16 does not divide, in the middle of serving.
    wide = np.zeros((len(tables), -(-tables.shape[1] // 16) * 16), dtype=np.int64)
    wide[:, : tables.shape[1]] = tables
    ended = counters(device, PROGRAMS)  # where they have several shares, there are fewer
    return SingleTokens(tokens, sent(wide, device), sent(lengths, device), ended, (block, kv_heads, d), window)


def _attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    runs: SingleTokens,
    rotary: Rotary | None = None,
    new: bool = False,
) -> torch.Tensor:
    """new: q is the fused product."""
    (rows, heads, d), (block, kv_heads, _) = q.shape, runs.shape
    heads -= 2 * kv_heads if new else 0
    if q.stride(2) != 1:
        q = q.contiguous()
    shares = min(cdiv(PROGRAMS, rows * kv_heads), MOST_SHARES)
    assert shares == 1 or rows * kv_heads <= len(runs.ended)
    out = torch.empty(rows, heads * d, dtype=q.dtype, device=q.device)
    part, stats, (cos, sin) = None, None, rotary or (None, None)
    if shares > 1:
        part = torch.empty(rows, shares, heads, d, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, shares, heads, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    assert q.dtype == pool.dtype
    launch(
        _look, (rows, kv_heads, shares), q, cos, sin, pool, runs.tables, runs.lengths, part, stats, out, runs.ended,
        q.stride(0), q.stride(1), runs.tables.shape[1], LOG2E / math.sqrt(d), runs.window or 0, KV=kv_heads,
        GROUP=group, GROUP_BLOCK=max(16, next_power_of_2(group)), WIDTH=d, BLOCK=max(16, next_power_of_2(d)),
        SIZE=block, KEYS=KEYS, SHARES=next_power_of_2(shares), WINDOW=runs.window is not None, NEW=new,
        HALF=0 if cos is None else cos.shape[-1], **overlapping(q.device),
    )  # fmt: skip
    return out


def _attend_new(
    fused: torch.Tensor, rotary: Rotary | None, pool: torch.Tensor, pages: list[Any]
) -> torch.Tensor | None:
    if len(pages) > 1 or not isinstance(pages[0], SingleTokens):
        return None
    return _attend(fused, pool, pages[0], rotary, new=True)


PAGED = PagedAttention(
    partial(padded_pages, single=_pages), partial(padded_attention, single=_attend), graphs=True, attend_new=_attend_new
)
