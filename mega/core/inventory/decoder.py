"""The tensors of left-to-right language models: GPT and Llama are values of one table.

Names are Hugging Face's Llama names, so that a Llama checkpoint needs no renaming; GPT uses the same names
with biases and `model.embed_positions.weight` added. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from mega.core.config.sections import ModelConfig
from mega.core.inventory.tensor import Cut, Init, Partial, Table, Tensor, Unit, resolved


def units(model: ModelConfig) -> tuple[Unit, ...]:
    return ("embedding", *range(resolved(model.layers, "layers")), "head")


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """From the embedding to the head."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    normal = Init(std=model.init_std)
    rows = Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    ends: tuple[Unit, ...] = ("embedding", "head") if model.tied else ("embedding",)
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), ends, normal, rows)
    if model.position == "learned":
        table = (resolved(model.positions, "positions"), hidden)
        yield Tensor("model.embed_positions.weight", table, ("embedding",), normal, partial=("sequence",))
    for block in range(resolved(model.layers, "layers")):
        for tensor in _block(model, block):
            yield replace(tensor, name=f"model.layers.{block}.{tensor.name}")
    yield from _norm(model, "model.norm", hidden, "head", "sequence")
    if not model.tied:
        yield Tensor("lm_head.weight", (vocab, hidden), ("head",), normal, rows)


def _block(model: ModelConfig, block: int) -> Iterator[Tensor]:
    hidden, ffn = resolved(model.hidden, "hidden"), resolved(model.ffn, "ffn")
    heads, kv_heads = resolved(model.heads, "heads"), resolved(model.kv_heads, "kv_heads")
    width, layers = resolved(model.head_dim, "head_dim"), resolved(model.layers, "layers")
    into = Init(std=model.init_std)
    out_of = Init(std=model.init_std / sqrt(2.0 * layers))

    def column(name: str, outs: int, parts: int, bias: bool) -> Iterator[Tensor]:
        """Cut by rows of the weight: every rank computes its own outputs."""
        cut = Cut(0, "tp", parts)
        yield Tensor(f"{name}.weight", (outs, hidden), (block,), into, cut)
        if bias:
            yield Tensor(f"{name}.bias", (outs,), (block,), Init(), cut)

    def row(name: str, ins: int, parts: int) -> Iterator[Tensor]:
        """Cut by columns of the weight: outputs are summed over ranks; the bias comes after the sum."""
        yield Tensor(f"{name}.weight", (hidden, ins), (block,), out_of, Cut(1, "tp", parts))
        if model.bias:
            yield Tensor(f"{name}.bias", (hidden,), (block,), Init(), partial=("sequence",))

    qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
    yield from _norm(model, "input_layernorm", hidden, block, "sequence")
    yield from column("self_attn.q_proj", heads * width, heads, qkv_bias)
    yield from column("self_attn.k_proj", kv_heads * width, kv_heads, qkv_bias)
    yield from column("self_attn.v_proj", kv_heads * width, kv_heads, qkv_bias)
    if model.qk_norm:
        yield from _norm(model, "self_attn.q_norm", width, block, "tp")
        yield from _norm(model, "self_attn.k_norm", width, block, "tp")
    yield from row("self_attn.o_proj", heads * width, heads)
    yield from _norm(model, "post_attention_layernorm", hidden, block, "sequence")
    if model.activation == "swiglu":
        yield from column("mlp.gate_proj", ffn, ffn, model.bias)
    yield from column("mlp.up_proj", ffn, ffn, model.bias)
    yield from row("mlp.down_proj", ffn, ffn)


def _norm(model: ModelConfig, name: str, width: int, unit: Unit, partial: Partial) -> Iterator[Tensor]:
    ones = Init(constant=0.0 if model.norm_offset else 1.0)
    yield Tensor(f"{name}.weight", (width,), (unit,), ones, partial=(partial,))
    if model.norm == "layernorm":
        yield Tensor(f"{name}.bias", (width,), (unit,), Init(), partial=(partial,))


TABLE = Table(tensors, units)
