"""The tensors of one transformer block, and of a norm: what the families' tables have in common.

A block's names are relative to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from mega.core.config.sections import ModelConfig
from mega.core.inventory.tensor import Cut, Init, Partial, Tensor, Unit, resolved


def blocks(model: ModelConfig) -> Iterator[Tensor]:
    """Those of every block, in order."""
    for number in range(resolved(model.layers, "layers")):
        for tensor in block(model, number):
            yield replace(tensor, name=f"model.layers.{number}.{tensor.name}")


def block(model: ModelConfig, number: int) -> Iterator[Tensor]:
    """Self-attention and feed-forward, each with its norm before or after it."""
    hidden, ffn = resolved(model.hidden, "hidden"), resolved(model.ffn, "ffn")
    pre = model.norm_placement == "pre"
    if pre:
        yield from norm(model, "input_layernorm", hidden, number, "sequence")
    yield from attention(model, "self_attn", number)
    yield from norm(model, "post_attention_layernorm", hidden, number, "sequence")
    if model.activation == "swiglu":
        yield from _column(model, "mlp.gate_proj", number, ffn, ffn, model.bias)
    yield from _column(model, "mlp.up_proj", number, ffn, ffn, model.bias)
    yield from _row(model, "mlp.down_proj", number, ffn, ffn)
    if not pre:
        yield from norm(model, "post_feedforward_layernorm", hidden, number, "sequence")


def attention(model: ModelConfig, name: str, number: int) -> Iterator[Tensor]:
    """Query, key, value and output of block `number`."""
    heads, kv_heads = resolved(model.heads, "heads"), resolved(model.kv_heads, "kv_heads")
    width = resolved(model.head_dim, "head_dim")
    bias = model.bias if model.qkv_bias is None else model.qkv_bias
    yield from _column(model, f"{name}.q_proj", number, heads * width, heads, bias)
    yield from _column(model, f"{name}.k_proj", number, kv_heads * width, kv_heads, bias)
    yield from _column(model, f"{name}.v_proj", number, kv_heads * width, kv_heads, bias)
    if model.qk_norm:
        yield from norm(model, f"{name}.q_norm", width, number, "tp")
        yield from norm(model, f"{name}.k_norm", width, number, "tp")
    yield from _row(model, f"{name}.o_proj", number, heads * width, heads)


def _column(model: ModelConfig, name: str, number: int, outs: int, parts: int, bias: bool) -> Iterator[Tensor]:
    """Cut by rows of the weight: every rank computes its own outputs."""
    cut = Cut(0, "tp", parts)
    yield Tensor(f"{name}.weight", (outs, resolved(model.hidden, "hidden")), (number,), Init(std=model.init_std), cut)
    if bias:
        yield Tensor(f"{name}.bias", (outs,), (number,), Init(), cut)


def _row(model: ModelConfig, name: str, number: int, ins: int, parts: int) -> Iterator[Tensor]:
    """Cut by columns of the weight: outputs are summed over ranks; the bias comes after the sum."""
    hidden = resolved(model.hidden, "hidden")
    init = Init(std=model.init_std / sqrt(2.0 * resolved(model.layers, "layers")))
    yield Tensor(f"{name}.weight", (hidden, ins), (number,), init, Cut(1, "tp", parts))
    if model.bias:
        yield Tensor(f"{name}.bias", (hidden,), (number,), Init(), partial=("sequence",))


def norm(model: ModelConfig, name: str, width: int, unit: Unit, partial: Partial) -> Iterator[Tensor]:
    """The weight of a norm, and the bias of a LayerNorm."""
    ones = Init(constant=0.0 if model.norm_offset else 1.0)
    yield Tensor(f"{name}.weight", (width,), (unit,), ones, partial=(partial,))
    if model.norm == "layernorm":
        yield Tensor(f"{name}.bias", (width,), (unit,), Init(), partial=(partial,))
