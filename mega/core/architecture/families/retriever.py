"""Decoder layers that attend to neighbours of each chunk of the text (Retro), and the encoder of the neighbours.

The encoder is part of the first layer with neighbours, because the encoder attends to the output of that layer's
self-attention for the chunk. The encoder uses the positions of the neighbours' tokens. Learned positions are rows of
the decoder's table, and rotary positions are used only if `retro_rope` is set (Megatron-LM uses none in this encoder).
Cross attention uses no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mega.core.architecture.families import parts
from mega.core.architecture.layer import Attention, Layer, NeighbourAttention, Norm
from mega.core.config.retriever import reading_layers
from mega.core.config.sections import ModelConfig

ATTENTION = "inter_attn"
"""Names of a layer's attention to neighbours and of the encoder's attention to the chunk."""


def layer(options: ModelConfig, number: int) -> Layer:
    """Return layer `number` of a decoder."""
    plain = parts.layer(options, number=number)
    reading = reading_layers(options, options.layers)
    if number not in reading:
        return plain
    mixer = NeighbourAttention(
        attention=_attention(options, "neighbours"),
        chunk=options.retro_chunk_length,
        neighbours=options.retro_neighbours,
        width=options.retro_chunk_length * options.retro_retrieved_chunks,
        encoder=_encoder(options) if number == reading[0] else (),
        prefix="retriever",
    )
    attention, feed_forward = plain.branches
    branch = parts.branch(options, mixer, parts.norm(options, f"{ATTENTION}_layernorm"))
    gated = replace(branch, multiplier=options.retro_gate * options.residual_multiplier)
    return replace(plain, branches=(attention, gated, feed_forward))


def _encoder(options: ModelConfig) -> tuple[Layer, ...]:
    """Return the bidirectional layers of the encoder. The first layer also attends to the chunk of the text."""
    dropped = replace(
        options,
        hidden_dropout=options.retro_encoder_hidden_dropout,
        attention_dropout=options.retro_encoder_attention_dropout,
    )
    self_attention, feed_forward = parts.layer(dropped, causal=False).branches
    attention = parts.self_attention(dropped, causal=False)
    attention = replace(attention, window=None, padding="masked", rope=attention.rope if options.retro_rope else None)
    self_attention = replace(self_attention, mixer=attention)
    reader = parts.branch(dropped, _attention(dropped, "reader"), parts.norm(options, f"{ATTENTION}_layernorm"))
    first, other = (
        Layer(branches=(self_attention, reader, feed_forward)),
        Layer(branches=(self_attention, feed_forward)),
    )
    return first, *[other] * (options.retro_encoder_layers - 1)


def _attention(options: ModelConfig, source: Literal["neighbours", "reader"]) -> Attention:
    """Return attention, without positions, to tokens other than the layer's."""
    plain = replace(parts.cross_attention(options), padding="masked", source=source, name=ATTENTION)
    return replace(plain, q_norm=_renamed(plain.q_norm, "q_norm"), k_norm=_renamed(plain.k_norm, "k_norm"))


def _renamed(norm: Norm | None, name: str) -> Norm | None:
    return None if norm is None else replace(norm, name=f"{ATTENTION}.{name}")
