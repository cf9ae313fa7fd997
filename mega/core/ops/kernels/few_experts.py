"""Mixture-of-experts layers for few tokens: the choice of experts, and GEMMs that read only the weights of chosen
experts.

For one token, four kernels run:

    router    norm and logits, by few_rows.py
    choose    the experts, and the norm for the experts
    up        gate and up projection, activation, and factor of the choice; a program computes some hidden channels of
              one choice
    down      the sum over all choices, added to the residual; a program computes some outputs

For several tokens, one program per token chooses the token's experts, and one program per expert lists the choices of
the expert. Then GEMMs on tensor cores multiply each expert's weights with the rows of its choices, and one program per
token sums the token's outputs. The weights of experts without tokens are not read. The host never waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mega.core.ops.few_experts import ExpertRule, ExpertWeights, FewExperts, simple
from mega.core.ops.few_rows import NormOf
from mega.core.ops.kernels.activation import KINDS, value
from mega.core.ops.kernels.few_rows import MOST_INS, RowTile, _at_once, _weights, cut
from mega.core.ops.kernels.few_rows import linear as row_linear
from mega.core.ops.kernels.language import (
    after_kernel,
    before_next,
    cdiv,
    in_turn,
    jit,
    launch,
    next_power_of_2,
    overlapping,
    tl,
)
from mega.core.ops.kernels.norm import add_norm
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import NormForm

MOST_TOKENS = 128
"""Maximum number of tokens; for more tokens, grouped GEMMs over sorted rows are used."""
MOST_EXPERTS = 256
"""Maximum number of experts. The limit exists because a program compares all pairs of logits."""
MOST_CHOICES = 2048
"""Maximum number of choices of all tokens together. The limit exists because a program reads all choices."""
AT_ONCE = 8192
"""Maximum number of inputs of `down` that a program loads in one tile."""
BLOCK = 1024
"""Number of columns that one program sums."""


class ExpertTile(NamedTuple):
    """The tile that one program of a GEMM computes."""

    rows: int  # number of choices
    outs: int  # number of outputs
    chunk: int  # number of inputs multiplied at once
    stages: int  # number of chunks whose weights are in flight
    warps: int


@jit
def _ranks(logits_at, count, BLOCK: tl.constexpr):
    """Return the logits of one token, and the rank of each expert by logit, where the largest logit has rank 0. Ties
    are broken by the lower index."""
    number = tl.arange(0, BLOCK)
    logits = tl.load(logits_at + number, number < count, float("-inf"))
    # NaN is ordered like -inf, so that each expert has a different rank.
    order = tl.where(logits == logits, logits, float("-inf"))
    larger = order[None, :] > order[:, None]
    larger |= (order[None, :] == order[:, None]) & (number[None, :] < number[:, None])
    return logits, tl.sum(larger.to(tl.int32), 1)


@jit
def _factors(logits, ranks, scale, K: tl.constexpr, NORMALIZE: tl.constexpr):
    """Return the factors by which the outputs of experts are multiplied if the experts are chosen."""
    shares = tl.exp(logits - tl.max(logits, 0))
    counted = tl.where(ranks < K, shares, 0.0) if NORMALIZE else shares
    return shares / tl.sum(counted, 0) * scale


@jit
def _activated(y, up, GATE: tl.constexpr, KIND: tl.constexpr):
    if GATE:
        y = y * tl.sigmoid(y) * up
    elif KIND >= 0:
        y = value(y, KIND)
    return y


@jit
def _up_row(
    x_at, chosen_at, factors_at, up_at, hidden_at, first, local, width, ins,
    OUTS: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr, EVEN: tl.constexpr, GATE: tl.constexpr,
    KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # The calls are in this order so that the choice is complete before the next kernel starts.
        after_kernel()
        before_next()
    tiles = tl.cdiv(width, OUTS)
    choice = tl.program_id(0) // tiles
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    expert, factor = tl.load(chosen_at + choice) - first, tl.load(factors_at + choice)
    is_local = (expert >= 0) & (expert < local)
    row = tl.where(is_local, expert, 0).to(tl.int64) * (2 * width if GATE else width) + out
    row_at = up_at + row[:, None] * ins
    y, up = _at_once(
        x_at, row_at, row_at + width.to(tl.int64) * ins, None, None, (out < width) & is_local, ins, 0.0, CHUNK, REST,
        EVEN, False, False, False, GATE, False,
    )  # fmt: skip
    y = _activated(y, up, GATE, KIND) * factor
    tl.store(hidden_at + choice * width + out, y.to(hidden_at.dtype.element_ty), out < width)


@jit
def _down_row(
    hidden_at, chosen_at, down_at, y_at, first, local, width, outs,
    K: tl.constexpr, KS: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum the outputs of one token's choices. WHOLE: whether to load the weights of all K choices in one tile, while
    `up` still runs. KS: K, rounded up to a power of 2."""
    if OVERLAP:
        before_next()
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    if WHOLE:
        choice, part = tl.arange(0, KS), tl.arange(0, CHUNK)
        expert = tl.load(chosen_at + choice, choice < K, -1) - first
        is_local = (expert >= 0) & (expert < local) & (choice < K)
        row = tl.where(is_local, expert, 0).to(tl.int64)[None, :] * outs + out[:, None]
        mask = (is_local[None, :] & (out < outs)[:, None])[:, :, None] & (part < width)[None, None, :]
        weights = tl.load(
            down_at + row[:, :, None] * width + part[None, None, :], mask, 0.0, eviction_policy="evict_first"
        )
        if OVERLAP:
            after_kernel()
        in_row = (choice < K)[:, None] & (part < width)[None, :]
        hidden = tl.load(hidden_at + choice[:, None] * width + part[None, :], in_row, 0.0).to(tl.float32)
        y = tl.sum(tl.sum(weights.to(tl.float32) * hidden[None, :, :], 2), 1)
    else:
        if OVERLAP:
            after_kernel()
        total = tl.zeros([OUTS, CHUNK // 8], tl.float32)
        chunks = tl.cdiv(width, CHUNK)
        for number in tl.range(0, K * chunks, num_stages=STAGES):
            choice, part = number // chunks, number % chunks * CHUNK + tl.arange(0, CHUNK)[None, :]
            expert = tl.load(chosen_at + choice) - first
            is_local = (expert >= 0) & (expert < local)
            row = tl.where(is_local, expert, 0).to(tl.int64) * outs + out
            weights = _weights(down_at + row[:, None] * width, part, (out < outs) & is_local, width, EVEN)
            hidden = tl.load(hidden_at + choice * width + part, part < width, 0.0).to(tl.float32)
            total += tl.sum(tl.reshape(weights.to(tl.float32) * hidden, (OUTS, CHUNK // 8, 8)), 2)
        y = tl.sum(total, 1)
    if ADD:
        y += tl.load(y_at + out, out < outs, 0.0).to(tl.float32)
    tl.store(y_at + out, y.to(y_at.dtype.element_ty), out < outs)


@jit
def _norm_row(
    x_at, weight_at, bias_at, normed_at, width, eps, CENTRED: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr
):
    part = tl.arange(0, WIDTH)
    mask = part < width
    x = tl.load(x_at + part, mask, 0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(mask, x - tl.sum(x, 0) / width, 0.0)
    factor = tl.load(weight_at + part, mask, 0.0).to(tl.float32)
    if OFFSET:
        factor += 1.0
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * factor
    if CENTRED:
        y += tl.load(bias_at + part, mask, 0.0).to(tl.float32)
    tl.store(normed_at + part, y.to(normed_at.dtype.element_ty), mask)


@jit
def _choose(
    logits_at, chosen_at, factors_at, x_at, weight_at, bias_at, normed_at, tokens, count, width, scale, eps,
    K: tl.constexpr, NORMALIZE: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. NORM: whether an additional program normalises x, which is then a single
    token."""
    in_turn(OVERLAP)
    token = tl.program_id(0)
    if token < tokens:
        number = tl.arange(0, BLOCK)
        logits, ranks = _ranks(logits_at + token * count, count, BLOCK)
        factors = _factors(logits, ranks, scale, K, NORMALIZE)
        # A NaN among the logits makes all factors of the token NaN.
        tl.store(chosen_at + token * K + ranks, number, ranks < K)
        tl.store(factors_at + token * K + ranks, factors, ranks < K)
    elif NORM:
        _norm_row(x_at, weight_at, bias_at, normed_at, width, eps, CENTRED, OFFSET, WIDTH)


@jit
def _list(chosen_at, rows_at, counts_at, choices, tokens, first, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """List the indices of the choices that select one expert, in order, and count these choices."""
    in_turn(OVERLAP)
    expert = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    is_chosen = tl.load(chosen_at + number, number < choices, -1) == expert + first
    position = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(rows_at + expert * tokens + position, number, is_chosen & (position < tokens))
    tl.store(counts_at + expert, tl.minimum(tl.sum(is_chosen.to(tl.int32), 0), tokens))


@jit
def _multiply(
    x_at, weight_at, rows_at, counts_at, factors_at, y_at, tokens, outs, ins,
    K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    UP: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one expert's outputs [choices, outs], for the choices that select this expert.

    UP: x has a row per token, and outputs are activated and multiplied by the factors of the choices. Otherwise, x has
    a row per choice.
    """
    in_turn(OVERLAP)
    tiles = tl.cdiv(outs, OUTS)
    expert = tl.program_id(0) // tiles
    out = tl.program_id(0) % tiles * OUTS + tl.arange(0, OUTS)
    count = tl.load(counts_at + expert)
    real_out = out < outs
    weight_row = expert.to(tl.int64) * (2 * outs if GATE else outs) + out
    weight_at += tl.where(real_out, weight_row, 0)[:, None] * ins
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        real = row < count
        choice = tl.load(rows_at + expert * tokens + row, real, 0)
        x_row = x_at + (choice // K if UP else choice).to(tl.int64)[None, :] * ins
        y = tl.zeros([OUTS, ROWS], tl.float32)
        up = tl.zeros([OUTS, ROWS], tl.float32)
        for start in tl.range(0, ins, CHUNK, num_stages=STAGES):
            part = start + tl.arange(0, CHUNK)
            x = tl.load(x_row + part[:, None], (part < ins)[:, None], 0.0)
            y = tl.dot(tl.load(weight_at + part[None, :], (part < ins)[None, :], 0.0), x, y)
            if GATE:
                up_at = weight_at + outs.to(tl.int64) * ins
                up = tl.dot(tl.load(up_at + part[None, :], (part < ins)[None, :], 0.0), x, up)
        if UP:
            y = _activated(y, up, GATE, KIND) * tl.load(factors_at + choice, real, 0.0)[None, :]
        at = y_at + choice.to(tl.int64)[None, :] * outs + out[:, None]
        tl.store(at, y.to(y_at.dtype.element_ty), real[None, :] & real_out[:, None])


@jit
def _sum_choices(
    rows_at, chosen_at, y_at, width, first, local,
    K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum the outputs of one token's choices. Choices of experts on other ranks have no outputs."""
    in_turn(OVERLAP)
    blocks = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        expert = tl.load(chosen_at + token * K + choice) - first
        is_local = (expert >= 0) & (expert < local)
        row_at = rows_at + (token * K + choice).to(tl.int64) * width
        total += tl.load(row_at + column, (column < width) & is_local, 0.0).to(tl.float32)
    y_at += token.to(tl.int64) * width
    if ADD:
        total += tl.load(y_at + column, column < width, 0.0).to(tl.float32)
    tl.store(y_at + column, total.to(y_at.dtype.element_ty), column < width)


def takes(tokens: int, weights: ExpertWeights, rule: ExpertRule) -> bool:
    """Return whether `run` supports this case."""
    count, ins = weights.router.shape
    if not simple(rule.router) or weights.up.element_size() != 2 or rule.activation not in (*KINDS, "swiglu"):
        return False
    fits = tokens <= MOST_TOKENS and tokens * rule.chosen <= MOST_CHOICES and count <= MOST_EXPERTS
    even = ins % 8 == 0 and weights.down.shape[1] % 8 == 0
    return fits and even and ins <= MOST_INS and all(each.is_contiguous() for each in weights[:3])


def up_tile(width: int, ins: int, gate: bool) -> RowTile:
    """Return the tile of `up` for one token, with about 32 KB of weights."""
    outs = max(1, 16384 // (next_power_of_2(ins) * (1 + gate)))
    return RowTile(min(outs, 8), 4)


def down_tile(chosen: int, width: int) -> RowTile:
    """Return the tile of `down` for one token. The tile's `chunk` is 0 if the weights of all choices are loaded at
    once."""
    block = next_power_of_2(chosen) * next_power_of_2(width)
    return RowTile(max(1, 16384 // block), 4) if block <= AT_ONCE else RowTile(8, 4, 1024, 3)


def expert_tile(tokens: int, chosen: int, experts: int) -> ExpertTile:
    """Return the tile of a GEMM for several tokens. `rows` is about twice the mean number of choices of an expert."""
    rows = next_power_of_2(cdiv(2 * tokens * chosen, experts))
    return ExpertTile(min(max(rows, 16), 64), 64, 128, 4, 4)


def run(
    x: torch.Tensor,
    weights: ExpertWeights,
    rule: ExpertRule,
    norm: NormOf | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement `FewExperts.run`."""
    y = torch.empty(x.shape, dtype=weights.up.dtype, device=x.device) if into is None else into
    assert y.is_contiguous() and y.shape == x.shape
    return (_one_token if len(x) == 1 else _several)(x.contiguous(), weights, rule, norm, y, into is not None)


def _one_token(
    x: torch.Tensor, weights: ExpertWeights, rule: ExpertRule, norm: NormOf | None, y: torch.Tensor, add: bool
) -> torch.Tensor:
    (count, ins), width, k = weights.router.shape, weights.down.shape[1], rule.chosen
    gate, first, local = rule.activation == "swiglu", weights.experts.start, len(weights.experts)
    logits = row_linear(x, Factor(weights.router, None), norm, tile=RowTile(1, 4), dtype=torch.float32)
    x, chosen, factors = _choice(x, logits, rule, norm)
    hidden = torch.empty(k, width, dtype=weights.up.dtype, device=x.device)
    tile, (chunk, rest), able = up_tile(width, ins, gate), cut(ins), overlapping(x.device)
    launch(
        _up_row, (k * cdiv(width, tile.outs),), x, chosen, factors, weights.up, hidden, first, local, width, ins,
        OUTS=tile.outs, CHUNK=chunk, REST=rest, EVEN=local == count and width % tile.outs == 0 and chunk + rest == ins,
        GATE=gate, KIND=-1 if gate else KINDS[rule.activation], num_warps=tile.warps, **able,
    )  # fmt: skip
    tile = down_tile(k, width)
    chunk = tile.chunk or next_power_of_2(width)
    launch(
        _down_row, (cdiv(ins, tile.outs),), hidden, chosen, weights.down, y, first, local, width, ins, K=k,
        KS=next_power_of_2(k), OUTS=tile.outs, CHUNK=chunk, WHOLE=not tile.chunk, STAGES=tile.stages,
        EVEN=local == count and ins % tile.outs == 0 and width % chunk == 0, ADD=add, num_warps=tile.warps, **able,
    )  # fmt: skip
    return y


def _choice(
    x: torch.Tensor, logits: torch.Tensor, rule: ExpertRule, norm: NormOf | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalized x, the chosen experts int32 [t, k], and their factors fp32 [t, k]. norm: None, or the norm
    of a single token."""
    (tokens, count), k, width = logits.shape, rule.chosen, x.shape[1]
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    factors = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    normed = x if norm is None else torch.empty(x.shape, dtype=norm.weight.dtype, device=x.device)
    weight, bias, eps, form = (None, None, 0.0, NormForm()) if norm is None else norm
    launch(
        _choose, (tokens + (norm is not None),), logits, chosen, factors, x, weight, bias, normed, tokens, count, width,
        float(rule.router.scale), eps, K=k, NORMALIZE=rule.router.normalize, NORM=norm is not None,
        CENTRED=bias is not None, OFFSET=form.offset, WIDTH=next_power_of_2(width), BLOCK=next_power_of_2(count),
        num_warps=8, **overlapping(x.device),
    )  # fmt: skip
    return normed, chosen, factors


def _several(
    x: torch.Tensor, weights: ExpertWeights, rule: ExpertRule, norm: NormOf | None, y: torch.Tensor, add: bool
) -> torch.Tensor:
    (count, ins), width, k = weights.router.shape, weights.down.shape[1], rule.chosen
    tokens, gate, first, local = len(x), rule.activation == "swiglu", weights.experts.start, len(weights.experts)
    if norm is not None:
        x = add_norm(x, None, None, None, *norm)[1]
    x = x.to(weights.up.dtype)
    if x.is_cuda and weights.router.dtype == x.dtype:
        logits = torch.mm(x, weights.router.t(), out_dtype=torch.float32)
    else:
        logits = x.float() @ weights.router.float().t()
    _, chosen, factors = _choice(x, logits, rule, None)
    able, choices = overlapping(x.device), tokens * k
    rows, counts = (torch.empty(shape, dtype=torch.int32, device=x.device) for shape in ((local, tokens), (local,)))
    launch(_list, (local,), chosen, rows, counts, choices, tokens, first, BLOCK=next_power_of_2(choices), **able)
    tile, partial = expert_tile(tokens, k, count), torch.empty(choices, ins, dtype=x.dtype, device=x.device)
    hidden = torch.empty(choices, width, dtype=x.dtype, device=x.device)
    for given, weight, out, outs, inner, is_up in (
        (x, weights.up, hidden, width, ins, True),
        (hidden, weights.down, partial, ins, width, False),
    ):
        launch(
            _multiply, (local * cdiv(outs, tile.outs),), given, weight, rows, counts, factors, out, tokens, outs, inner,
            K=k, ROWS=tile.rows, OUTS=tile.outs, CHUNK=tile.chunk, STAGES=tile.stages, UP=is_up, GATE=gate and is_up,
            KIND=KINDS[rule.activation] if is_up and not gate else -1, num_warps=tile.warps, **able,
        )  # fmt: skip
    launch(
        _sum_choices, (tokens * cdiv(ins, BLOCK),), partial, chosen, y, ins, first, local, K=k, ADD=add, BLOCK=BLOCK,
        **able,
    )  # fmt: skip
    return y


FEW_EXPERTS = FewExperts(takes, run)
