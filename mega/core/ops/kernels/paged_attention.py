"""Paged attention in Triton: queries attend to keys in the blocks of a cache, without gathering the keys first.

For runs of one token, a program handles the query heads of one key/value head of one sequence, for a share of the
sequence's keys (Dao et al. 2023, "Flash-Decoding"). The last program that finishes sums the shares in a fixed order.
The launch depends only on the number of sequences, and the device reads the lengths from memory, so the launch can be
captured in a CUDA graph. If all runs have one token, each program also rotates its queries. One program per head stores
the new key and value in the cache, where no other program reads them in this step.

For runs of several tokens, all new keys are stored in the cache beforehand. The runs are split into tiles of queries;
one program per tile and head loops over the visible keys (Dao 2023, "FlashAttention-2").
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from mega.core.device import sent
from mega.core.ops.heads import Rotary
from mega.core.ops.kernels.language import cdiv, in_turn, jit, launch, next_power_of_2, overlapping, tl
from mega.core.ops.paged_attention import Integers, PagedAttention, RaggedGraph

LOG2E = math.log2(math.e)
KEYS = 64
"""Number of keys in a tile."""
ROWS, WARPS = 64, 4
"""ROWS: number of queries in a tile, for runs of several tokens. WARPS: number of warps of the program for such a
tile."""
PROGRAMS, MOST_SHARES = 528, 32
"""PROGRAMS: number of programs that fill a device, four on each of 132 multiprocessors. MOST_SHARES: maximum number of
shares into which the keys of a sequence are divided."""
AT_ONCE, AT_MOST, WIDE = 8192, 16384, 16
"""AT_ONCE: number of partial results that a program loads at once when it combines shares. These results fill 64
registers of a thread. AT_MOST: the same if WIDE shares then fit; a further step of the combination takes about 4 us on
an H100. WIDE: number of shares, enough for 1,024 keys in tiles of KEYS."""


class SingleTokens(NamedTuple):
    """A step's leading runs that have a single token each. A run consists of one sequence's tokens in the step."""

    tables: torch.Tensor
    """int64 [runs, width]: the blocks of each sequence."""
    lengths: torch.Tensor
    """int64 [runs]: number of keys of each sequence; 0 for a run that does not have exactly one token."""
    ended: torch.Tensor
    """The counters from `counters`, which must be allocated outside the memory pool of a CUDA graph."""
    shape: tuple[int, int, int]
    """The sizes (block, kv_heads, d) of the pool."""
    window: int | None


class RaggedRuns(NamedTuple):
    """A step's runs of any length. A run consists of one sequence's tokens in the step."""

    singles: SingleTokens | None
    """The leading runs of one token, or None. `lengths` is 0 for all runs from the first longer run onward."""
    tables: torch.Tensor
    """int64 [runs, width]: the blocks of each sequence."""
    tiles: torch.Tensor
    """int64 [tiles, 4]: index of the run, index of the tile's first token, number of tokens in the tile, and position
    of the first token; all 0 for an unused tile."""
    shape: tuple[int, int, int]
    """The sizes (block, kv_heads, d) of the pool."""
    window: int | None


@jit
def _look(
    q_at, cos_at, sin_at, pool_at, tables_at, lengths_at, part_at, stats_at, out_at, ended_at, q_row, q_head, width,
    scale, window,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, SHARES: tl.constexpr, TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr, NEW: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend to a share of the keys: compute the weighted sum of values, the largest score, and the sum of weights.

    SHARES: 1 or MOST_SHARES, so that few variants are compiled. GROUP_BLOCK, QUERIES: size of a group, rounded up for
    tensor cores and to a power of 2. TOGETHER: number of shares combined at once. NEW: the new keys and values follow
    the queries in memory, and the first share also attends to the new key. HALF: see `_turned`."""
    in_turn(OVERLAP)
    row, kv_head, share, shares = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths_at + row)
    if length == 0:  # a run of several tokens
        return
    oldest, first, end, used = _borders(length, window, share, shares, KEYS, WINDOW, NEW)
    if share >= used:
        return
    query, part = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + query
    queried = (query < GROUP)[:, None] & (part < WIDTH)[None, :]
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
        if share == 0:
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
        total, largest, sum_, part_at, stats_at, out_at, ended_at, row, kv_head, share, shares, used, KV, GROUP,
        GROUP_BLOCK, QUERIES, WIDTH, BLOCK, SHARES, TOGETHER,
    )  # fmt: skip


@jit
def _borders(length, window, share, shares, KEYS: tl.constexpr, WINDOW: tl.constexpr, NEW: tl.constexpr):
    """Return (oldest visible key, first key of a share, end of the share, number of nonempty shares)."""
    oldest = length * 0
    if WINDOW:
        oldest = tl.maximum(length - window, 0)
    if NEW:
        length = length - 1
    begin = oldest // KEYS * KEYS
    per = tl.maximum(tl.cdiv(length - begin, KEYS * shares), 1) * KEYS
    first = begin + share * per
    return oldest, first, tl.minimum(first + per, length), tl.maximum(tl.cdiv(length - begin, per), 1)


@jit
def _put(
    total, largest, sum_, part_at, stats_at, out_at, ended_at, row, kv_head, share, shares, used,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SHARES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    query_index, part = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK)
    head = kv_head * GROUP + query_index
    queried = (query_index < GROUP)[:, None] & (part < WIDTH)[None, :]
    if SHARES == 1:
        place = row.to(tl.int64) * (KV * GROUP) + head
        total = (total / sum_[:, None]).to(out_at.dtype.element_ty)
        tl.store(out_at + place[:, None] * WIDTH + part[None, :], total, queried)
    else:
        place = (row.to(tl.int64) * shares + share) * (KV * GROUP) + head
        tl.store(part_at + place[:, None] * WIDTH + part[None, :], total, queried)
        tl.store(stats_at + place * 2, largest, query_index < GROUP)
        tl.store(stats_at + place * 2 + 1, sum_, query_index < GROUP)
        if _is_last(ended_at + row * KV + kv_head, used):
            _add_up(
                part_at, stats_at, out_at, row, kv_head, shares, used, KV, GROUP, QUERIES, SHARES, TOGETHER, WIDTH,
                BLOCK,
            )  # fmt: skip


@jit
def _kept(key_at, head_size, to_at, part, cos_at, sin_at, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Rotate the new key of one head, and store this key and the new value in the cache."""
    key = _turned(key_at, part, part < WIDTH, cos_at, sin_at, HALF)
    value = tl.load(key_at + KV * head_size + part, part < WIDTH, 0.0)
    tl.store(to_at + part, key, part < WIDTH)
    tl.store(to_at + KV * WIDTH + part, value, part < WIDTH)
    return key, value


@jit
def _turned(at, part, there, cos_at, sin_at, HALF: tl.constexpr):
    """Load heads from the addresses `at`, [n, 1], and rotate them by the angles of the token. The two components of a
    rotated pair are HALF apart."""
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
    """Attend to the keys of one head from `first` to `end`, stored in the blocks of `table_at`."""
    part = tl.arange(0, BLOCK)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        visible = (key >= oldest) & (key < end)
        block = tl.load(table_at + key // SIZE, visible, 0)
        address = pool_at + ((block * SIZE + key % SIZE) * (2 * KV * WIDTH))[:, None] + part[None, :]
        mask = visible[:, None] & (part < WIDTH)[None, :]
        keys = tl.load(address, mask, 0.0)
        values = tl.load(address + KV * WIDTH, mask, 0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        sum_ = sum_ * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total, largest, sum_


@jit
def _tiles(
    q_at, pool_at, tables_at, tiles_at, out_at, q_row, q_head, width, scale, window,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute attention for a tile of queries of one head."""
    in_turn(OVERLAP)
    tile_at, head = tiles_at + tl.program_id(0) * 4, tl.program_id(1)
    count = tl.load(tile_at + 2)
    if count == 0:
        return
    token, position = tl.load(tile_at + 1), tl.load(tile_at + 3)
    table_at = tables_at + tl.load(tile_at) * width
    query, part = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    queried = (query < count)[:, None] & (part < WIDTH)[None, :]
    q = tl.load(q_at + (token + query)[:, None] * q_row + head * q_head + part[None, :], queried, 0.0)
    pool_at += head // (HEADS // KV) * WIDTH
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_ = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    end, at_query = position + count, position + query
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // KEYS * KEYS
    else:  # the first keys are visible to all queries
        begin = (position + 1) // KEYS * KEYS
        total, largest, sum_ = _tile_keys(
            q, total, largest, sum_, pool_at, table_at, at_query, position * 0, begin, scale, window, KV, WIDTH, BLOCK,
            SIZE, KEYS, False, False,
        )  # fmt: skip
    total, largest, sum_ = _tile_keys(
        q, total, largest, sum_, pool_at, table_at, at_query, begin, end, scale, window, KV, WIDTH, BLOCK, SIZE, KEYS,
        True, WINDOW,
    )  # fmt: skip
    place = (token + query) * (HEADS * WIDTH) + head * WIDTH
    total = (total / sum_[:, None]).to(out_at.dtype.element_ty)
    tl.store(out_at + place[:, None] + part[None, :], total, queried)


@jit
def _tile_keys(
    q, total, largest, sum_, pool_at, table_at, at_query, first, end, scale, window,
    KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `first` to `end`. MASKED: whether some keys are invisible to some queries."""
    part = tl.arange(0, BLOCK)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key < end)[:, None] & (part < WIDTH)[None, :] if MASKED else (part < WIDTH)[None, :]
        block = tl.load(table_at + key // SIZE, key < end, 0) if MASKED else tl.load(table_at + key // SIZE)
        address = pool_at + ((block * SIZE + key % SIZE) * (2 * KV * WIDTH))[:, None] + part[None, :]
        if MASKED or WIDTH < BLOCK:
            keys = tl.load(address, mask, 0.0)
            values = tl.load(address + KV * WIDTH, mask, 0.0)
        else:
            keys = tl.load(address)
            values = tl.load(address + KV * WIDTH)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            visible = key[None, :] <= at_query[:, None]
            if WINDOW:
                visible &= key[None, :] > at_query[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest) if MASKED else new_largest
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        sum_ = sum_ * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total, largest, sum_


@jit
def _is_last(ended_at, programs):
    """Return whether all other programs have written their shares, so that this program may read all shares. In this
    case, the counter is reset to 0."""
    tl.debug_barrier()  # all threads have written before one thread increments the counter
    last = tl.atomic_add(ended_at, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(ended_at, 0)
    return last


@jit
def _add_up(
    part_at, stats_at, out_at, row, kv_head, shares, used,
    KV: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SHARES: tl.constexpr, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the shares of the query heads of one key/value head, TOGETHER shares at a time. Loads bypass the L1
    cache, which may contain shares of an earlier step."""
    query, part = tl.arange(0, QUERIES), tl.arange(0, BLOCK)
    head, real = kv_head * GROUP + query, query < GROUP
    first_share = row.to(tl.int64) * shares * (KV * GROUP) + head
    share = tl.arange(0, SHARES)[:, None]
    place, there = first_share[None, :] + share * (KV * GROUP), (share < used) & real[None, :]
    largest = tl.load(stats_at + place * 2, there, -float("inf"), cache_modifier=".cg")
    sums = tl.load(stats_at + place * 2 + 1, there, 0.0, cache_modifier=".cg")
    base = tl.where(real, tl.max(largest, 0), 0.0)
    sum_ = tl.where(real, tl.sum(tl.exp2(largest - base[None, :]) * sums, 0), 1.0)
    total = tl.zeros([QUERIES, BLOCK], tl.float32)
    for begin in range(0, used, TOGETHER):
        some = begin + tl.arange(0, TOGETHER)[:, None]
        at, inside = first_share[None, :] + some * (KV * GROUP), (some < used) & real[None, :]
        weights = tl.exp2(tl.load(stats_at + at * 2, inside, -float("inf"), cache_modifier=".cg") - base[None, :])
        mask = inside[:, :, None] & (part < WIDTH)[None, None, :]
        values = tl.load(part_at + at[:, :, None] * WIDTH + part[None, None, :], mask, 0.0, cache_modifier=".cg")
        total += tl.sum(values * weights[:, :, None], 0)
    to_at = out_at + (row.to(tl.int64) * (KV * GROUP) + head)[:, None] * WIDTH + part[None, :]
    output = (total / sum_[:, None]).to(out_at.dtype.element_ty)
    tl.store(to_at, output, real[:, None] & (part < WIDTH)[None, :])


@cache
def counters(device: torch.device, count: int) -> torch.Tensor:
    """Allocate int32 [count] zeros. Each counter counts the programs that have finished their share of one result, and
    is reset to 0 when all of these programs have finished. All steps share the counters, because a device runs one step
    at a time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _pages(
    counts: Integers, lengths: Integers, tables: Integers, pool: torch.Tensor, repeats: int, window: int | None = None
) -> SingleTokens | RaggedRuns:
    device, (_, block, _, kv_heads, d) = pool.device, pool.shape
    # Pad the width to a multiple of 16, because Triton would otherwise recompile the kernel while serving.
    padded = np.zeros((len(tables), -(-tables.shape[1] // 16) * 16), dtype=np.int64)
    padded[:, : tables.shape[1]] = tables
    device_tables, singles = sent(padded, device), leading_singles(counts)
    if singles == len(counts):
        return _singles(sent(lengths, device), device_tables, pool, window)
    single = None
    if singles:
        single = _singles(sent(lengths[:singles].copy(), device), device_tables[:singles], pool, window)
    tiles = sent(tiles_of(counts, lengths), device)
    return RaggedRuns(single, device_tables, tiles, (block, kv_heads, d), window)


def _singles(lengths: torch.Tensor, tables: torch.Tensor, pool: torch.Tensor, window: int | None) -> SingleTokens:
    ended = counters(pool.device, PROGRAMS)  # enough, because fewer than PROGRAMS results have several shares
    return SingleTokens(tables, lengths, ended, (pool.shape[1], *pool.shape[3:]), window)


def _recorded_pages(
    lengths: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, pool: torch.Tensor, window: int | None
) -> RaggedRuns:
    singles = _singles(lengths, tables, pool, window)
    return RaggedRuns(singles, tables, tiles, singles.shape, window)


def leading_singles(counts: Integers) -> int:
    """Return the number of leading runs of one token.

    >>> leading_singles(np.array([1, 1, 5, 1])), leading_singles(np.array([2]))
    (2, 0)
    """
    is_long = counts != 1
    return int(is_long.argmax()) if is_long.any() else len(counts)


def most_tiles(tokens: int, runs: int) -> int:
    return min(cdiv(tokens, ROWS) + runs, tokens)


def tiles_of(counts: Integers, lengths: Integers) -> Integers:
    """Compute `RaggedRuns.tiles` for runs with `counts` tokens and `lengths` keys.

    >>> tiles_of(np.array([1, 70]), np.array([9, 80])).tolist()
    [[1, 1, 64, 10], [1, 65, 6, 74]]
    """
    first = leading_singles(counts)
    starts = np.cumsum(counts) - counts
    tiles = -(-counts[first:] // ROWS)
    run = np.repeat(np.arange(first, len(counts)), tiles)
    tokens_before = ROWS * (np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    tokens = np.minimum(counts[run] - tokens_before, ROWS)
    return np.stack([run, starts[run] + tokens_before, tokens, lengths[run] - counts[run] + tokens_before], 1).astype(
        np.int64
    )


def _attend(q: torch.Tensor, pool: torch.Tensor, runs: SingleTokens | RaggedRuns) -> torch.Tensor:
    if q.stride(2) != 1:
        q = q.contiguous()
    tokens, heads, d = q.shape
    out = torch.empty(tokens, heads * d, dtype=q.dtype, device=q.device)
    if isinstance(runs, SingleTokens):
        return _attend_singles(q, pool, runs, out)
    if runs.singles is not None:
        _attend_singles(q[: len(runs.singles.lengths)], pool, runs.singles, out)
    block, kv_heads, _ = runs.shape
    stages = 3 if q.element_size() == 2 and d <= 128 else 1
    launch(
        _tiles, (len(runs.tiles), heads), q, pool, runs.tables, runs.tiles, out, q.stride(0), q.stride(1),
        runs.tables.shape[1], LOG2E / math.sqrt(d), runs.window or 0, HEADS=heads, KV=kv_heads, WIDTH=d,
        BLOCK=max(16, next_power_of_2(d)), SIZE=block, KEYS=KEYS if d <= 128 else KEYS // 2, ROWS=ROWS,
        WINDOW=runs.window is not None, num_warps=WARPS, num_stages=stages, **overlapping(q.device),
    )  # fmt: skip
    return out


def _attend_singles(
    q: torch.Tensor,
    pool: torch.Tensor,
    runs: SingleTokens,
    out: torch.Tensor,
    rotary: Rotary | None = None,
    new: bool = False,
) -> torch.Tensor:
    """Launch the kernel for runs of one token. new: whether q is the fused projection of queries, keys and values."""
    (rows, heads, d), (block, kv_heads, _) = q.shape, runs.shape
    heads -= 2 * kv_heads if new else 0
    rows = min(rows, len(runs.lengths))
    # Use enough shares to fill the device. The number of shares depends only on the number of runs, as a CUDA graph
    # requires.
    shares = min(cdiv(PROGRAMS, rows * kv_heads), MOST_SHARES)
    assert shares == 1 or rows * kv_heads <= len(runs.ended)
    part, stats, (cos, sin) = None, None, rotary or (None, None)
    if shares > 1:
        part = torch.empty(rows, shares, heads, d, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, shares, heads, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    queries, width = next_power_of_2(group), max(16, next_power_of_2(d))
    assert q.dtype == pool.dtype
    launch(
        _look, (rows, kv_heads, shares), q, cos, sin, pool, runs.tables, runs.lengths, part, stats, out, runs.ended,
        q.stride(0), q.stride(1), runs.tables.shape[1], LOG2E / math.sqrt(d), runs.window or 0, KV=kv_heads,
        GROUP=group, GROUP_BLOCK=max(16, queries), QUERIES=queries, WIDTH=d, BLOCK=width, SIZE=block, KEYS=KEYS,
        SHARES=1 if shares == 1 else MOST_SHARES, TOGETHER=_together(shares, queries * width),
        WINDOW=runs.window is not None, NEW=new, HALF=0 if cos is None else cos.shape[-1], **overlapping(q.device),
    )  # fmt: skip
    return out


def _together(shares: int, results: int) -> int:
    """Return the number of shares that a program combines at once. results: number of results of one share.

    >>> [_together(32, heads * 128) for heads in (1, 4, 8, 16)], _together(3, 8 * 128)
    ([64, 16, 16, 4], 8)
    """
    wanted = min(next_power_of_2(shares), WIDE)
    return wanted if AT_ONCE < wanted * results <= AT_MOST else max(1, AT_ONCE // results)


def _attend_new(fused: torch.Tensor, rotary: Rotary | None, pool: torch.Tensor, pages: object) -> torch.Tensor | None:
    if not isinstance(pages, SingleTokens):
        return None
    (_, kv_heads, d), (tokens, heads, _) = pages.shape, fused.shape
    out = torch.empty(tokens, (heads - 2 * kv_heads) * d, dtype=fused.dtype, device=fused.device)
    fused = fused if fused.stride(2) == 1 else fused.contiguous()
    return _attend_singles(fused, pool, pages, out, rotary, new=True)


PAGED = PagedAttention(
    _pages, _attend, graphs=True, attend_new=_attend_new, ragged=RaggedGraph(most_tiles, tiles_of, _recorded_pages)
)
