"""Every LOGICAL tensor of a model, once: name, whole shape, cuts, init, decay, places, partial gradients.

One table, read by everything that must agree about a model: layers (which tensors, how large, how cut),
initialisation, gradient norms and reductions, optimizer spans, checkpoints, converters and the memory
estimator. It refuses to know torch, ranks, and how layers fuse their tensors.

    >>> tensors = inventory(ModelConfig(layers=1, hidden=8, heads=2, vocab=10, positions=4, ...))
    >>> next(t for t in tensors if t.name.endswith("q_proj.weight"))
    Tensor(name='model.layers.0.self_attn.q_proj.weight', shape=(8, 8), cut=Cut(dim=0, axis='tp', parts=2), ...)

Names are Hugging Face's Llama names, so that a Llama checkpoint needs no renaming; GPT uses the same names
with biases and `model.embed_positions.weight` added. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod, sqrt
from typing import Literal

from mega.core.config.sections import ModelConfig

Place = int | Literal["embedding", "head"]
"""Where a tensor is used: a block's number, in front of the first block, or behind the last."""

Partial = Literal["tp", "sequence"]
"""Axes over which a rank's gradient is only a part of the whole: "tp" always (norms of a rank's own heads),
"sequence" when the tensor ranks split the sequence (norms and row biases see only their tokens)."""


@dataclass(frozen=True)
class Cut:
    """`dim` is shared out over `axis` in equal runs of whole parts (heads, columns, vocabulary rows).

    multiple: 0 if `parts` must divide by the axis; else the dim is first padded to a multiple of
        `multiple x axis size`, and ranks at the end hold padding.
    """

    dim: int
    axis: str
    parts: int
    multiple: int = 0


@dataclass(frozen=True)
class Init:
    """Initial values: a constant, or N(0, std) when std is positive."""

    constant: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """One logical tensor. Two places mean one tensor used twice (tied embeddings)."""

    name: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    init: Init
    cut: Cut | None = None
    partial: tuple[Partial, ...] = ()

    @property
    def decays(self) -> bool:
        """Megatron's rule: neither biases nor one-dimensional tensors decay."""
        return len(self.shape) > 1

    @property
    def elements(self) -> int:
        return prod(self.shape)


def inventory(model: ModelConfig) -> Iterator[Tensor]:
    """The logical tensors of a resolved model config, from the embedding to the head."""
    hidden, vocab = _known(model.hidden, "hidden"), _known(model.vocab, "vocab")
    normal = Init(std=model.init_std)
    rows = Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    ends: tuple[Place, ...] = ("embedding", "head") if model.tied else ("embedding",)
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), ends, normal, rows)
    if model.position == "learned":
        table = (_known(model.positions, "positions"), hidden)
        yield Tensor("model.embed_positions.weight", table, ("embedding",), normal, partial=("sequence",))
    for block in range(_known(model.layers, "layers")):
        for tensor in _block(model, block):
            yield replace(tensor, name=f"model.layers.{block}.{tensor.name}")
    yield from _norm(model, "model.norm", hidden, "head", "sequence")
    if not model.tied:
        yield Tensor("lm_head.weight", (vocab, hidden), ("head",), normal, rows)


def _block(model: ModelConfig, block: int) -> Iterator[Tensor]:
    hidden, ffn = _known(model.hidden, "hidden"), _known(model.ffn, "ffn")
    heads, kv_heads = _known(model.heads, "heads"), _known(model.kv_heads, "kv_heads")
    width, layers = _known(model.head_dim, "head_dim"), _known(model.layers, "layers")
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


def _norm(model: ModelConfig, name: str, width: int, place: Place, partial: Partial) -> Iterator[Tensor]:
    ones = Init(constant=0.0 if model.norm_offset else 1.0)
    yield Tensor(f"{name}.weight", (width,), (place,), ones, partial=(partial,))
    if model.norm == "layernorm":
        yield Tensor(f"{name}.bias", (width,), (place,), Init(), partial=(partial,))


@lru_cache(maxsize=16)
def parameters(model: ModelConfig) -> int:
    """Elements of all logical tensors: true vocabulary rows, tied tensors once."""
    return sum(tensor.elements for tensor in inventory(model))


def padded(parts: int, size: int, multiple: int) -> int:
    """`parts` rounded up to a multiple of `multiple x size`.

    >>> padded(50257, 1, 128), padded(50257, 8, 128)
    (50304, 51200)
    """
    unit = multiple * size
    return ceil(parts / unit) * unit


def _known(value: int | None, name: str) -> int:
    assert value is not None, f"model.{name} is not resolved"
    return value
