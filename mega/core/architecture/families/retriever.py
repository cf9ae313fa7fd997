"""Layers of a decoder that read neighbours of each chunk of its text (Retro), and the encoder that reads them first.

The encoder is in the first of these layers, since it reads what this layer's attention made of the chunk. It has no
positions but those of the neighbours' tokens: learned ones are of the decoder's table; rotary ones are left out in
Megatron-LM. No cross attention has any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mega.core.architecture.families import parts
from mega.core.architecture.layer import Attention, Layer, NeighbourAttention, Norm
from mega.core.config.retriever import reading_layers
from mega.core.config.sections import ModelConfig

ATTENTION = "inter_attn"
"""What a layer's attention to neighbours is called, and in their encoder that to the chunk."""


def layer(options: ModelConfig, number: int) -> Layer:
    """Layer `number` of a decoder."""
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
    own, feed_forward = plain.branches
    branch = parts.branch(options, mixer, parts.norm(options, f"{ATTENTION}_layernorm"))
    gated = replace(branch, multiplier=options.retro_gate * options.residual_multiplier)
    return replace(plain, branches=(own, gated, feed_forward))


def _encoder(options: ModelConfig) -> tuple[Layer, ...]:
    """Layers that read in both directions; the first attends to the chunk whose neighbour it reads."""
    dropped = replace(
        options,
        hidden_dropout=options.retro_encoder_hidden_dropout,
        attention_dropout=options.retro_encoder_attention_dropout,
    )
    own, feed_forward = parts.layer(dropped, causal=False).branches
    attention = parts.self_attention(dropped, causal=False)
    attention = replace(attention, window=None, padding="masked", rope=attention.rope if options.retro_rope else None)
    own = replace(own, mixer=attention)
    reader = parts.branch(dropped, _attention(dropped, "reader"), parts.norm(options, f"{ATTENTION}_layernorm"))
    first, other = Layer(branches=(own, reader, feed_forward)), Layer(branches=(own, feed_forward))
    return first, *[other] * (options.retro_encoder_layers - 1)


def _attention(options: ModelConfig, source: Literal["neighbours", "reader"]) -> Attention:
    """Attention to other tokens, whose positions it does not know."""
    plain = replace(parts.cross_attention(options), padding="masked", source=source, name=ATTENTION)
    return replace(plain, q_norm=_renamed(plain.q_norm, "q_norm"), k_norm=_renamed(plain.k_norm, "k_norm"))


def _renamed(norm: Norm | None, name: str) -> Norm | None:
    return None if norm is None else replace(norm, name=f"{ATTENTION}.{name}")
