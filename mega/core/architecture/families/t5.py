"""The encoder-decoder language model of Megatron-LM, T5, which differs from Hugging Face's T5.

Tensor names are those of Hugging Face's BART, which has the same layers. Encoder, decoder and head share one embedding
table of tokens; encoder and decoder share one embedding table of positions.
"""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def t5(options: ModelConfig) -> Architecture:
    """Return T5's architecture, with an encoder that starts at the unit "embedding" and a decoder that starts at the
    unit "middle"."""
    first, second = options.stacks
    encoder, decoder = parts.layer(options, causal=False), parts.layer(options, memory=True)
    stacks = (
        parts.stack(options, lambda _: encoder, first, name="model.encoder"),
        parts.stack(options, lambda _: decoder, second, name="model.decoder", opens="middle", first=first),
    )
    return parts.architecture(
        options,
        input=parts.inputs(options),
        stacks=stacks,
        output=Output(words=Words(tied=True, bias=True, transform=None), pooler=False, rows=None),
    )
