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
    heads, kv_heads = resolved(model.heads, "heads"), resolved(model.kv_heads, "kv_heads")
    width, layers = resolved(model.head_dim, "head_dim"), resolved(model.layers, "layers")
    into = Init(std=model.init_std)
    out_of = Init(std=model.init_std / sqrt(2.0 * layers))
    pre = model.norm_placement == "pre"

    def column(name: str, outs: int, parts: int, bias: bool) -> Iterator[Tensor]:
        """Cut by rows of the weight: every rank computes its own outputs."""
        cut = Cut(0, "tp", parts)
        yield Tensor(f"{name}.weight", (outs, hidden), (number,), into, cut)
        if bias:
            yield Tensor(f"{name}.bias", (outs,), (number,), Init(), cut)

    def row(name: str, ins: int, parts: int) -> Iterator[Tensor]:
        """Cut by columns of the weight: outputs are summed over ranks; the bias comes after the sum."""
        yield Tensor(f"{name}.weight", (hidden, ins), (number,), out_of, Cut(1, "tp", parts))
        if model.bias:
            yield Tensor(f"{name}.bias", (hidden,), (number,), Init(), partial=("sequence",))

    qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
    if pre:
        yield from norm(model, "input_layernorm", hidden, number, "sequence")
    yield from column("self_attn.q_proj", heads * width, heads, qkv_bias)
    yield from column("self_attn.k_proj", kv_heads * width, kv_heads, qkv_bias)
    yield from column("self_attn.v_proj", kv_heads * width, kv_heads, qkv_bias)
    if model.qk_norm:
        yield from norm(model, "self_attn.q_norm", width, number, "tp")
        yield from norm(model, "self_attn.k_norm", width, number, "tp")
    yield from row("self_attn.o_proj", heads * width, heads)
    yield from norm(model, "post_attention_layernorm", hidden, number, "sequence")
    if model.activation == "swiglu":
        yield from column("mlp.gate_proj", ffn, ffn, model.bias)
    yield from column("mlp.up_proj", ffn, ffn, model.bias)
    yield from row("mlp.down_proj", ffn, ffn)
    if not pre:
        yield from norm(model, "post_feedforward_layernorm", hidden, number, "sequence")


def norm(model: ModelConfig, name: str, width: int, unit: Unit, partial: Partial) -> Iterator[Tensor]:
    """The weight of a norm, and the bias of a LayerNorm."""
    ones = Init(constant=0.0 if model.norm_offset else 1.0)
    yield Tensor(f"{name}.weight", (width,), (unit,), ones, partial=(partial,))
    if model.norm == "layernorm":
        yield Tensor(f"{name}.bias", (width,), (unit,), Init(), partial=(partial,))
