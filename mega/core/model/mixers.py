"""The mixers of branches: self-attention, attention to a memory, feed-forward.

A mixer has two steps, both of which decoding replaces. `forward` computes the input of the last linear layer; that
layer, `out`, leaves the tensor-parallel region. Shapes are per tensor rank: `heads` are this rank's heads, and [tokens,
h] are this rank's tokens under sequence parallelism.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.architecture.layer import Attention, Dense, Norm
from mega.core.model.forward import ForwardContext
from mega.core.model.residual import Normalization, ProjectionNorm, ResidualState, Tensors, normalization
from mega.core.ops.activation import defer_slope, gated_kind
from mega.core.ops.autograd import slope_of, with_recipe
from mega.core.ops.dropout import Dropout
from mega.core.ops.rotary import rotate
from mega.core.parallel.experts import NO_RANKS, ExpertAxes
from mega.core.parallel.gemms import WeightGemms
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import SINGLE, Axis
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, Weight


class LayerPlace(NamedTuple):
    """The index of a layer in the model, and the groups of ranks that compute the layer."""

    layer: int  # index of the layer in the whole model
    region: Region  # tensor parallelism
    adapter_dropout: float  # dropout probability for the inputs of adapters
    cp: Axis = SINGLE  # ranks that share the layer's sequences
    experts: ExpertAxes = NO_RANKS  # ranks that share the experts of an MoE layer
    gathers_experts: bool = False  # whether to gather tokens over ranks with different experts


class MixerModule(nn.Module):
    """Base class of mixers. out: the last linear layer, if a subclass does not override `finish` and `bias`.

    adapters: a prefix for the dropout sites of the mixer's adapters. Do not change site names, because they are hashed
    into dropout masks.
    """

    adapters = ""
    out_adapter = "out_adapter"
    out: RowLinear

    def __init__(self, place: LayerPlace):
        super().__init__()
        self.layer, self._adapter_dropout = place.layer, place.adapter_dropout

    def adapter_dropout(self, context: ForwardContext, site: str) -> Dropout | None:
        return context.adapter_dropout(self._adapter_dropout, self.layer, self.adapters + site)

    @property
    def bias(self) -> Weight | None:
        """The bias that the caller must add to the result of `finish`, or None if `finish` adds the bias or the layer
        lacks a bias."""
        return self.out.bias

    def finish(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Apply the last linear layer to the result of `forward`, and return [tokens, h], without the bias."""
        return self.out.matmul(mixed, self.adapter_dropout(context, self.out_adapter))


class SelfAttention(MixerModule):
    """Self-attention. One GEMM computes query, key and value."""

    def __init__(self, factory: ParameterFactory, value: Attention, tensors: Tensors, place: LayerPlace):
        super().__init__(place)
        self.value, self.ops, region = value, factory.ops, place.region
        self.heads, self.kv_heads = value.heads // region.size, value.kv_heads // region.size
        self.first_head = region.axis.index * self.heads
        self.project(factory, tensors, region)
        self.q_norm, self.k_norm = (
            _head_norm(factory, norm, value, tensors, region) for norm in (value.q_norm, value.k_norm)
        )
        self.out = _row(factory, tensors, f"{value.name}.o_proj", region)

    def project(self, factory: ParameterFactory, tensors: Tensors, region: Region) -> None:
        """Create the linear layers that project to heads."""
        self.qkv = self.column(factory, tensors, region, "qkv")

    def column(self, factory: ParameterFactory, tensors: Tensors, region: Region, which: str) -> ColumnLinear:
        return _column(factory, tensors, [f"{self.value.name}.{one}_proj" for one in which], region)

    def scaled(self, q: torch.Tensor) -> torch.Tensor:
        """Scale queries for models whose scores are not divided by sqrt(d), because the kernels always divide by
        sqrt(d)."""
        return q if self.value.score_multiplier == 1.0 else q * self.value.score_multiplier

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the heads' outputs for x [tokens, h], with shape [all tokens of the tensor-parallel region, heads x
        d], or, if only some outputs of this layer are read, [tokens that are read, heads x d]."""
        rotary, drop = context.rotary(self.value.rope), self.adapter_dropout(context, "qkv_adapter")
        early_rotary = None if self.q_norm is not None else rotary
        q, k, v = self.ops.split_heads(self.qkv.biased(x, drop), self.qkv.bias, self.heads, self.kv_heads, early_rotary)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(ResidualState(q))[1], self.k_norm(ResidualState(k))[1]
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
        reads = context.read_by(self.layer)
        q = self.scaled(q if reads is None else reads.of(q))
        q, k, v = (x.unflatten(0, (context.batch, -1)) for x in (q, k, v))
        outputs = context.attend(self.ops.attention, q, k, v, self.value, self.layer, self.first_head)
        return outputs.reshape(q.shape[0] * q.shape[1], -1)


class CrossAttention(SelfAttention):
    """Cross attention: queries from the layer's tokens, keys and values (one GEMM) from the memory."""

    adapters = "cross_"

    def project(self, factory: ParameterFactory, tensors: Tensors, region: Region) -> None:
        self.q = self.column(factory, tensors, region, "q")
        self.kv = self.column(factory, tensors, region, "kv")
        self.kv.gemms = WeightGemms(self.kv.weight, saves_input=False)  # all layers save the same memory

    def projected(
        self, x: torch.Tensor, memory: torch.Tensor, context: ForwardContext, memory_context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries of x, and keys and values of the memory, each [all tokens of the tensor-parallel region,
        heads, d]."""
        q = self.q(x, self.adapter_dropout(context, "q_adapter")).unflatten(1, (self.heads, -1))
        drop = self.adapter_dropout(memory_context, "kv_adapter")
        k, v = self.kv(memory, drop).unflatten(1, (2 * self.kv_heads, -1)).chunk(2, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(ResidualState(q))[1], self.k_norm(ResidualState(k))[1]
        return self.scaled(q), k, v

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the heads' outputs for x [tokens, h], with shape [all tokens of the tensor-parallel region, heads x
        d]."""
        memory = context.memory
        assert memory is not None
        heads = self.projected(x, memory.tokens, context, context.for_memory())
        q, k, v = (projected.unflatten(0, (context.batch, -1)) for projected in heads)
        outputs = self.ops.attention(q, k, v, context.memory_mask(self.value, self.layer, self.first_head))
        return outputs.reshape(context.batch * context.seq, -1)


class FeedForward(MixerModule):
    """Feed-forward network: up projection, activation, down projection. One GEMM computes gate and up projections."""

    out_adapter = "down_adapter"

    def __init__(self, factory: ParameterFactory, value: Dense, tensors: Tensors, place: LayerPlace):
        super().__init__(place)
        self.value, self.ops, self.recompute = value, factory.ops, factory.recompute
        self.activation = gated_kind(value.activation) if value.gated else value.activation
        names = [f"{value.name}.{projection}_proj" for projection in (("gate", "up") if value.gated else ("up",))]
        self.up = _column(factory, tensors, names, place.region)
        self.out = _row(factory, tensors, f"{value.name}.down_proj", place.region)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the activations for x [tokens, h], with shape [all tokens of the tensor-parallel region, f]."""
        drop, bias = self.adapter_dropout(context, "up_adapter"), self.up.bias
        # A gated activation's input and output differ in shape, so the last linear layer cannot return its gradient.
        if not self.value.gated and self.up.gemms.plain and self.out.applies_slope(x, self.activation):
            return self._deferring_slope(x, drop)
        hidden = self.up.matmul(x, drop)
        active = self.ops.activate(hidden, bias, self.activation)
        if self.recompute:
            freed = hidden.detach()
            with_recipe(active, lambda: self.ops.activate(freed, bias, self.activation))
        return active

    def _deferring_slope(self, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Return the activations for x [tokens, h]. In the backward pass, the last linear layer applies the slope.

        An activation that the GEMM computes is rounded once, unlike one that is recomputed from the GEMM's result, so
        activations that the backward pass recomputes are never computed by the GEMM.
        """
        before, output = (self.up.biased(x, drop), None) if self.recompute else self.up.activated(x, self.activation)
        detached = before.detach()

        def activate() -> torch.Tensor:
            with torch.no_grad():
                return self.ops.activate(detached, None, self.activation)

        output = activate() if output is None else output
        if not torch.is_grad_enabled():
            return output
        active = defer_slope(before, self.up.bias, output, self.activation, self.ops.bias_gradient)
        return with_recipe(active, activate) if self.recompute else active

    def finish(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.out.matmul(mixed, self.adapter_dropout(context, self.out_adapter), slope_of(mixed))


def _head_norm(
    factory: ParameterFactory, norm: Norm | None, attention: Attention, tensors: Tensors, region: Region
) -> Normalization | ProjectionNorm | None:
    """Create the norm of queries or keys: over each head, or over all heads together."""
    if norm is None or norm.width == attention.head_dim:
        return normalization(factory, norm, tensors)
    return ProjectionNorm(factory, norm, tensors, region.axis)


def _column(factory: ParameterFactory, tensors: Tensors, names: list[str], region: Region) -> ColumnLinear:
    biases: list[Tensor] = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    return ColumnLinear(factory, [tensors[f"{name}.weight"] for name in names], biases, region)


def _row(factory: ParameterFactory, tensors: Tensors, name: str, region: Region) -> RowLinear:
    return RowLinear(factory, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), region)
