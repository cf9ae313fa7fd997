"""One transformer block: attention and feed-forward, each with its norm and added to the residual stream.

The same block is GPT's, Llama's and BERT's; what differs are values of the model config and of the mask. Shapes are
those of one tensor rank: `heads` below are this rank's, tokens are ours between regions under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor
from mega.core.model.forward import ForwardContext
from mega.core.ops.autograd import with_recipe
from mega.core.ops.dropout import Dropout
from mega.core.ops.rotary import rotate
from mega.core.ops.suite import Ops
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, Weight

Tensors = Mapping[str, Tensor]
"""The block's inventory by names relative to the block."""


NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""Placement -> names of attention's norm and of the feed-forward layer's."""


class ResidualState(NamedTuple):
    """The residual stream [tokens, h] and the branch that is still to be added, so that the next norm adds it.

    drop: of the branch with its bias.
    """

    x: torch.Tensor
    branch: torch.Tensor | None = None
    bias: Weight | None = None
    drop: Dropout | None = None

    def sum(self, ops: Ops) -> torch.Tensor:
        return ops.added(*self)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim; its weights are whole on every rank."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, name: str):
        super().__init__()
        self.weight = factory(tensors[f"{name}.weight"])
        self.bias = factory(tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else None
        self.eps, self.offset = model.norm_eps, model.norm_offset
        self.ops, self.recompute = factory.ops, factory.recompute

    def forward(self, stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream with its branch added, and its norm."""
        weight = self.weight + 1 if self.offset else self.weight
        x, normed = self.ops.add_norm(*stream, weight, self.bias, self.eps)
        if self.recompute:
            freed = (x.detach(), None, None, None, weight.detach(), self.bias, self.eps)
            with_recipe(normed, lambda: self.ops.add_norm(*freed)[1])
        return x, normed


def biases(tensors: Tensors, *names: str) -> list[Tensor]:
    return [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]


class Attention(nn.Module):
    """Self-attention with grouped heads; query, key and value are one GEMM. name: of its tensors."""

    name = "self_attn"

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, layer: int, region: Region):
        super().__init__()
        assert model.heads and model.kv_heads and model.head_dim
        self.layer, self.width = layer, model.head_dim
        self.heads, self.kv_heads = model.heads // region.size, model.kv_heads // region.size
        self.first_head = region.axis.index * self.heads
        self.dropout, self.adapter_dropout = model.attention_dropout, model.lora_dropout
        self.ops = factory.ops
        self._project(factory, tensors, region)
        self.q_norm = Norm(factory, model, tensors, f"{self.name}.q_norm") if model.qk_norm else None
        self.k_norm = Norm(factory, model, tensors, f"{self.name}.k_norm") if model.qk_norm else None
        out = f"{self.name}.o_proj"
        self.out = RowLinear(factory, tensors[f"{out}.weight"], tensors.get(f"{out}.bias"), region)

    def _project(self, factory: ParameterFactory, tensors: Tensors, region: Region) -> None:
        """Make the linears into the heads."""
        self.qkv = self._column(factory, tensors, region, "qkv")

    def _column(self, factory: ParameterFactory, tensors: Tensors, region: Region, which: str) -> ColumnLinear:
        names = [f"{self.name}.{one}_proj" for one in which]
        return ColumnLinear(factory, [tensors[f"{name}.weight"] for name in names], biases(tensors, *names), region)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [tokens, h] -> [tokens, h], to which the bias of `out` is still to be added."""
        normed = self.q_norm is not None
        drop = context.adapter_dropout(self.adapter_dropout, self.layer, "qkv_adapter")
        rotary = None if normed else context.rotary
        q, k, v = self.ops.split_heads(self.qkv.biased(x, drop), self.qkv.bias, self.heads, self.kv_heads, rotary)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(ResidualState(q))[1], self.k_norm(ResidualState(k))[1]
            if context.rotary is not None:
                q, k = rotate(q, *context.rotary), rotate(k, *context.rotary)
        q, k, v = (x.unflatten(0, (context.batch, context.seq)) for x in (q, k, v))
        mixed = context.attend(self.ops.attention, q, k, v, self.dropout, self.layer, self.first_head)
        drop = context.adapter_dropout(self.adapter_dropout, self.layer, "out_adapter")
        return self.out.matmul(mixed.reshape(context.batch * context.seq, -1), drop)


class FeedForward(nn.Module):
    """Out to the wide layer, activation, and back; gate and up are one GEMM."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, layer: int, region: Region):
        super().__init__()
        self.layer, self.adapter_dropout = layer, model.lora_dropout
        self.activation, self.ops, self.recompute = model.activation, factory.ops, factory.recompute
        names = ["mlp.gate_proj", "mlp.up_proj"] if model.activation == "swiglu" else ["mlp.up_proj"]
        self.up = ColumnLinear(factory, [tensors[f"{name}.weight"] for name in names], biases(tensors, *names), region)
        down = "mlp.down_proj"
        self.down = RowLinear(factory, tensors[f"{down}.weight"], tensors.get(f"{down}.bias"), region)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [tokens, h] -> [tokens, h], to which the bias of `down` is still to be added."""
        drop = context.adapter_dropout(self.adapter_dropout, self.layer, "up_adapter")
        wide, bias = self.up.matmul(x, drop), self.up.bias
        active = self.ops.activate(wide, bias, self.activation)
        if self.recompute:
            freed = wide.detach()
            with_recipe(active, lambda: self.ops.activate(freed, bias, self.activation))
        return self.down.matmul(active, context.adapter_dropout(self.adapter_dropout, self.layer, "down_adapter"))


class Block(nn.Module):
    """Block number `layer` of the model (0 is the first, whichever stage holds it)."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, layer: int, region: Region):
        super().__init__()
        self.layer, self.dropout = layer, model.hidden_dropout
        self.post_norm_residual = model.post_norm_residual
        self.pre = model.norm_placement == "pre"
        first, second = NORMS[model.norm_placement]
        self.attention_norm = Norm(factory, model, tensors, first)
        self.attention = Attention(factory, model, tensors, layer, region)
        self.feed_forward_norm = Norm(factory, model, tensors, second)
        self.feed_forward = FeedForward(factory, model, tensors, layer, region)

    def forward(self, stream: ResidualState, context: ForwardContext) -> ResidualState:
        return self._norms_before(stream, context) if self.pre else self._norms_after(stream, context)

    def _norms_before(self, stream: ResidualState, context: ForwardContext) -> ResidualState:
        x, normed = self.attention_norm(stream)
        branch = self._attended(normed, context)
        x, normed = self.feed_forward_norm(ResidualState(normed if self.post_norm_residual else x, *branch))
        branch = self._fed_forward(normed, context)
        return ResidualState(normed if self.post_norm_residual else x, *branch)

    def _norms_after(self, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """Each norm is of the sum that its branch makes, and is the residual (Vaswani et al. 2017)."""
        assert stream.branch is None
        x = self.attention_norm(ResidualState(stream.x, *self._attended(stream.x, context)))[1]
        return ResidualState(self.feed_forward_norm(ResidualState(x, *self._fed_forward(x, context)))[1])

    def _attended(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Weight | None, Dropout | None]:
        return self._branch(self.attention(x, context), self.attention.out, context, "attention_out")

    def _fed_forward(
        self, x: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, Weight | None, Dropout | None]:
        return self._branch(self.feed_forward(x, context), self.feed_forward.down, context, "feed_forward_out")

    def _branch(
        self, out: torch.Tensor, linear: RowLinear, context: ForwardContext, site: str
    ) -> tuple[torch.Tensor, Weight | None, Dropout | None]:
        """A branch, its bias, and the dropout that acts on both together."""
        return out, linear.bias, context.dropout(self.dropout, self.layer, site)
