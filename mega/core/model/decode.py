"""One step of continuing text on a stage of a decoder: what its modules compute, on plain tensors.

Between the operations of a small model lies more work than in them. Here the weights and ops of a stage are put
together once, without what a step does not need: modules, gradients, dropout, sequence parallelism, ZeRO. A step takes
tensors whose shapes follow from the number of tokens alone and waits for nothing on the host, so a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from mega.core.model.block import Attention, Block, FeedForward, Norm, ResidualState
from mega.core.model.decoder import DecoderStage, Head
from mega.core.model.embedding import Embedding
from mega.core.ops.rotary import rotate
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.linear import ColumnLinear, RowLinear

Rotary = tuple[torch.Tensor, torch.Tensor]
Branch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The residual stream [tokens, h], the branch that is still to be added, and its bias."""


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens. rotary: cos and sin of all positions as the stage's ops take them, or None."""

    @property
    def rotary(self) -> Rotary | None: ...

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Keep keys and values [tokens, 2 kv_heads, d] of one layer's new tokens; what q [tokens, heads, d] of the same
        tokens make of all that they see, [tokens, heads x d]."""


class DecodeStep:
    """step(ids, positions, wanted, cache, *cargo) on a stage whose weights stay where they are.

    ids, positions: int64 [tokens], the next of any sequences. Gives what the next stage is given, [tokens, h]; on the
    last stage the logits of the tokens `wanted`, int64 [w], as [w, ids of this rank].
    """

    def __init__(self, stage: DecoderStage):
        assert not stage.region.sequence and stage.with_full_params is None
        assert isinstance(stage.embedding, Embedding | None) and isinstance(stage.head, Head | None)
        self._embedding, self._head, self._ops = stage.embedding, stage.head, stage.ops
        self._blocks = [_block(cast(Block, block)) for block in stage.blocks]

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
        if self._head is None:
            return x
        return cast(torch.Tensor, self._head.forward(ResidualState(x.index_select(0, wanted))))


def _block(block: Block) -> Callable[[Branch, Rotary | None, KeyValueCache], Branch]:
    first, second = _norm(block.attention_norm), _norm(block.feed_forward_norm)
    attend, attended = _attention(block.attention), _last(block.attention.out, block.attention.ops)
    feed, fed = _feed_forward(block.feed_forward), _last(block.feed_forward.down, block.feed_forward.ops)
    normed_residual = block.post_norm_residual

    def pre(stream: Branch, rotary: Rotary | None, cache: KeyValueCache) -> Branch:
        x, normed = first(*stream)
        x, normed = second(*attended(normed if normed_residual else x, attend(normed, rotary, cache)))
        return fed(normed if normed_residual else x, feed(normed))

    def post(stream: Branch, rotary: Rotary | None, cache: KeyValueCache) -> Branch:
        x = first(*attended(stream[0], attend(stream[0], rotary, cache)))[1]
        return second(*fed(x, feed(x)))[1], None, None

    return pre if block.pre else post


def _norm(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    add_norm, bias, eps = norm.ops.add_norm, norm.bias, norm.eps
    weight = norm.weight.detach() + 1 if norm.offset else norm.weight

    def run(
        x: torch.Tensor, branch: torch.Tensor | None = None, branch_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(x, branch, branch_bias, None, weight, bias, eps)

    return run


def _linear(linear: ColumnLinear | RowLinear, bias: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    """bias: added while it multiplies."""
    multiply, adapter = linear.weight.ops.matmuls.by(linear.weight, bias), linear.adapter
    leaves = linear.region.axis if isinstance(linear, RowLinear) and linear.region.size > 1 else None
    if adapter is None and leaves is None:
        return multiply

    def run(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x)
        if adapter is not None:
            adapter.add(x, y, None)
        if leaves is not None:
            all_reduce(y, leaves)
        return y

    return run


def _last(linear: RowLinear, ops: Ops) -> Callable[[torch.Tensor, torch.Tensor], Branch]:
    """The last linear of a branch, of the stream x and its input y: it may add its output to x, in one operation."""
    multiply, bias, factor = _linear(linear), linear.bias, linear.weight.detach().t()
    if not ops.spread or bias is not None or linear.adapter is not None or linear.region.size > 1:
        return lambda x, y: (x, multiply(y), bias)
    return lambda x, y: (x.addmm_(y, factor), None, None) if x.dtype == y.dtype else (x, multiply(y), None)


def _attention(attention: Attention) -> Callable[[torch.Tensor, Rotary | None, KeyValueCache], torch.Tensor]:
    layer, heads, kv_heads = attention.layer, attention.heads, attention.kv_heads
    ops, qkv = attention.ops, _linear(attention.qkv, attention.qkv.bias)
    q_norm, k_norm = (None if norm is None else _norm(norm) for norm in (attention.q_norm, attention.k_norm))

    def run(x: torch.Tensor, rotary: Rotary | None, cache: KeyValueCache) -> torch.Tensor:
        fused = qkv(x)
        if q_norm is None and ops.spread:
            fused = fused.view(len(fused), heads + 2 * kv_heads, -1)
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


def _feed_forward(feed_forward: FeedForward) -> Callable[[torch.Tensor], torch.Tensor]:
    up, bias = _linear(feed_forward.up), feed_forward.up.bias
    activate, kind = feed_forward.ops.activate, feed_forward.activation
    return lambda x: activate(up(x), bias, kind)


def lay_for_decoding(stage: Any) -> None:
    """Keep the blocks' matrices transposed: a product of few rows then copies none of them first."""
    for module in stage.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.weight.data = module.weight.data.t().contiguous().t()
