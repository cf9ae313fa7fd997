"""Flash attention in Triton, with documents, windows, offsets, grouped heads, and counter-based dropout inside the
kernel.

A program handles a tile of queries and loops over the keys visible to these queries (forward and d(q)), or a tile of
keys and loops over the queries that see these keys (d(k), d(v)). The order of every summation is therefore fixed, and
scores are never stored (Dao 2023). A loop has three ranges. In the middle range, tiles are fully visible; in the first
and last range, each score is checked:

    first ........ whole_first .............. whole_end ........ end
    check scores   all pairs are visible      check scores

Scores are scaled by log2(e), because the device computes powers of 2 faster than powers of e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mega.core.ops import cudnn, observe
from mega.core.ops.attention import fused_recomputing
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.counter import RULE
from mega.core.ops.kernels import documents, hopper
from mega.core.ops.kernels.counter import kept, row_keys
from mega.core.ops.kernels.heads import joined
from mega.core.ops.kernels.language import cdiv, jit, next_power_of_2, tl
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import FUSED, PartialAttention

LOG2E = math.log2(math.e)


class Heads(NamedTuple):
    """A tensor [b, s, heads, d] as a kernel argument. Dimension d is contiguous."""

    at: torch.Tensor  # address
    batch: int  # strides
    row: int
    head: int


class Visibility(NamedTuple):
    """The fields of an `AttentionMask` that hide keys, as a kernel argument."""

    s: int  # number of queries
    t: int  # number of keys
    offset: int  # position of the first query among the keys
    window: int | None
    q_documents: torch.Tensor | None = None  # int64 [b, s]
    q_stride: int | None = None  # stride of a row
    k_documents: torch.Tensor | None = None  # int64 [b, t]
    k_stride: int | None = None
    bounds: torch.Tensor | None = None  # from `documents.bounds`


class DropoutValues(NamedTuple):
    """An `AttentionDropout` as a kernel argument."""

    keys: torch.Tensor  # int64 [b, s]: keys of the query tokens
    stride: int  # stride of a row of keys
    site: int
    head: int  # index of the first head
    threshold: int  # a score is dropped with probability threshold / 2^32
    early: int  # key j has column j + early if j < border, else j + late
    border: int
    late: int
    zero: float  # always 0.0; if it were a constant, the compiler would round weights before dropping them


# -- shared by the kernels


@jit
def _load(x, batch, head, row, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load rows of one head as [rows, BLOCK], with zeros for rows and columns that do not exist. WHOLE: whether all
    rows exist."""
    column = tl.arange(0, BLOCK)
    base = x.at + batch.to(tl.int64) * x.batch + head * x.head
    address = base + row.to(tl.int64)[:, None] * x.row + column[None, :]
    if WHOLE and WIDTH == BLOCK:
        return tl.load(address)
    mask = column[None, :] < WIDTH
    if not WHOLE:
        mask = mask & (row < length)[:, None]
    return tl.load(address, mask, 0.0)


@jit
def _store(x, batch, head, row, length, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    base = x.at + batch.to(tl.int64) * x.batch + head * x.head
    address = base + row.to(tl.int64)[:, None] * x.row + column[None, :]
    mask = (row < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(address, value.to(x.at.dtype.element_ty), mask)


@jit
def _visible(seen, batch, query, key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return a mask of the visible (query, key) pairs. query, key: indices of shapes [n, 1] and [1, n], in either
    order."""
    # A bound that holds for a whole row of the tile is computed once per row. Each bound then costs one comparison per
    # pair.
    if query.shape[1] == 1:
        position = query + seen.offset
        end = seen.t + tl.zeros_like(query)
        if CAUSAL:
            end = tl.minimum(end, position + 1)
        if WINDOW and not CAUSAL:
            end = tl.minimum(end, position + seen.window)
        visible = key < tl.where(query < seen.s, end, 0)
        if WINDOW:
            visible = visible & (key > position - seen.window)
    else:
        position = key - seen.offset
        end = seen.s + tl.zeros_like(key)
        if WINDOW:
            end = tl.minimum(end, position + seen.window)
        visible = query < tl.where(key < seen.t, end, 0)
        if CAUSAL:
            visible = visible & (query >= position)
        if WINDOW and not CAUSAL:
            visible = visible & (query > position - seen.window)
    if DOCUMENTS:
        rows, columns = seen.q_documents + batch * seen.q_stride, seen.k_documents + batch * seen.k_stride
        visible = visible & (tl.load(rows + query, query < seen.s, 0) == tl.load(columns + key, key < seen.t, 0))
    return visible


@jit
def _between(first, whole_first, whole_end, end):
    """Order the bounds so that first <= whole_first <= whole_end <= end. The middle range may be empty."""
    nothing = whole_first >= whole_end
    return first, tl.where(nothing, first, whole_first), tl.where(nothing, first, whole_end), end


@jit
def _keys_seen(
    seen, batch, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Return the bounds of the loop over keys for a tile of queries: first visible key, first key visible to all
    queries, end of the keys visible to all queries, end of the visible keys."""
    # Positions of the first and last query among the keys. All bounds except `end` are multiples of COLUMNS.
    low = tile * ROWS + seen.offset
    high = tl.minimum(tile * ROWS + ROWS, seen.s) - 1 + seen.offset
    first, whole_first, whole_end, end = 0, 0, seen.t // COLUMNS * COLUMNS, seen.t
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(end, high + 1))
        whole_end = tl.minimum(whole_end, tl.maximum(low + 1, 0) // COLUMNS * COLUMNS)
    if WINDOW:
        first = tl.maximum(low - seen.window + 1, 0) // COLUMNS * COLUMNS
        whole_first = tl.cdiv(tl.maximum(high - seen.window + 1, 0), COLUMNS) * COLUMNS
        if not CAUSAL:
            end = tl.maximum(0, tl.minimum(end, high + seen.window))
            whole_end = tl.minimum(whole_end, tl.maximum(low + seen.window, 0) // COLUMNS * COLUMNS)
    if DOCUMENTS:
        bounds = seen.bounds + (batch * tl.num_programs(0) + tile) * 4
        first, end = tl.maximum(first, tl.load(bounds)), tl.minimum(end, tl.load(bounds + 3))
        whole_first, whole_end = (
            tl.maximum(whole_first, tl.load(bounds + 1)),
            tl.minimum(whole_end, tl.load(bounds + 2)),
        )
    return _between(first, whole_first, whole_end, end)


@jit
def _queries_seeing(
    seen, batch, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Return the bounds of the loop over queries for a tile of keys, ordered like those of `_keys_seen`."""
    # Positions of the first and last key among the queries. All bounds except `end` are multiples of ROWS.
    low = tile * COLUMNS - seen.offset
    high = tl.minimum(tile * COLUMNS + COLUMNS, seen.t) - 1 - seen.offset
    first, whole_first, whole_end, end = 0, 0, seen.s // ROWS * ROWS, seen.s
    if CAUSAL:
        first = tl.maximum(low, 0) // ROWS * ROWS
        whole_first = tl.cdiv(tl.maximum(high, 0), ROWS) * ROWS
    if WINDOW:
        end = tl.maximum(0, tl.minimum(end, high + seen.window))
        whole_end = tl.minimum(whole_end, tl.maximum(low + seen.window, 0) // ROWS * ROWS)
        if not CAUSAL:
            first = tl.maximum(low - seen.window + 1, 0) // ROWS * ROWS
            whole_first = tl.cdiv(tl.maximum(high - seen.window + 1, 0), ROWS) * ROWS
    if DOCUMENTS:
        bounds = seen.bounds + (batch * tl.num_programs(0) + tile) * 4
        first, end = tl.maximum(first, tl.load(bounds)), tl.minimum(end, tl.load(bounds + 3))
        whole_first, whole_end = (
            tl.maximum(whole_first, tl.load(bounds + 1)),
            tl.minimum(whole_end, tl.load(bounds + 2)),
        )
    return _between(first, whole_first, whole_end, end)


@jit
def _kept(
    dropped, rows, key, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_FIRST: tl.constexpr
):  # fmt: skip
    """Return a mask of the scores that survive dropout, for `rows` and the keys key, key + 1, ...: [rows, COLUMNS] or
    transposed."""
    if ALIGNED:
        first = key + tl.where(key >= dropped.border, dropped.late, dropped.early)
        return kept(rows, first, COLUMNS, True, COLUMNS_FIRST, dropped.threshold)
    first = key + tl.where(key + tl.arange(0, COLUMNS) >= dropped.border, dropped.late, dropped.early)
    return kept(rows, first, COLUMNS, False, COLUMNS_FIRST, dropped.threshold)


# -- forward


@jit
def _attend(
    total, sum_, largest, q, rows, k, v, seen, dropped, batch, kv_head, query, first, end, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `first` to `end`. WHOLE: whether all pairs are visible."""
    for start in tl.range(first, end, COLUMNS):
        start = tl.multiple_of(start, COLUMNS)
        key = start + tl.arange(0, COLUMNS)
        keys = _load(k, batch, kv_head, key, seen.t, WIDTH, BLOCK, WHOLE)
        scores = tl.dot(q, tl.trans(keys))
        if not WHOLE:
            visible = _visible(seen, batch, query[:, None], key[None, :], CAUSAL, WINDOW, DOCUMENTS)
            scores = tl.where(visible, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        # If a query has no visible keys so far, its maximum is -inf, and -inf minus -inf would be NaN.
        base = new_largest if WHOLE else tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(largest - base)
        sum_ = sum_ * shrink + tl.sum(weights, 1)
        if DROP:
            weights = tl.where(_kept(dropped, rows, start, COLUMNS, ALIGNED, False), weights, dropped.zero)
        values = _load(v, batch, kv_head, key, seen.t, WIDTH, BLOCK, WHOLE)
        total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None])
        largest = new_largest
    return total, sum_, largest


@jit
def _attention_forward(
    q, k, v, out, lse_at, seen, dropped, scale, rescale, heads, group,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most keys first
    head, batch = tl.program_id(1), tl.program_id(2)
    query = tile * ROWS + tl.arange(0, ROWS)
    queries = _load(q, batch, head, query, seen.s, WIDTH, BLOCK, False)
    rows = query.to(tl.uint64)
    if DROP:
        keys = tl.load(dropped.keys + batch * dropped.stride + query, query < seen.s, 0)
        rows = row_keys(keys, dropped.site, dropped.head + head)
    first, whole_first, whole_end, end = _keys_seen(seen, batch, tile, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_ = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    if WINDOW or DOCUMENTS:
        total, sum_, largest = _attend(
            total, sum_, largest, queries, rows, k, v, seen, dropped, batch, head // group, query, first, whole_first,
            scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
        )  # fmt: skip
    total, sum_, largest = _attend(
        total, sum_, largest, queries, rows, k, v, seen, dropped, batch, head // group, query, whole_first, whole_end,
        scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, True,
    )  # fmt: skip
    total, sum_, largest = _attend(
        total, sum_, largest, queries, rows, k, v, seen, dropped, batch, head // group, query, whole_end, end,
        scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
    )  # fmt: skip
    total = total * (rescale / tl.where(sum_ > 0, sum_, 1.0))[:, None]
    _store(out, batch, head, query, seen.s, total, WIDTH, BLOCK)
    lse = (largest + tl.log2(sum_)) * 0.6931471805599453
    offset = (batch * heads + head).to(tl.int64) * seen.s + query
    tl.store(lse_at + offset, tl.where(sum_ > 0, lse, -float("inf")), query < seen.s)


# -- backward


@jit
def _attention_prepare(
    out, grad, lse_at, base_at, delta_at, rows_at, seen, dropped, keep, heads,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Store three values for each query: lse in base 2; `keep` times the sum of weight x d(weight), which the gradient
    of softmax subtracts; and the row key of dropout."""
    head, batch = tl.program_id(1), tl.program_id(2)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = _load(out, batch, head, query, seen.s, WIDTH, BLOCK, False).to(tl.float32)
    grads = _load(grad, batch, head, query, seen.s, WIDTH, BLOCK, False).to(tl.float32)
    offset = (batch * heads + head).to(tl.int64) * seen.s + query
    lse = tl.load(lse_at + offset, query < seen.s, 0.0)
    tl.store(base_at + offset, lse * 1.4426950408889634, query < seen.s)
    tl.store(delta_at + offset, tl.sum(outs * grads, 1) * keep, query < seen.s)
    if DROP:
        keys = tl.load(dropped.keys + batch * dropped.stride + query, query < seen.s, 0)
        rows = row_keys(keys, dropped.site, dropped.head + head)
        tl.store(rows_at + offset, rows.to(tl.int64, bitcast=True), query < seen.s)


@jit
def _key_gradients(
    grad_k, grad_v, keys, values, q, grad, base_at, delta_at, rows_at, seen, dropped, batch, head, heads, key, column,
    first, end, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries from `first` to `end` to the gradients of a tile of keys and values. Scores
    are [keys, queries]."""
    for start in tl.range(first, end, ROWS):
        start = tl.multiple_of(start, ROWS)
        query = start + tl.arange(0, ROWS)
        queries = _load(q, batch, head, query, seen.s, WIDTH, BLOCK, WHOLE)
        grads = _load(grad, batch, head, query, seen.s, WIDTH, BLOCK, WHOLE)
        offset = (batch * heads + head).to(tl.int64) * seen.s + query
        base = tl.load(base_at + offset) if WHOLE else tl.load(base_at + offset, query < seen.s, 0.0)
        delta = tl.load(delta_at + offset) if WHOLE else tl.load(delta_at + offset, query < seen.s, 0.0)
        scores = tl.dot(keys, tl.trans(queries))
        weights = tl.exp2(scores * scale - base[None, :])
        if not WHOLE:
            visible = _visible(seen, batch, query[None, :], key[:, None], CAUSAL, WINDOW, DOCUMENTS)
            weights = tl.where(visible, weights, 0.0)
        # Dropout's factor 1 / keep is applied at the end, by k_scale and v_scale, so `delta` includes the factor
        # `keep`.
        grad_weights = tl.dot(values, tl.trans(grads))
        if DROP:
            rows = tl.load(rows_at + offset) if WHOLE else tl.load(rows_at + offset, query < seen.s, 0)
            keep = _kept(dropped, rows.to(tl.uint64, bitcast=True), column, COLUMNS, ALIGNED, True)
            dropped_weights = tl.where(keep, weights, dropped.zero)
            grad_scores = dropped_weights * grad_weights - weights * delta[None, :]
        else:
            dropped_weights = weights
            grad_scores = weights * (grad_weights - delta[None, :])
        grad_v = tl.dot(dropped_weights.to(grads.dtype), grads, grad_v)
        grad_k = tl.dot(grad_scores.to(queries.dtype), queries, grad_k)
    return grad_k, grad_v


@jit
def _attention_backward_keys(
    q, k, v, grad, grad_k_to, grad_v_to, base_at, delta_at, rows_at, seen, dropped, scale, k_scale, v_scale, heads,
    group,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = tile * COLUMNS + tl.arange(0, COLUMNS)
    keys = _load(k, batch, kv_head, key, seen.t, WIDTH, BLOCK, False)
    values = _load(v, batch, kv_head, key, seen.t, WIDTH, BLOCK, False)
    first, whole_first, whole_end, end = _queries_seeing(seen, batch, tile, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS)
    grad_k = tl.zeros([COLUMNS, BLOCK], tl.float32)
    grad_v = tl.zeros([COLUMNS, BLOCK], tl.float32)
    # Each program sums over all query heads of one key/value head, in a fixed order and without atomics.
    for head in range(kv_head * group, kv_head * group + group):
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, keys, values, q, grad, base_at, delta_at, rows_at, seen, dropped, batch, head, heads, key,
            tile * COLUMNS, first, whole_first, scale,
            WIDTH, BLOCK, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
        )  # fmt: skip
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, keys, values, q, grad, base_at, delta_at, rows_at, seen, dropped, batch, head, heads, key,
            tile * COLUMNS, whole_first, whole_end, scale,
            WIDTH, BLOCK, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, True,
        )  # fmt: skip
        grad_k, grad_v = _key_gradients(
            grad_k, grad_v, keys, values, q, grad, base_at, delta_at, rows_at, seen, dropped, batch, head, heads, key,
            tile * COLUMNS, whole_end, end, scale,
            WIDTH, BLOCK, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
        )  # fmt: skip
    _store(grad_k_to, batch, kv_head, key, seen.t, grad_k * k_scale, WIDTH, BLOCK)
    _store(grad_v_to, batch, kv_head, key, seen.t, grad_v * v_scale, WIDTH, BLOCK)


@jit
def _query_gradient(
    grad_q, q, grads, base, delta, rows, k, v, seen, dropped, batch, kv_head, query, first, end, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys from `first` to `end` to the gradient of a tile of queries."""
    for start in tl.range(first, end, COLUMNS):
        start = tl.multiple_of(start, COLUMNS)
        key = start + tl.arange(0, COLUMNS)
        keys = _load(k, batch, kv_head, key, seen.t, WIDTH, BLOCK, WHOLE)
        values = _load(v, batch, kv_head, key, seen.t, WIDTH, BLOCK, WHOLE)
        scores = tl.dot(q, tl.trans(keys))
        weights = tl.exp2(scores * scale - base[:, None])
        if not WHOLE:
            visible = _visible(seen, batch, query[:, None], key[None, :], CAUSAL, WINDOW, DOCUMENTS)
            weights = tl.where(visible, weights, 0.0)
        grad_weights = tl.dot(grads, tl.trans(values))
        if DROP:
            grad_weights = tl.where(_kept(dropped, rows, start, COLUMNS, ALIGNED, False), grad_weights, 0.0)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q = tl.dot(grad_scores.to(keys.dtype), keys, grad_q)
    return grad_q


@jit
def _attention_backward_queries(
    q, k, v, grad, grad_q_to, base_at, delta_at, rows_at, seen, dropped, scale, q_scale, heads, group,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most keys first
    head, batch = tl.program_id(1), tl.program_id(2)
    query = tile * ROWS + tl.arange(0, ROWS)
    queries = _load(q, batch, head, query, seen.s, WIDTH, BLOCK, False)
    grads = _load(grad, batch, head, query, seen.s, WIDTH, BLOCK, False)
    offset = (batch * heads + head).to(tl.int64) * seen.s + query
    base = tl.load(base_at + offset, query < seen.s, 0.0)
    delta = tl.load(delta_at + offset, query < seen.s, 0.0)
    rows = query.to(tl.uint64)
    if DROP:
        rows = tl.load(rows_at + offset, query < seen.s, 0).to(tl.uint64, bitcast=True)
    first, whole_first, whole_end, end = _keys_seen(seen, batch, tile, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS)
    grad_q = tl.zeros([ROWS, BLOCK], tl.float32)
    if WINDOW or DOCUMENTS:
        grad_q = _query_gradient(
            grad_q, queries, grads, base, delta, rows, k, v, seen, dropped, batch, head // group, query, first,
            whole_first, scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
        )  # fmt: skip
    grad_q = _query_gradient(
        grad_q, queries, grads, base, delta, rows, k, v, seen, dropped, batch, head // group, query, whole_first,
        whole_end, scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, True,
    )  # fmt: skip
    grad_q = _query_gradient(
        grad_q, queries, grads, base, delta, rows, k, v, seen, dropped, batch, head // group, query, whole_end,
        end, scale, WIDTH, BLOCK, COLUMNS, CAUSAL, WINDOW, DOCUMENTS, DROP, ALIGNED, False,
    )  # fmt: skip
    _store(grad_q_to, batch, head, query, seen.s, grad_q * q_scale, WIDTH, BLOCK)


# -- launches


class Tiles(NamedTuple):
    """The tile sizes and options of a launch."""

    rows: int  # number of queries
    columns: int  # number of keys
    warps: int
    stages: int  # number of loads in flight


class TilePlan(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiles
    forward_dropout: Tiles  # for causal masks with dropout
    forward_full: Tiles  # for bidirectional masks, which have no diagonal, so larger tiles are faster
    backward_keys: Tiles
    backward_queries: Tiles


PLANS = {
    64: TilePlan(
        Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3)
    ),
    128: TilePlan(
        Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2)
    ),
    256: TilePlan(
        Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)
    ),
}
"""Head width, rounded up to a power of 2 -> the fastest tiles. Measured on an H200, up to width 128 also on an H100."""


class Problem(NamedTuple):
    """The arguments of an attention call that all three kernels use."""

    seen: Visibility
    dropped: DropoutValues | None
    keep: float  # probability that a weight survives dropout
    flags: dict[str, int]  # constants
    documents: tuple[torch.Tensor, torch.Tensor] | None  # documents of queries and of keys

    def bounded(self, tiles: Tiles, *, keys: bool) -> Visibility:
        """Return `seen` with the bounds of documents for tiles of queries, or for tiles of keys if `keys` is True."""
        if self.documents is None:
            return self.seen
        rows, columns = self.documents[::-1] if keys else self.documents
        size, step = (tiles.columns, tiles.rows) if keys else (tiles.rows, tiles.columns)
        return self.seen._replace(bounds=documents.bounds(rows, columns, size, step))


def _heads(x: torch.Tensor) -> Heads:
    return Heads(x, *x.stride()[:3])


def _last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(width: int) -> int:
    return max(16, next_power_of_2(width))


def _problem(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, plan: TilePlan) -> Problem:
    s, t, drop = q.shape[1], k.shape[1], mask.dropout
    numbers = None
    if mask.q_documents is not None and mask.k_documents is not None:
        numbers = _last(mask.q_documents), _last(mask.k_documents)
    low, high = mask.band(s, t)
    causal = mask.kind == "causal" and high is not None
    window = mask.window if low is not None or (mask.kind == "full" and high is not None) else None
    visibility = Visibility(s, t, mask.q_offset, window)
    if numbers is not None:
        q_documents, k_documents = numbers
        visibility = visibility._replace(
            q_documents=q_documents,
            q_stride=q_documents.stride(0),
            k_documents=k_documents,
            k_stride=k_documents.stride(0),
        )
    dropped, aligned, keep = None, False, 1.0
    if drop is not None:
        # With ALIGNED, two elements share a random draw. Every tile of keys must then start at a multiple of 16 columns
        # and must not contain the border between two runs of columns.
        early, border, late = drop.shifts()
        keys = _last(drop.keys)
        dropped = DropoutValues(
            keys, keys.stride(0), drop.site, drop.first_head, drop.threshold << 16, early, border, late, 0.0
        )
        aligned = early % 16 == late % 16 == 0 and (border >= t or all(border % tiles.columns == 0 for tiles in plan))
        keep = drop.keep
    flags = {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "DOCUMENTS": numbers is not None,
        "DROP": drop is not None,
        "ALIGNED": aligned,
        "WIDTH": q.shape[-1],
        "BLOCK": _block(q.shape[-1]),
    }
    return Problem(visibility, dropped, keep, flags, numbers)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `PartialAttention.forward`: return out [b, s, heads, d] in the inputs' dtype, and lse fp32 [b, heads,
    s]."""
    q, k, v = _last(q), _last(k), _last(v)
    b, s, heads, width = q.shape
    plan = PLANS[max(64, _block(width))]
    problem = _problem(q, k, mask, plan)
    tiles = plan.forward_dropout if problem.dropped else plan.forward
    tiles = tiles if problem.flags["CAUSAL"] else plan.forward_full
    out = torch.empty(b, s, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, s, dtype=torch.float32, device=q.device)
    if out.is_meta:
        observe.attention("ours", q, k, mask)
        return out, lse
    if hopper.applies(q, k, v, mask):
        hopper.forward(q, k, v, mask, out, lse)
        return out, lse
    _attention_forward[cdiv(s, tiles.rows), heads, b](
        _heads(q), _heads(k), _heads(v), _heads(out), lse, problem.bounded(tiles, keys=False), problem.dropped,
        LOG2E / math.sqrt(width), 1 / problem.keep, heads, heads // k.shape[2],
        ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages, **problem.flags,
    )  # fmt: skip
    return out, lse


def _empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    """Allocate d(q), d(k), d(v). If q, k, v are adjacent views of one tensor, so are their gradients, and the backward
    pass of `split_heads` need not concatenate them."""
    whole = joined(q, k, v)
    if whole is None:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return torch.empty_like(whole).split_with_sizes([q.shape[2], k.shape[2], v.shape[2]], 2)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `PartialAttention.backward`: return d(q), d(k), d(v) in the inputs' dtype."""
    grad, q, k, v, out, lse = _last(grad), _last(q), _last(k), _last(v), _last(out), lse.contiguous()
    b, s, heads, width = q.shape
    plan = PLANS[max(64, _block(width))]
    grads = _empty_gradients(q, k, v)
    if hopper.applies(q, k, v, mask) and hopper.loads(grad):
        hopper.backward(grad, q, k, v, out, lse, mask, grads)
        return grads[0], grads[1], grads[2]
    problem, scale = _problem(q, k, mask, plan), LOG2E / math.sqrt(width)
    base, delta = (torch.empty(b, heads, s, dtype=torch.float32, device=q.device) for _ in range(2))
    rows = torch.empty(b, heads, s, dtype=torch.int64, device=q.device) if problem.dropped else None
    if q.is_meta:
        observe.attention("ours", q, k, mask, backward=True)
        return grads[0], grads[1], grads[2]
    _attention_prepare[cdiv(s, 64), heads, b](
        _heads(out), _heads(grad), lse, base, delta, rows, problem.seen, problem.dropped, problem.keep, heads,
        ROWS=64, **{name: problem.flags[name] for name in ("WIDTH", "BLOCK", "DROP")},
    )  # fmt: skip
    views = _heads(q), _heads(k), _heads(v), _heads(grad)
    tiles = plan.backward_keys
    _attention_backward_keys[cdiv(k.shape[1], tiles.columns), k.shape[2], b](
        *views, _heads(grads[1]), _heads(grads[2]), base, delta, rows, problem.bounded(tiles, keys=True),
        problem.dropped, scale, 1 / problem.keep / math.sqrt(width), 1 / problem.keep, heads, heads // k.shape[2],
        ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages, **problem.flags,
    )  # fmt: skip
    tiles = plan.backward_queries
    _attention_backward_queries[cdiv(s, tiles.rows), heads, b](
        *views, _heads(grads[0]), base, delta, rows, problem.bounded(tiles, keys=False), problem.dropped,
        scale, 1 / problem.keep / math.sqrt(width), heads, heads // k.shape[2],
        ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages, **problem.flags,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


# -- the ops


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[AttentionMask], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        out, lse = forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.state = mask
        return out

    @staticmethod
    def backward(ctx: FunctionContext[AttentionMask], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(grad, q, k, v, out, lse, ctx.state), None


def applies(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether to use these kernels, that is, whether they support the attention call but torch's faster cuDNN kernels
    do not."""
    return (
        mask.simple_kind(q.shape[1], k.shape[1]) is None
        and q.element_size() == 2
        and q.shape[-1] <= max(PLANS)
        and mask.softcap is None
        and (mask.dropout is None or mask.dropout.rule == RULE)
    )


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Compute `ops.attention.plain` without saving attention weights. cuDNN's kernels are used if they apply, otherwise
    these kernels, otherwise torch's. For short rows, hopper.cu precedes cuDNN."""
    if cudnn.applies(q, k, mask) and (out := cudnn.attention(q, k, v, mask)) is not None:
        return out
    if applies(q, k, mask) or (hopper.is_short(mask, q.shape[1], q.shape[-1]) and hopper.applies(q, k, v, mask)):
        return _Attention.apply(q, k, v, mask)  # type: ignore[no-any-return]
    return fused_recomputing(q, k, v, mask)


def _partial_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    return (forward if applies(q, k, mask) else FUSED.forward)(q, k, v, mask)


def _partial_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (backward if applies(q, k, mask) else FUSED.backward)(grad, q, k, v, out, lse, mask)  # type: ignore[no-any-return]


PARTIAL = PartialAttention(_partial_forward, _partial_backward)
