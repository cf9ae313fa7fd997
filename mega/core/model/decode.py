"""One step of continuing text on a stage of a decoder: what its modules compute, on plain tensors.

Between the operations of a small model lies more work than in them. Here the weights and ops of a stage are put
together once, without what a step does not need: modules, gradients, dropout, sequence parallelism, ZeRO. A step takes
tensors whose shapes follow from the number of tokens alone and waits for nothing on the host, so a graph can hold it.
Where the ops have kernels for few rows, and a block is the usual one, these do all but the attention itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import torch

from mega.core.model.block import Attention, Block, FeedForward, Norm
from mega.core.model.decoder import DecoderStage, Head
from mega.core.model.embedding import Embedding
from mega.core.ops.few_rows import FewRows, NormOf, Place, trusted
from mega.core.ops.heads import Rotary
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import rms_norm_by
from mega.core.ops.rotary import rotate
from mega.core.ops.suite import Ops
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.one_shot import Sum, by_group
from mega.core.parallel.vocab import logits

Branch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The residual stream [tokens, h], the branch that is still to be added, and its bias."""


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens. rotary: cos and sin of all positions as the stage's ops take them, or None."""

    @property
    def rotary(self) -> Rotary | None: ...

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Keep keys and values [tokens, 2 kv_heads, d] of one layer's new tokens; what q [tokens, heads, d] of the same
        tokens make of all that they see, [tokens, heads x d]."""

    def attend_new(self, layer: int, fused: torch.Tensor, rotary: Rotary | None, place: Place) -> torch.Tensor:
        """The same of fused [tokens, heads + 2 kv_heads, d], queries and keys not turned yet. place: of `FewRows`."""


class DecodeStep:
    """step(ids, positions, wanted, cache, *cargo) on a stage whose weights stay where they are.

    ids, positions: int64 [tokens], the next of any sequences. Gives what the next stage is given, [tokens, h]; on the
    last stage the logits of the tokens `wanted`, int64 [w], as [w, ids of this rank]. sum_ranks: adds up what the
    tensor ranks make of a branch [tokens, h] [by the group of the linear layer's region].
    """

    def __init__(self, stage: DecoderStage, sum_ranks: Sum | None = None):
        assert not stage.region.sequence and stage.with_full_params is None
        assert isinstance(stage.embedding, Embedding | None) and isinstance(stage.head, Head | None)
        self._embedding, self._head, self._ops = stage.embedding, stage.head, stage.ops
        self._last_norm = None if self._head is None else _norm(self._head.norm)
        few = _tried(stage)
        self._blocks = [_block(cast(Block, block), few, sum_ranks) for block in stage.blocks]

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        cache: KeyValueCache,
        *cargo: torch.Tensor,
    ) -> torch.Tensor:
        x = cargo[0] if self._embedding is None else self._embedding.look_up(ids, positions)
        rotary = None
        if cache.rotary is not None:
            cos, sin = cache.rotary
            rotary = cos.index_select(0, positions), sin.index_select(0, positions)
        stream: Branch = x, None, None
        for block in self._blocks:
            stream = block(stream, rotary, cache)
        x, branch, bias = stream
        x = self._ops.added(x, branch, bias, None)
        if self._head is None or self._last_norm is None:
            return x
        normed = self._last_norm(x.index_select(0, wanted))[1]
        return logits(normed, self._head.weight, self._head.region, self._head.bias)


def _tried(stage: DecoderStage) -> FewRows | None:
    """The kernels for few rows, once they have been tried."""
    widths = {
        module.weight.shape[1]: None
        for block in list(stage.blocks)[:1]
        for module in block.modules()
        if isinstance(module, ColumnLinear | RowLinear)
    }
    return trusted(stage.ops.few_rows, stage.dtype, next(stage.parameters()).device, list(widths))


def _block(
    block: Block, few: FewRows | None, sum_ranks: Sum | None
) -> Callable[[Branch, Rotary | None, KeyValueCache], Branch]:
    attention, feed_forward = block.attention, block.feed_forward
    qkv, out = _factor(attention.qkv, _bias(attention.qkv)), _factor(attention.out)
    up, down = _factor(feed_forward.up), _factor(feed_forward.down)
    first, second = _norm(block.attention_norm), _norm(block.feed_forward_norm)
    project, attend = _linear(attention.qkv, qkv), _attention(attention, few)
    feed = _feed_forward(feed_forward, up)
    attended = _last(attention.out, out, attention.ops, sum_ranks)
    fed = _last(feed_forward.down, down, feed_forward.ops, sum_ranks)
    normed_residual = block.post_norm_residual
    fused = None if few is None else _fused(block, few, (qkv, out, up, down), attend, sum_ranks)

    def pre(stream: Branch, rotary: Rotary | None, cache: KeyValueCache) -> Branch:
        if fused is not None and few is not None and few.takes(len(stream[0]), down):
            return fused(stream, rotary, cache)
        x, normed = first(*stream)
        x, normed = second(*attended(normed if normed_residual else x, attend(project(normed), rotary, cache)))
        return fed(normed if normed_residual else x, feed(normed))

    def post(stream: Branch, rotary: Rotary | None, cache: KeyValueCache) -> Branch:
        x = first(*attended(stream[0], attend(project(stream[0]), rotary, cache)))[1]
        return second(*fed(x, feed(x)))[1], None, None

    return pre if block.pre else post


def _fused(
    block: Block,
    few: FewRows,
    factors: tuple[Factor, ...],
    attend: Callable[[torch.Tensor, Rotary | None, KeyValueCache], torch.Tensor],
    sum_ranks: Sum | None,
) -> Callable[[Branch, Rotary | None, KeyValueCache], Branch] | None:
    """A block of few rows, of its factors of query, key and value, out, up and down: each norm is computed by the
    product of it, and the stream added to by the last product of a branch, or by its sum over tensor ranks. None where
    more lies between these."""
    attention, feed_forward, added = block.attention, block.feed_forward, block.attention.ops.added
    linears: tuple[ColumnLinear | RowLinear, ...] = (attention.qkv, attention.out, feed_forward.up, feed_forward.down)
    usual = all(linear.gemms.plain for linear in linears)
    if not usual or not block.pre or block.post_norm_residual or not all(few.takes(1, each) for each in factors):
        return None
    qkv, out, up, down = (
        replace(factor, bias=_bias(linear) if isinstance(linear, ColumnLinear) or linear.region.axis.first else None)
        for factor, linear in zip(factors, linears, strict=True)
    )
    first, second = (
        NormOf(_norm_weight(norm), norm.bias, norm.eps) for norm in (block.attention_norm, block.feed_forward_norm)
    )
    linear, activation, region = few.linear, feed_forward.activation, attention.out.region
    summed = sum_ranks or by_group(region.axis)

    def add(x: torch.Tensor, wide: torch.Tensor, factor: Factor) -> torch.Tensor:
        if region.size == 1:
            return linear(wide, factor, None, None, x)
        summed(linear(wide, factor, None, None, None), x)
        return x

    def run(stream: Branch, rotary: Rotary | None, cache: KeyValueCache) -> Branch:
        x = added(*stream, None)
        mixed = attend(linear(x, qkv, first, None, None), rotary, cache)
        x = add(x, mixed, out)
        wide = linear(x, up, second, activation, None)
        return add(x, wide, down), None, None

    return run


def _bias(linear: ColumnLinear | RowLinear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def _norm_weight(norm: Norm) -> torch.Tensor:
    return norm.weight.detach() + 1 if norm.offset else norm.weight.detach()


def _norm(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    add_norm, added = norm.ops.add_norm, norm.ops.added
    weight, bias, eps = _norm_weight(norm), norm.bias, norm.eps
    few = rms_norm_by(weight, eps) if norm.ops.spread and bias is None and weight.element_size() >= 4 else None

    def run(
        x: torch.Tensor, branch: torch.Tensor | None = None, branch_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if few is None or x.dtype != weight.dtype:
            return add_norm(x, branch, branch_bias, None, weight, bias, eps)
        x = added(x, branch, branch_bias, None)
        return x, few(x)

    return run


def _factor(linear: ColumnLinear | RowLinear, bias: torch.Tensor | None = None) -> Factor:
    """bias: added while it multiplies."""
    return linear.weight.ops.matmuls.factor(linear.weight, bias)


def _linear(
    linear: ColumnLinear | RowLinear, factor: Factor, sum_ranks: Sum | None = None
) -> Callable[..., torch.Tensor]:
    multiply = linear.gemms.by(factor)
    if not isinstance(linear, RowLinear) or linear.region.size == 1:
        return multiply
    summed = sum_ranks or by_group(linear.region.axis)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x)
        summed(y)
        return y

    return run


def _last(
    linear: RowLinear, factor: Factor, ops: Ops, sum_ranks: Sum | None
) -> Callable[[torch.Tensor, torch.Tensor], Branch]:
    """The last linear of a branch, of the stream x and its input y: it may add its output to x, in one operation."""
    multiply, bias, weight = _linear(linear, factor, sum_ranks), linear.bias, factor.weight.t()
    if not ops.spread or bias is not None or not linear.gemms.plain or linear.region.size > 1:
        return lambda x, y: (x, multiply(y), bias)
    return lambda x, y: (x.addmm_(y, weight), None, None) if x.dtype == y.dtype else (x, multiply(y), None)


def _attention(
    attention: Attention, few: FewRows | None
) -> Callable[[torch.Tensor, Rotary | None, KeyValueCache], torch.Tensor]:
    """Of the product of query, key and value."""
    layer, heads, kv_heads, ops = attention.layer, attention.heads, attention.kv_heads, attention.ops
    q_norm, k_norm = (None if norm is None else _norm(norm) for norm in (attention.q_norm, attention.k_norm))

    def run(fused: torch.Tensor, rotary: Rotary | None, cache: KeyValueCache) -> torch.Tensor:
        if q_norm is None and few is not None:
            fused = fused.view(len(fused), heads + 2 * kv_heads, -1)
            return cache.attend_new(layer, fused, rotary, few.place)
        if q_norm is None and ops.spread:
            fused = fused.view(fused.shape[0], heads + 2 * kv_heads, -1)
            if rotary is not None:
                rotate(fused.narrow(1, 0, heads + kv_heads), *rotary)
            return cache(layer, *fused.split_with_sizes([heads, 2 * kv_heads], 1))
        q, k, v = ops.split_heads(fused, None, heads, kv_heads, rotary if q_norm is None else None)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q)[1], k_norm(k)[1]
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
        return cache(layer, q, torch.cat([k, v], 1))

    return run


def _feed_forward(feed_forward: FeedForward, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
    up, bias = _linear(feed_forward.up, factor), feed_forward.up.bias
    activate, kind = feed_forward.ops.activate, feed_forward.activation
    return lambda x: activate(up(x), bias, kind)


def lay_for_decoding(stage: Any) -> None:
    """Keep the blocks' matrices transposed: a product of few rows then copies none of them first."""
    for module in stage.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.weight.data = module.weight.data.t().contiguous().t()
