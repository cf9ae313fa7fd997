"""Encoder-decoder language models: Megatron-LM's T5, which is not Hugging Face's.

Names are those of Hugging Face's BART, whose layers are alike. Encoder, decoder and head share one table of tokens,
encoder and decoder one of positions.
"""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def t5(options: ModelConfig) -> Architecture:
    """An encoder, which opens at "embedding", and a decoder, which opens at "middle"."""
    first, second = options.stacks
    encoder = parts.stack(options, parts.layer(options, causal=False), first, name="model.encoder")
    decoder = parts.stack(
        options, parts.layer(options, memory=True), second, name="model.decoder", opens="middle", first=first
    )
    return parts.architecture(
        options,
        input=parts.inputs(options),
        stacks=(encoder, decoder),
        output=Output(words=Words(tied=True, bias=True, transform=None), pooler=False, rows=None),
    )
