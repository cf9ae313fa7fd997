"""One transformer block: norm, attention, norm, feed-forward, each branch added to the residual stream.

The same block is GPT's and Llama's; what differs are values of the model config. Shapes are those of one tensor
rank: `heads` below are this rank's, tokens are ours between regions under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor
from mega.core.model.flow import Flow
from mega.core.ops.activation import activate
from mega.core.ops.attention import attention
from mega.core.ops.norm import layer_norm, rms_norm
from mega.core.ops.rotary import rotate
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import Maker

Tensors = Mapping[str, Tensor]
"""The block's inventory by names relative to the block."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim; its weights are whole on every rank."""

    def __init__(self, make: Maker, model: ModelConfig, tensors: Tensors, name: str):
        super().__init__()
        self.weight = make(tensors[f"{name}.weight"])
        self.bias = make(tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else None
        self.eps, self.offset = model.norm_eps, model.norm_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.offset else self.weight
        if self.bias is not None:
            return layer_norm(x, weight, self.bias, self.eps)
        return rms_norm(x, weight, self.eps)


def biases(tensors: Tensors, *names: str) -> list[Tensor]:
    return [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]


class Attention(nn.Module):
    """Causal self-attention with grouped heads; query, key and value are one product."""

    def __init__(self, make: Maker, model: ModelConfig, tensors: Tensors, layer: int, tp: Axis, sequence: bool):
        super().__init__()
        assert model.heads and model.kv_heads and model.head_dim
        self.layer, self.width = layer, model.head_dim
        self.heads, self.kv_heads = model.heads // tp.size, model.kv_heads // tp.size
        self.first_head = tp.index * self.heads
        self.dropout = model.attention_dropout
        names = [f"self_attn.{one}_proj" for one in "qkv"]
        self.qkv = ColumnLinear(
            make, [tensors[f"{name}.weight"] for name in names], biases(tensors, *names), tp, sequence
        )
        self.q_norm = Norm(make, model, tensors, "self_attn.q_norm") if model.qk_norm else None
        self.k_norm = Norm(make, model, tensors, "self_attn.k_norm") if model.qk_norm else None
        out = "self_attn.o_proj"
        self.out = RowLinear(make, tensors[f"{out}.weight"], tensors.get(f"{out}.bias"), tp, sequence)

    def forward(self, x: torch.Tensor, flow: Flow) -> torch.Tensor:
        fused = self.qkv(x).view(flow.rows * flow.columns, -1, self.width)
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if flow.rotary is not None:
            q, k = rotate(q, *flow.rotary), rotate(k, *flow.rotary)
        mixed = attention(
            *(t.unflatten(0, (flow.rows, flow.columns)) for t in (q, k, v)),
            documents=flow.documents,
            drop=flow.attention_drop(self.dropout, self.layer, self.first_head, self.heads),
            plain=flow.plain,
        )
        return self.out(mixed.reshape(flow.rows * flow.columns, -1))


class FeedForward(nn.Module):
    """Out to the wide layer, activation, and back; gate and up are one product."""

    def __init__(self, make: Maker, model: ModelConfig, tensors: Tensors, tp: Axis, sequence: bool):
        super().__init__()
        self.activation = model.activation
        names = ["mlp.gate_proj", "mlp.up_proj"] if model.activation == "swiglu" else ["mlp.up_proj"]
        self.up = ColumnLinear(
            make, [tensors[f"{name}.weight"] for name in names], biases(tensors, *names), tp, sequence
        )
        down = "mlp.down_proj"
        self.down = RowLinear(make, tensors[f"{down}.weight"], tensors.get(f"{down}.bias"), tp, sequence)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.up(x), self.activation))


class Block(nn.Module):
    """Block number `layer` of the model (0 is the first, whichever stage holds it)."""

    def __init__(self, make: Maker, model: ModelConfig, tensors: Tensors, layer: int, tp: Axis, sequence: bool):
        super().__init__()
        self.layer, self.dropout = layer, model.hidden_dropout
        self.post_norm_residual = model.post_norm_residual
        self.attention_norm = Norm(make, model, tensors, "input_layernorm")
        self.attention = Attention(make, model, tensors, layer, tp, sequence)
        self.feed_forward_norm = Norm(make, model, tensors, "post_attention_layernorm")
        self.feed_forward = FeedForward(make, model, tensors, tp, sequence)

    def forward(self, x: torch.Tensor, flow: Flow) -> torch.Tensor:
        normed = self.attention_norm(x)
        branch = flow.drop(self.attention(normed, flow), self.dropout, self.layer, "attention_out")
        x = (normed if self.post_norm_residual else x) + branch
        normed = self.feed_forward_norm(x)
        branch = flow.drop(self.feed_forward(normed), self.dropout, self.layer, "feed_forward_out")
        return (normed if self.post_norm_residual else x) + branch
