"""Paged attention: sequences attend to keys and values that are stored in the blocks of a cache.

A run consists of the tokens that are computed for one sequence in a step. The runs of a step are concatenated without
padding. The keys of a sequence, including the keys of its run, are stored in blocks of a pool; row i of `tables` lists
the blocks of sequence i in order:

    starts   0 1 2 6        three runs, of 1, 1 and 4 tokens
    lengths  9 3 4          number of keys of each sequence; the last token of a run sees all keys
    tables   [[7, 2, 5], [1, 0, 0], [4, 0, 0]]          blocks have 4 keys: key 8 of sequence 0 is key 0 of block 5

PLAIN       pads runs of similar length to equal length and uses torch's kernels, on any device and for any dtype. On
            CUDA, kernels/paged_attention.py handles ragged runs without padding
INVARIANT   handles every token separately, with keys in splits of constant size, so the result is bitwise independent
            of the other runs of the step

PLAIN and INVARIANT take q [tokens, heads, d] and a pool [blocks, block, 2, kv_heads, d] with keys at index 0 and values
at index 1 of dim 2, and return [tokens, heads x d]. `attend` takes the pool as [blocks, block x 2 x kv_heads x d].
Query head i uses key/value head i // (heads / kv_heads). This module does not depend on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from mega.core.device import sent
from mega.core.ops.few_rows import plain_place
from mega.core.ops.heads import Rotary
from mega.core.ops.norm import accurate
from mega.core.ops.trial import Agree, alone, error_of, passes

SPLIT = 256
"""Number of keys in one split of INVARIANT; a multiple of every block size."""

Integers = NDArray[np.int64]


class PaddedRuns(NamedTuple):
    """Neighbouring runs of a step, each padded to `seq` tokens."""

    tokens: slice
    """Range of these runs' tokens among all tokens of the step."""
    batch: int
    """Number of runs."""
    seq: int
    """Number of tokens in a padded run."""
    pad: torch.Tensor | None
    """int64 [batch x seq]: the token at each padded position; None if the runs need no padding."""
    back: torch.Tensor | None
    """int64 [tokens]: the padded position of each token; None if the runs need no padding."""
    rows: torch.Tensor
    """int64 [batch x width]: the blocks of all runs."""
    held: torch.Tensor
    """Memory into which each layer gathers the blocks of `rows`."""
    k: torch.Tensor
    """The gathered keys, a view of `held`: [batch, kv_heads, keys, d]."""
    v: torch.Tensor
    """The gathered values, a view of `held`: [batch, kv_heads, keys, d]."""
    bias: torch.Tensor
    """Additive mask [batch, 1, seq x repeats or 1, keys]: 0 if a query sees a key, otherwise -inf."""


class TokenKeys(NamedTuple):
    """The locations of the keys of every token, for INVARIANT."""

    tables: torch.Tensor  # int64 [tokens, width]: the blocks of the token's sequence
    positions: torch.Tensor  # int64 [tokens]: the token's position
    shape: tuple[int, int, int]  # the sizes (block, kv_heads, d) of the pool
    window: int | None  # maximum number of keys that a token sees, including its own key


@dataclass(frozen=True)
class PagedAttention:
    """An implementation of paged attention."""

    pages: Callable[[Integers, Integers, Integers, torch.Tensor, int, int | None], Any]
    """pages(counts, lengths, tables, pool, repeats, window) -> the locations of the keys of a step's tokens, computed
    once for all layers. counts, lengths and tables are on the host: counts int64 [runs] is the number of tokens of each
    run; lengths and tables are described in the module's docstring. repeats: number of query heads per key/value head.
    window: maximum number of keys that a token sees, including its own key."""
    attend: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """attend(q, pool, pages) -> softmax(q k' / sqrt(d)) v over the keys that each token sees."""
    graphs: bool = False
    """Whether the kernels for runs of one token can be captured in a CUDA graph. In this case, the launches depend only
    on the number of runs and the width of `tables`. Each replay reads the tensors `tables` and `lengths`, which are
    attributes of the pages."""
    attend_new: Callable[[torch.Tensor, Rotary | None, torch.Tensor, Any], torch.Tensor | None] | None = None
    """attend_new(fused, rotary, pool, pages): rotate queries and keys, store the new keys and values in the pool, and
    attend. fused [tokens, heads + 2 kv_heads, d] contains queries, keys and values. Returns None if the caller must use
    `FewRows.place` and `attend` instead."""
    ragged: RaggedGraph | None = None
    """Object that builds the pages of runs of any length for a CUDA graph; None if graphs support only runs of one
    token."""


@dataclass(frozen=True)
class RaggedGraph:
    """Functions that build the pages of runs of several tokens for a CUDA graph, which is captured only once."""

    most_tiles: Callable[[int, int], int]
    """most_tiles(tokens, runs) -> the maximum number of tiles for this number of tokens and runs."""
    tiles: Callable[[Integers, Integers], Integers]
    """tiles(counts, lengths) -> int64 [tiles, 4], for a step's runs after the leading runs of one token."""
    pages: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int | None], Any]
    """pages(lengths, tables, tiles, pool, window) -> pages, with all tensors on the device. `lengths`, int64 [runs], is
    0 except for leading runs of one token; tables int64 [runs, width]; tiles are the result of `tiles`, padded with
    zeros."""


# -- plain


def padded_pages(
    counts: Integers,
    lengths: Integers,
    tables: Integers,
    pool: torch.Tensor,
    repeats: int,
    window: int | None = None,
) -> list[PaddedRuns]:
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    pages: list[PaddedRuns] = []
    for first, end in _alike(counts.tolist()):
        tokens, part = slice(starts[first], starts[end]), slice(first, end)
        pages.append(_padded_runs(tokens, counts[part], lengths[part], tables[part], pool, repeats, window))
    return pages


def _padded_runs(
    tokens: slice,
    counts: Integers,
    lengths: Integers,
    tables: Integers,
    pool: torch.Tensor,
    repeats: int,
    window: int | None,
) -> PaddedRuns:
    batch, block, device = len(counts), pool.shape[1], pool.device
    width = -(-int(lengths.max()) // block)
    memory = pool.new_empty(batch * width, pool[0].numel())
    k, v = memory.view(batch, -1, *pool.shape[2:]).transpose(1, 3).unbind(2)
    pad, back, bias_array = _padding(counts, lengths, width * block, window)
    bias = sent(bias_array, device).to(pool.dtype)[:, None]
    if bias.shape[2] > 1 and repeats > 1:
        bias = bias.repeat(1, 1, repeats, 1)
    return PaddedRuns(
        tokens,
        batch,
        int(counts.max()),
        None if pad is None else sent(pad, device),
        None if back is None else sent(back, device),
        sent(tables[:, :width].reshape(-1), device),
        *(memory, k, v, bias),
    )


def _alike(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each group of neighbouring runs that are padded to the same length. A group contains only
    runs of one token, or runs whose lengths differ by less than a factor of 2.

    >>> list(_alike([1, 1, 4, 5, 8, 20]))
    [(0, 2), (2, 4), (4, 5), (5, 6)]
    """
    first = 0
    least = most = counts[0]
    for number, count in enumerate(counts[1:], start=1):
        least, most = min(least, count), max(most, count)
        if (least == 1) != (most == 1) or most >= 2 * least > 2:
            yield first, number
            first, least, most = number, count, count
    yield first, len(counts)


def _padding(
    counts: Integers, lengths: Integers, keys: int, window: int | None
) -> tuple[Integers | None, Integers | None, NDArray[np.float32]]:
    """Return `pad`, `back` (see `PaddedRuns`) and the bias [batch, seq, keys] of neighbouring runs. Padding repeats a
    run's last token."""
    seq, columns = int(counts.max()), np.arange(keys)
    offset = np.minimum(np.arange(seq), counts[:, None] - 1) if seq > 1 else 0
    positions = (lengths - counts)[:, None] + offset
    visible = columns <= positions[..., None]
    if window is not None:
        visible &= columns > positions[..., None] - window
    bias = np.where(visible, np.float32(0), np.float32(-np.inf))
    if seq == 1 or int(counts.min()) == seq:
        return None, None, bias
    starts = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(run)) - np.repeat(starts, counts)
    return (starts[:, None] + offset).reshape(-1), run * seq + within, bias


def padded_attention(
    q: torch.Tensor, pool: torch.Tensor, pages: list[PaddedRuns], softcap: float | None = None
) -> torch.Tensor:
    if len(pages) == 1:
        return _padded(q, pool, pages[0], softcap)
    parts = q.split_with_sizes([runs.tokens.stop - runs.tokens.start for runs in pages])
    return torch.cat([_padded(part, pool, runs, softcap) for part, runs in zip(parts, pages, strict=True)])


def _padded(q: torch.Tensor, pool: torch.Tensor, runs: PaddedRuns, softcap: float | None) -> torch.Tensor:
    batch, seq, (_, kv_heads, _, width) = runs.batch, runs.seq, runs.k.shape
    if runs.pad is not None:
        q = q.index_select(0, runs.pad)
    torch.index_select(pool, 0, runs.rows, out=runs.held)
    # The query heads of a key/value head form the rows of one matrix, so the keys of this head are read only once.
    if seq == 1:
        q = q.reshape(batch, kv_heads, -1, width)
        return _weighted(q, runs, softcap).reshape(batch, -1)
    q = q.reshape(batch, seq, kv_heads, -1, width).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
    out = _weighted(q, runs, softcap)
    out = out.view(batch, kv_heads, -1, seq, width).permute(0, 3, 1, 2, 4).reshape(batch * seq, -1)
    return out if runs.back is None else out.index_select(0, runs.back)


def _weighted(q: torch.Tensor, runs: PaddedRuns, softcap: float | None) -> torch.Tensor:
    """Compute attention for padded queries [batch, kv_heads, rows, d]. With a soft cap, scores are computed explicitly,
    because torch's kernels have no soft cap."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, runs.k, runs.v, attn_mask=runs.bias)
    scores = (q @ runs.k.transpose(-1, -2)).to(accurate(q.dtype)) / math.sqrt(q.shape[-1])
    return (softcap * torch.tanh(scores / softcap) + runs.bias).softmax(-1).to(q.dtype) @ runs.v


# -- invariant


def token_pages(
    counts: Integers, lengths: Integers, tables: Integers, pool: torch.Tensor, repeats: int, window: int | None = None
) -> TokenKeys:
    block = pool.shape[1]
    assert SPLIT % block == 0, (SPLIT, block)
    width = -(-int(lengths.max()) // SPLIT) * (SPLIT // block)
    padded = np.zeros((len(tables), max(width, tables.shape[1])), dtype=np.int64)
    padded[:, : tables.shape[1]] = tables
    run = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = sent((lengths - counts)[run] + within, pool.device)
    return TokenKeys(sent(padded[run, :width], pool.device), positions, (block, *pool.shape[3:]), window)


def split_attention(
    q: torch.Tensor, pool: torch.Tensor, pages: TokenKeys, softcap: float | None = None
) -> torch.Tensor:
    """Compute attention with an online softmax over splits of SPLIT keys. A split without visible keys does not change
    the result."""
    tokens, block, kv_heads, width = len(q), *pages.shape
    sum_dtype = accurate(q.dtype)
    q = q.reshape(tokens, kv_heads, -1, width)
    largest = torch.full((*q.shape[:-1], 1), -1e30, dtype=sum_dtype, device=q.device)
    total, output = torch.zeros_like(largest), torch.zeros(q.shape, dtype=sum_dtype, device=q.device)
    # Splits have constant size and are merged one after the other, so the order of summation does not depend on other
    # sequences.
    for number, blocks in enumerate(pages.tables.split(SPLIT // block, dim=1)):
        gathered = pool.index_select(0, blocks.flatten()).view(tokens, SPLIT, 2, kv_heads, width)
        k, v = gathered.transpose(1, 3).unbind(2)
        columns = torch.arange(number * SPLIT, (number + 1) * SPLIT, device=q.device)
        visible = columns <= pages.positions[:, None]
        if pages.window is not None:
            visible &= columns > pages.positions[:, None] - pages.window
        scores = (q @ k.transpose(-1, -2)).to(sum_dtype) / math.sqrt(width)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, None, None], -math.inf)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, scale = (scores - new).exp(), (largest - new).exp()
        total = total * scale + weights.sum(-1, keepdim=True)
        output = output * scale + (weights.to(v.dtype) @ v).to(sum_dtype)
        largest = new
    return (output / total).to(q.dtype).reshape(tokens, -1)


PLAIN = PagedAttention(padded_pages, padded_attention)
INVARIANT = PagedAttention(token_pages, split_attention)


def softcapped(softcap: float, *, invariant: bool) -> PagedAttention:
    """Return a variant of PLAIN or INVARIANT that replaces each score s with softcap x tanh(s / softcap)."""
    if invariant:
        return PagedAttention(token_pages, partial(split_attention, softcap=softcap))
    return PagedAttention(padded_pages, partial(padded_attention, softcap=softcap))


def trusted(
    attention: PagedAttention, pool: torch.Tensor, repeats: int, window: int | None, agree: Agree = alone
) -> PagedAttention:
    """Return `attention` if, on all ranks that call `agree`, its results equal those of PLAIN on a small pool with the
    shape and dtype of `pool`; otherwise return PLAIN. A rank whose results differ logs a warning."""
    if attention is PLAIN:
        return attention
    block, numbers = pool.shape[1], torch.arange(4 * pool[0].numel(), device=pool.device, dtype=torch.float32)
    values = (numbers * 0.7).sin().to(pool.dtype).view(4, *pool.shape[1:])
    q = values.flatten(0, 1)[:2, 0].repeat(1, repeats, 1)
    cos = q[:, 0, : q.shape[2] // 4].float().contiguous()
    angles = cos, cos * 0.5
    counts, lengths, tables = np.ones(2, np.int64), np.array([1, 3 * block - 1]), np.array([[2, 0, 0], [3, 0, 1]])

    long_runs = np.array([1, 2 * block - 1]), np.array([1, 3 * block - 1]), tables

    def done(each: PagedAttention) -> list[torch.Tensor]:
        pool = values.clone()
        pages = each.pages(counts, lengths, tables, pool, repeats, window)
        out, fused = each.attend(q, pool.flatten(1), pages), torch.cat([q, pool[:2, 0].flatten(1, 2)], 1)
        new = None if each.attend_new is None else each.attend_new(fused, angles, pool.flatten(1), pages)
        if new is None:
            last = torch.tensor([2 * block, 2 * block - 2], device=pool.device)
            plain_place(fused, angles, pool.view(-1, *fused[:, q.shape[1] :].shape[1:]), last, q.shape[1])
            new = each.attend(fused[:, : q.shape[1]], pool.flatten(1), pages)
        run = q[:1].repeat(2 * block, 1, 1)
        many = each.attend(run, pool.flatten(1), each.pages(*long_runs, pool, repeats, window))
        return [out, new, many, pool]

    def error() -> float:
        return error_of(done(attention), done(PLAIN))

    instead = "attention to the cache takes torch's kernels: ours"
    return attention if passes(error, pool.dtype, instead, agree) else PLAIN
